"""Shard contents: the index of the readable part of a shard, and its faults."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

from wds_datapipes import errors
from wds_datapipes.errors import MissingDependencyError, ShardError, StaleSidecarError, UnknownSchemeError, WdsError
from wds_datapipes.index.format.builder import index_scan
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.shard_index import IndexedSample, ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.types import MemberTuple, Sample


class ScanKeywords(TypedDict, total=False):
    """The keyword arguments of `ScanOptions`, for functions that forward them."""

    key_rule: KeyRule
    end_marker: EndMarker
    storage_options: Mapping[str, Any] | None
    limits: ReadLimits


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """Options of functions that examine a whole dataset for reading its shards.

    Attributes:
        key_rule: splits member names into keys and fields.
        end_marker: ``"optional"`` accepts archives without the two blocks of zeros at the end, and ``"final"`` ignores
            data that follow them.
        storage_options: passed to remote file systems.
        limits: the limits on memory and header sizes, see `ReadLimits`.
    """

    key_rule: KeyRule = first_dot
    end_marker: EndMarker = "required"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    limits: ReadLimits = DEFAULT_LIMITS

    def read_samples(self, urls: Iterable[str], *, on_error: OnError = "raise", **grouping: Any) -> Iterator[Sample]:
        """Yield the samples of shards, with their fields as bytes; ``grouping`` is passed to `group_samples`."""
        options = ReadOptions(
            end_marker=self.end_marker, on_error=on_error, storage_options=self.storage_options, limits=self.limits
        )
        return group_samples(read_shards(urls, options), key_rule=self.key_rule, on_error=on_error, **grouping)


#: The default options.
DEFAULT_SCAN = ScanOptions()

#: The number of recorded names of files that belong to no sample.
MAX_STRAY_NAMES = 3


@hides_credentials
class ShardFault(NamedTuple):
    """A fault of a shard.

    Attributes:
        shard: its URL, without credentials.
        kind: the error that reading would raise, such as ``"TruncatedShardError"``.
        key: the sample, or "".
        field: the field, or "".
        message: the full error message.
    """

    shard: str
    kind: str
    key: str
    field: str
    message: str

    @property
    def error(self) -> WdsError:
        """The error that reading would raise."""
        error: WdsError = getattr(errors, self.kind)(self.message)
        return error


@dataclass
class ShardContents:
    """The contents of a shard according to its headers.

    Attributes:
        url: the shard.
        index: the index of the samples. For a truncated shard, it has no size and omits the last sample, which may lack
            a field.
        faults: the faults in the order found.
        strays: the number of files that belong to no sample.
        stray_names: some of their names.
    """

    url: str
    index: ShardIndex
    faults: list[ShardFault] = field(default_factory=list)
    strays: int = 0
    stray_names: list[str] = field(default_factory=list)

    @cached_property
    def samples(self) -> list[IndexedSample]:
        """The samples, in order."""
        return list(self.index)

    @property
    def bytes(self) -> int | None:
        """The size of the file, or ``None`` if it was not read to the end."""
        return self.index.facts.bytes


def read_contents(url: str, options: ScanOptions = DEFAULT_SCAN, *, digest: bool = False) -> ShardContents:
    """Read the headers of a shard as far as possible and record its faults.

    The data is skipped if the shard supports range requests.

    Args:
        url: the shard, a path or a URL.
        options: how it is read.
        digest: compute the SHA-256 of the file, which requires reading all of it.

    Raises:
        UnknownSchemeError, MissingDependencyError: shards of this kind are not supported.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "four"}])
        >>> contents = read_contents(url)
        >>> [(sample.key, sample.fields) for sample in contents.samples], contents.faults
        ([('x', {'txt': 3}), ('y', {'txt': 4})], [])
    """
    archive = redact(url)
    faults: list[ShardFault] = []

    def note(error: Exception, key: str, field: str) -> None:
        faults.append(ShardFault(archive, type(error).__name__, key, field, str(error)))

    scan = ShardScan(
        url,
        digest=digest,
        end_marker=options.end_marker,
        storage_options=options.storage_options,
        limits=options.limits,
    )
    strays, stray_names = 0, list[str]()

    def readable() -> Generator[MemberTuple, None, None]:
        nonlocal strays
        try:
            for member in scan:
                name = member[1]
                if options.key_rule(name) is None and not is_meta(name):
                    strays += 1
                    stray_names.extend([name] if strays <= MAX_STRAY_NAMES else [])
                yield member
        except (MissingDependencyError, UnknownSchemeError):
            raise
        except (ShardError, StaleSidecarError) as error:
            note(error, "", "")

    rules = IndexOptions(key_rule=options.key_rule)
    index = index_scan(scan, readable(), options=rules, on_repeated_key="raise", on_fault=note)
    return ShardContents(url, index, faults, strays, stray_names)
