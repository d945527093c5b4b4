"""Part fetch: a thread that reads a part of a remote file into memory, for a reader that takes it in order."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from wds_datapipes.io.daemon_threads import join_thread
from wds_datapipes.io.remote.in_flight import abort_request

if TYPE_CHECKING:
    from wds_datapipes.io.remote.resuming_stream import ResumingStream

#: Parts are read in blocks of at most this many bytes.
BLOCK_BYTES = 1 << 20


class Block:
    """A block of memory that is partly filled with fetched bytes."""

    __slots__ = ("data", "end", "start")

    def __init__(self, data: bytearray) -> None:
        self.data, self.start, self.end = data, 0, 0


class PartFetch:
    """Reads a part of a file in a thread, up to a limit.

    Args:
        open_part: opens the part.
        max_bytes: the maximum number of bytes to buffer; a part that is longer waits for its reader.
        unused: the memory of blocks that were read, for reuse by any of the threads.
        on_first: called with the number of seconds until the first bytes.

    Attributes:
        block_bytes: the size of a block.
        size: the size of the part in bytes; None if it is unknown or not known yet.
        has_ended: whether the thread has read all of the part, or has failed.
    """

    def __init__(
        self,
        open_part: Callable[[], ResumingStream],
        max_bytes: int,
        unused: list[bytearray],
        on_first: Callable[[float], object],
    ) -> None:
        self._open, self._max_bytes, self._unused, self._on_first = open_part, max_bytes, unused, on_first
        self.block_bytes = min(BLOCK_BYTES, max_bytes)
        #: The blocks to read; the thread appends to the last one.
        self._blocks: deque[Block] = deque()
        self._buffered = self._consumed = 0
        #: The number of buffered bytes that the reader waits for.
        self._awaited = 0
        self.size: int | None = None
        self._error: BaseException | None = None
        self.has_ended = self._is_stopped = False
        self._changed = threading.Condition()
        self._stream: ResumingStream | None = None
        self._thread = threading.Thread(target=self._run, name="wds-read-ahead", daemon=True)
        self._thread.start()

    @property
    def reserved_bytes(self) -> int:
        """The number of bytes that the thread holds or may still buffer."""
        if self.has_ended:
            return self._buffered
        remaining = sys.maxsize if self.size is None else self.size - self._consumed
        return min(remaining, self._max_bytes)

    @property
    def is_open(self) -> bool:
        """Whether the store has answered, or the thread has failed."""
        return self._stream is not None or self.has_ended

    @property
    def etag(self) -> str | None:
        """The ETag of the file, if its store reports one; None if it is not open yet."""
        return None if self._stream is None else self._stream.etag

    @property
    def is_exhausted(self) -> bool:
        """Whether all of the part was taken."""
        return self.has_ended and not self._buffered and self._error is None

    def allow(self, max_bytes: int) -> None:
        """Raise the limit."""
        with self._changed:
            if max_bytes > self._max_bytes:
                self._max_bytes = max_bytes
                self._changed.notify_all()

    def is_ready(self, count: int) -> bool:
        """Whether this many bytes, as many as can be buffered, or all remaining bytes are buffered."""
        return self.has_ended or self._buffered >= min(count, self._max_bytes)

    def wait(self, count: int) -> None:
        """Wait until this many bytes or all remaining bytes are buffered, or the size of the part becomes known."""
        with self._changed:
            if not self.is_ready(count):
                self._awaited = min(count, self._max_bytes)
                self._changed.wait()
                self._awaited = 0

    def peek(self, size: int) -> bytes:
        """Return at most ``size`` of the buffered bytes without consuming them.

        Raises:
            Exception: the error that reading raised in the thread, if no bytes are left.
        """
        with self._changed:
            self._raise_error()
            if not self._buffered:
                return b""
            block = self._blocks[0]
            return bytes(block.data[block.start : min(block.start + size, block.end)])

    def take(self, size: int) -> bytes:
        """Return at most ``size`` of the buffered bytes.

        Raises:
            Exception: the error that reading raised in the thread, if no bytes are left.
        """
        views: list[memoryview] = []
        used: list[bytearray] = []
        with self._changed:
            self._raise_error()
            left = min(size, self._buffered)
            if self._buffered >= self._max_bytes:
                self._changed.notify_all()
            self._buffered -= left
            self._consumed += left
            while left:
                block = self._blocks[0]
                view = memoryview(block.data)[block.start : min(block.start + left, block.end)]
                views.append(view)
                left -= len(view)
                block.start += len(view)
                if block.start == len(block.data):
                    used.append(self._blocks.popleft().data)
            if self.has_ended and not self._buffered and self._blocks:
                used.append(self._blocks.popleft().data)
            data = b"".join(views)
        self._unused.extend(used)
        return data

    def stop(self) -> None:
        """Stop reading, without waiting for the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        abort_request(self._thread)
        if (stream := self._stream) is not None:
            stream.abandon()

    def join(self, until: float) -> None:
        """Wait for the thread, at most until a time of `time.monotonic`."""
        if join_thread(self._thread, until, abort_request):
            self._unused.extend(block.data for block in self._blocks)
        self._blocks.clear()
        self._buffered = 0

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            with self._open() as stream:
                with self._changed:
                    self._stream, self.size = stream, stream.size
                    self._changed.notify_all()
                while not self._is_stopped:
                    block = self._next_block()
                    count = stream.readinto(memoryview(block.data)[block.end :])
                    if not count:
                        break
                    if begin:
                        self._on_first(time.perf_counter() - begin)
                        begin = 0.0
                    self._append(block, count)
        except BaseException as error:  # noqa: BLE001  `take` raises it
            self._error = error
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if not self._buffered and self._error is not None:
            raise self._error

    def _next_block(self) -> Block:
        """Return a block with space at its end."""
        with self._changed:
            block = self._blocks[-1] if self._blocks else None
            if block is not None and block.start == block.end:
                block.start = block.end = 0
            if block is None or block.end == len(block.data):
                unused = bytearray()
                with suppress(IndexError):  # another thread takes it
                    unused = self._unused.pop()
                # The block of the short last part of a shard would let those of the next ones be read in tiny pieces.
                block = Block(unused if len(unused) >= self.block_bytes else bytearray(self.block_bytes))
                self._blocks.append(block)
            return block

    def _append(self, block: Block, count: int) -> None:
        with self._changed:
            block.end += count
            self._buffered += count
            if 0 < self._awaited <= self._buffered:
                self._changed.notify_all()
            # A complete part needs no space, and gives its connection back.
            while self._buffered >= self._max_bytes and not self._is_stopped and not self._is_complete:
                self._changed.wait()

    @property
    def _is_complete(self) -> bool:
        return self.size is not None and self._consumed + self._buffered >= self.size
