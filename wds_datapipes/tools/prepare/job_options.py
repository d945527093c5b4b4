"""Options for creating or converting a whole dataset, besides those of its shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wds_datapipes.arguments import check_choice, check_optional_integer, checks_calls
from wds_datapipes.hints import JOURNAL
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.writing.shard_names import journal_path


@checks_calls
@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of `create_shards` and `convert_shards` for their work: journal, retries, input and progress.

    Args:
        journal: the local path of the journal of finished shards, with which a repeated call writes only missing or
            outdated ones: ``True`` for a file next to local shards, ``False`` for none. `convert_shards` keeps one by
            default, `create_shards` does not.
        retries: the number of retries per shard, unless the error is deterministic, such as a TypeError of the
            function; 2 by default for `convert_shards`, 0 for `create_shards`.
        remove_old: remove surplus numbered shards of an earlier, larger run at the end, instead of raising an error
            before anything is written.
        end_marker: of the input of `convert_shards`: ``"optional"`` accepts archives without the two blocks of zeros at
            their end, and ``"final"`` ignores data that follow them.
        limits: the limits on memory and header sizes for reading and decoding, see `ReadLimits`.
        input_options: options for the file system of the input, if they differ from those of the output.
        progress: show a progress bar if standard error is a terminal and rich is installed.

    Raises:
        TypeError, ValueError: an option is invalid.
    """

    journal: bool | str | os.PathLike[str] | None = None
    retries: int | None = None
    remove_old: bool = False
    end_marker: EndMarker = "required"
    limits: ReadLimits = DEFAULT_LIMITS
    input_options: Mapping[str, Any] | None = field(default=None, repr=False)
    progress: bool = True

    def __post_init__(self) -> None:
        check_optional_integer("retries", self.retries, 0)
        check_choice("end_marker", self.end_marker, EndMarker)

    def journal_of(self, pattern: str, *, by_default: bool) -> str | None:
        """Return the path of the journal of shards with names of a pattern, or None if there is none."""
        kept = by_default if self.journal is None else self.journal
        return None if kept is False else journal_path(pattern, None if kept is True else kept, 0, 1, hint=JOURNAL)


#: The default options.
DEFAULT_JOB = JobOptions()
