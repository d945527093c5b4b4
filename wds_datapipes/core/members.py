"""From the addresses of shards to their members: open, decompress, read, close."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, BinaryIO

from wds_datapipes.core.compression import decompressed
from wds_datapipes.core.headers import EndMarker
from wds_datapipes.core.ledger import LEDGER
from wds_datapipes.core.openers import local_path, open_url, redact
from wds_datapipes.core.policy import ErrorPolicy, OnError
from wds_datapipes.core.progress import Resume
from wds_datapipes.core.tar import read_members
from wds_datapipes.core.types import MemberTuple, ShardURL
from wds_datapipes.errors import ReadFailed, ShardError

__all__ = ["load_wds_shards"]


def load_wds_shards(
    source: Iterable[str | os.PathLike[str]],
    *,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    on_error: OnError = "raise",
    storage_options: Mapping[str, Any] | None = None,
    resume: Resume | None = None,
) -> Iterator[MemberTuple]:
    """Read each shard of ``source`` to its end, one after the other, and yield its members as plain tuples.

    What a policy passes over is the rest of a shard. Its members so far were handed on; their ``url`` stays marked as
    not complete, and the grouping stage drops the sample that may lack a field.

    With ``resume``, only what is left is read: samples that are to be read again, and what comes after them.
    """
    policy = ErrorPolicy(on_error, "load_wds_shards")
    for number, address in enumerate(policy.counted(source)):
        if not isinstance(address, str | os.PathLike):
            raise TypeError(
                f"load_wds_shards reads shards by their URL, so its source has to yield str, not "
                f"{type(address).__name__}: {reprlib.repr(address)}"
            )
        path = os.fspath(address)
        archive = redact(path)
        for start, end in [(0, -1)] if resume is None else resume.spans(number):
            url = ShardURL(path, local_path(path))
            url.number, url.end = number, end
            LEDGER.opened(archive)
            try:
                with ExitStack() as opened:
                    members = read_members(
                        _opened(path, storage_options, opened),
                        url=url,
                        archive=archive,
                        select_files=select_files,
                        rename_files=rename_files,
                        ignore_zeros=ignore_zeros,
                        end_marker=end_marker,
                        start=start,
                    )
                    yield from members if end < 0 else _before(end, members)
                url.complete = True
            except ShardError as error:
                if not policy.goes_on(error, url=path):
                    return
            finally:
                url.complete = url.complete is True
    policy.finish()


def _before(end: int, members: Iterator[MemberTuple]) -> Iterator[MemberTuple]:
    return takewhile(lambda member: member[3] < end, members)


def _opened(path: str, storage_options: Mapping[str, Any] | None, opened: ExitStack) -> BinaryIO:
    """Open a shard; ``opened`` closes it."""
    options = {} if storage_options is None else {"storage_options": storage_options}
    try:
        raw = opened.enter_context(open_url(path, **options))
        return opened.enter_context(decompressed(raw, url=path))
    except ShardError:
        raise
    except OSError as error:
        raise ReadFailed(f"{redact(path)} could not be read to its end: {type(error).__name__}: {error}") from error
