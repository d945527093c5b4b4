"""Remote parts: a file on a store, fetched in parts by threads, and taken in order."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from wds_datapipes.errors import ShardReadError
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.io.openers import open_parts, open_url
from wds_datapipes.io.remote.known_stores import known_store
from wds_datapipes.io.remote.part_fetch import PartFetch
from wds_datapipes.io.urls import store_of
from wds_datapipes.redaction import redact

if TYPE_CHECKING:
    from wds_datapipes.io.remote.remote_file import RemoteFile
    from wds_datapipes.io.remote.resuming_stream import ResumingStream

#: How long closing waits for responses that are no longer needed, in seconds.
GRACE_S = 2.0


class RemoteParts:
    """Fetches a file. It is fetched in parts if its store sends them and identifies its version by a strong ETag.

    The first request is that for the first part; its answer has the size and the version of the file. A file without
    them comes with one answer, up to a limit ahead of its reader.

    Args:
        url: the file.
        options: passed to `open_url`.
        part_bytes: the size of a part; 0 to request the whole file.
        max_bytes: the maximum number of bytes to buffer, if the file comes with one answer.
        unused: the memory of blocks that were read, for reuse by any of the threads.
        file: the file, if it is open and has parts.
        start: the offset in it from which on it is fetched.

    Attributes:
        fetches: the parts that are held or being fetched, in order.
        store: the scheme and the host or bucket of the URL.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        part_bytes: int,
        max_bytes: int,
        unused: list[bytearray],
        file: RemoteFile | None = None,
        start: int = 0,
    ) -> None:
        self._url, self._options, self._unused = url, options, unused
        self._part_bytes, self._next, self._file = part_bytes, part_bytes if file is None else start, file
        self.store = store_of(url)
        self._is_stopped, self._until = threading.Event(), math.inf
        self.fetches: deque[PartFetch] = deque()
        self._process = os.getpid()
        if file is None:
            self._begin(self._open_first, part_bytes or max_bytes)
        else:
            self.begin_next()

    @property
    def reserved_bytes(self) -> int:
        """The number of bytes that are held, or that the threads may still buffer."""
        return sum(fetch.reserved_bytes for fetch in self.fetches)

    @property
    def block_bytes(self) -> int:
        """The size of a block of memory."""
        return self.fetches[0].block_bytes

    @property
    def count(self) -> int:
        """The number of parts that are held or being fetched."""
        return len(self.fetches)

    @property
    def in_flight(self) -> int:
        """The number of parts that are being fetched."""
        return sum(not fetch.has_ended for fetch in self.fetches)

    @property
    def is_open(self) -> bool:
        """Whether the store has answered, so that it is known whether there are further parts."""
        return self.fetches[0].is_open

    @property
    def size(self) -> int | None:
        """The size of the file in bytes; None if it is unknown or not known yet."""
        file = self._file
        return file.size if file is not None and file.has_parts else self.fetches[0].size

    @property
    def etag(self) -> str | None:
        """The ETag of the file, if its store reports one; None if it is not open yet."""
        return self.fetches[0].etag

    @property
    def next_bytes(self) -> int:
        """The size of the next part to begin; 0 if there is none, or it is not known yet."""
        return min(self._part_bytes, self.waiting_bytes)

    @property
    def waiting_bytes(self) -> int:
        """The number of bytes whose parts have not begun; 0 if it is not known yet."""
        file = self._file
        return 0 if file is None or not file.has_parts or file.size is None else file.size - self._next

    def begin_next(self) -> None:
        """Begin to fetch the next part."""
        start, count = self._next, self.next_bytes
        self._next += count
        file = cast("RemoteFile", self._file)
        self._begin(partial(file.part, start, start + count), count)

    def allow(self, max_bytes: int) -> None:
        """Raise the limit of a file that comes with one answer."""
        self._check_process()
        if self.size is not None and not self._is_in_parts:
            self.fetches[0].allow(max_bytes)

    def is_ready(self, count: int) -> bool:
        """Whether this many bytes are buffered, or all bytes that remain in the part.

        Raises:
            ShardReadError: this process was forked since then, so it has none of the threads.
        """
        self._check_process()
        while self.fetches[0].is_exhausted and (len(self.fetches) > 1 or self.next_bytes):
            if len(self.fetches) == 1:
                self.begin_next()
            self.fetches.popleft()
        return self.fetches[0].is_ready(count)

    def wait(self, count: int) -> None:
        """Wait until `is_ready` may be true, or there may be a next part to begin."""
        self.fetches[0].wait(count)

    def peek(self, size: int) -> bytes:
        """Return at most ``size`` of the buffered bytes without consuming them; see `PartFetch`."""
        return self.fetches[0].peek(size)

    def take(self, size: int) -> bytes:
        """Return at most ``size`` of the buffered bytes, none at the end of the file; see `PartFetch`."""
        return self.fetches[0].take(size)

    def stop(self) -> None:
        """Stop fetching, without waiting for the threads."""
        if os.getpid() != self._process:  # in a forked process: the threads run in the parent
            return
        self._is_stopped.set()
        self._until = min(self._until, time.monotonic() + GRACE_S)
        for fetch in self.fetches:
            fetch.stop()

    def close(self) -> None:
        """Stop fetching, and wait briefly for the threads."""
        if os.getpid() != self._process:
            return
        self.stop()
        for fetch in self.fetches:
            fetch.join(self._until)
        if self._file is not None:
            self._file.close()

    def _check_process(self) -> None:
        """Raise an error in a forked process, in which none of the threads runs and their locks may be held."""
        if os.getpid() != self._process:
            raise ShardReadError(
                f"{redact(self._url)} cannot be read on in a forked process, because threads of its parent (pid "
                f"{self._process}) fetch it. Begin to iterate in the process that reads"
            )

    @property
    def _is_in_parts(self) -> bool:
        return self._file is not None and self._file.has_parts

    def _begin(self, open_part: Any, max_bytes: int) -> None:
        note = known_store(self.store).note_answer
        with defer_interrupts():  # otherwise a started thread could be unknown and never stopped
            self.fetches.append(PartFetch(open_part, max_bytes, self._unused, note))

    def _open_first(self) -> ResumingStream:
        """Open the first part, or the whole file."""
        options = {**self._options, "pause": self._pause}
        if not self._part_bytes:
            return cast("ResumingStream", open_url(self._url, **options))
        self._file = file = cast("RemoteFile", open_parts(self._url, check=_accept, **options))
        if self._is_stopped.is_set():  # `close` may not have seen the file
            file.close()
            raise AbandonedError
        return file.begin(self._part_bytes)

    def _pause(self, seconds: float) -> None:
        """Wait before a retry."""
        if self._is_stopped.wait(seconds):
            raise AbandonedError


def _accept(_size: int | None, _etag: str | None) -> None:
    """Accept any version of a file."""


class AbandonedError(Exception):
    """The file is no longer needed."""
