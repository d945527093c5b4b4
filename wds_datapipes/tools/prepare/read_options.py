"""Options for reading a whole dataset: the rules, the stores and the limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_datapipes.arguments import check_choice, checks_calls
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, check_key_rule, first_dot
from wds_datapipes.shards.loading import TarOptions, read_shards
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Sample


@checks_calls
@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for reading a whole dataset, of `verify_shards` and `dataset_stats`.

    Args:
        key_rule: splits member names into keys and fields.
        end_marker: ``"optional"`` accepts archives without the two blocks of zeros at the end, and ``"final"`` ignores
            data that follow them.
        storage_options: options for the file system of the shards.
        limits: the limits on memory and header sizes, see `ReadLimits`.

    Raises:
        TypeError, ValueError: an option is invalid.

    Examples:
        >>> from wds_datapipes import last_dot, verify_shards
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "1.5", "txt": "one"}, {"__key__": "1.6", "txt": "two"}])
        >>> [shard.samples for shard in verify_shards(url, options=ReadOptions(key_rule=last_dot))]
        [2]
    """

    key_rule: KeyRule = first_dot
    end_marker: EndMarker = "required"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    limits: ReadLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        check_key_rule(self.key_rule)
        check_choice("end_marker", self.end_marker, EndMarker)


#: The default options.
DEFAULT_READING = ReadOptions()


def read_samples(
    urls: Iterable[str], options: ReadOptions, *, on_error: OnError = "raise", **grouping: Any
) -> Iterator[Sample]:
    """Yield the samples of shards, with their fields as bytes; ``grouping`` is passed to `group_samples`."""
    opening = TarOptions(
        end_marker=options.end_marker, on_error=on_error, storage_options=options.storage_options, limits=options.limits
    )
    return group_samples(read_shards(urls, opening), key_rule=options.key_rule, on_error=on_error, **grouping)
