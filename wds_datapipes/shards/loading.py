"""From the addresses of shards to their members: open, decompress, read, close."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from wds_datapipes.counters import COUNTERS
from wds_datapipes.errors import ChangedShardError, CorruptShardError, ShardError, TruncatedShardError
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.prefetch import ShardPrefetcher
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.url_safety import refuse_unsafe
from wds_datapipes.io.urls import OpeningURL
from wds_datapipes.on_error.policy import ErrorPolicy, OnError
from wds_datapipes.shards.position import Resume
from wds_datapipes.shards.seeking import check_unchanged, open_archive, opened_parts
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import MemberTuple, ShardURL

__all__ = ["load_wds_shards"]

#: All of a shard: from its beginning to its end.
WHOLE = (0, -1)


def load_wds_shards(
    source: Iterable[str | os.PathLike[str]],
    *,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    on_error: OnError = "raise",
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
    read_ahead: int = 0,
    limits: ReadLimits = DEFAULT_LIMITS,
    safe: bool = False,
    resume: Resume | None = None,
) -> Iterator[MemberTuple]:
    """Read each shard of ``source`` to its end, one after the other, and yield its members as plain tuples.

    What a policy passes over is the rest of a shard. Its members so far were handed on; their ``url`` stays marked as
    not complete, and the grouping stage drops the sample that may lack a field.

    Remote shards are read ahead of that, by up to ``read_ahead`` bytes: see `ShardPrefetcher`.

    What a shard may ask for are its ``limits``. With ``safe``, none is opened that is not on a network.

    With ``resume``, only what is left is read: samples that are to be read again, and what comes after them.
    """
    policy = ErrorPolicy(on_error, "load_wds_shards")
    asked = {"storage_options": storage_options, "timeout_s": timeout_s, "retries": retries, "safe": safe or None}
    options = {name: value for name, value in asked.items() if value is not None}
    last = sys.maxsize if resume is None else resume.last

    def is_whole(number: int) -> bool:
        return number <= last and (resume is None or resume.spans(number) == [WHOLE])

    ahead = ShardPrefetcher(source, read_ahead, options, is_whole)
    for number, address in enumerate(policy.counted(ahead)):
        if number > last:  # the list may have no end
            break
        if not isinstance(address, str | os.PathLike):
            raise TypeError(
                f"load_wds_shards reads shards by their URL, so its source has to yield str, not "
                f"{type(address).__name__}: {reprlib.repr(address)}"
            )
        path = os.fspath(address)
        if safe:
            refuse_unsafe(path)  # whatever the policy is for bad data
        archive = redact(path)
        spans = [WHOLE] if resume is None else resume.spans(number)
        if not spans:
            continue
        url = ShardURL(path)
        COUNTERS.opened(archive)
        try:
            with ExitStack() as opened:
                parts = opened_parts(path, options, opened, spans[-1][0], limits=limits) if spans != [WHOLE] else None
                for start, end in spans:
                    url.complete = True  # the part before
                    url = ShardURL(path, local_path(path))
                    url.number, url.end = number, end
                    members = read_members(
                        open_archive(path, options, opened, ahead.open, limits=limits)
                        if parts is None
                        else parts.at(start, end),
                        url=url,
                        archive=archive,
                        select_files=select_files,
                        rename_files=rename_files,
                        ignore_zeros=ignore_zeros,
                        end_marker=end_marker,
                        start=start,
                        stop=end,
                        limits=limits,
                    )
                    yield from members if parts is None else check_unchanged(members, archive, start, end)
            url.complete = True
        except ChangedShardError:
            raise  # whatever the policy is for bad data: this is about the state
        except ShardError as error:
            if isinstance(path, OpeningURL) and isinstance(error, CorruptShardError | TruncatedShardError):
                path.disown(error)
            if not policy.goes_on(error, url=path):
                return
        finally:
            url.complete = url.complete is True
    policy.finish()
