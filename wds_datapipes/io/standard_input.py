"""Standard input, whose URL is ``-``."""

from __future__ import annotations

import io
import multiprocessing
import sys
import weakref
from typing import TYPE_CHECKING, BinaryIO, cast

from wds_datapipes.errors import ShardOpenError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["open_standard_input"]

#: The standard inputs of this process that were opened: one, unless a program replaces it.
_opened: weakref.WeakSet[io.BufferedIOBase] = weakref.WeakSet()


class StandardInput(io.RawIOBase):
    """Reads standard input, and leaves it open when it is closed itself."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        return self._source.readinto1(buffer)


def open_standard_input(url: str, /, **_options: object) -> BinaryIO:
    """Open standard input, which can be read once."""
    if multiprocessing.parent_process() is not None:
        raise ShardOpenError(
            f"The shard {url!r} is standard input, and a worker process has none. Read it with num_workers=0"
        )
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        raise ShardOpenError(f"The shard {url!r} is standard input, and this process has none")
    if source in _opened:
        raise ShardOpenError(
            f"The shard {url!r} is standard input, which was opened before and cannot be read twice. "
            "Write it to a file if more than one pass is needed"
        )
    _opened.add(source)
    return cast(BinaryIO, StandardInput(source))
