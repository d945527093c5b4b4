"""Files opened by fsspec, read in blocks that have timeouts and belong to the same version of the file."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from wds_datapipes.io.daemon_threads import start_call, wait_for
from wds_datapipes.io.file_systems import VERSION_FACTS, VERSION_NUMBERS
from wds_datapipes.io.remote.known_stores import known_store
from wds_datapipes.io.remote.source import MonitoredFile, OpenedSource, etag_of, version_of
from wds_datapipes.io.streams import move_bytes

if TYPE_CHECKING:
    from wds_datapipes.io.remote.filesystem import RemotePath


#: The commit in a path of the Hugging Face Hub, whose files never change.
COMMIT = re.compile("@[0-9a-f]{40}/")
#: Bytes per range request.
BLOCK_BYTES = 8 << 20


class FileExpired(OSError):
    """The file was replaced while it was read. s3fs has an equivalent error of the same name."""


class FsspecStore:
    """An fsspec file that can be opened at any offset.

    Args:
        remote: the path of the file.
        keep_open: keep the library's files open for further ranges, until `close`.
    """

    def __init__(self, remote: RemotePath, *, keep_open: bool) -> None:
        self.remote, self._keeps_open, self._is_seekable = remote, keep_open, False
        self._idle: list[Any] = []
        #: A lock by the identity of a file, because some file systems, such as the one in memory, always return the
        #: same file object.
        self._locks: dict[int, threading.Lock] = {}

    def send(self, start: int, end: int) -> None:
        """Return None, because the file systems of fsspec wait for each answer."""

    def open_first(self, count: int) -> OpenedSource:
        """Open the first ``count`` bytes if their version has a strong ETag, otherwise the whole file."""
        return self.open(0, count, is_first=True)

    def open(self, start: int, end: int | None = None, *, is_first: bool = False) -> OpenedSource:
        """Open the file at an offset, or at its beginning if it cannot seek."""
        try:
            file = self._idle.pop()  # each read of it seeks
        except IndexError:
            file, start = self._open(start)
        details = getattr(file, "details", None)
        details = details if isinstance(details, Mapping) else {}
        version = version_of(*(details.get(name) for name in VERSION_FACTS))
        etag, size = etag_of(details), details.get("size")
        # Unlike servers, some libraries report strong ETags without quotes.
        is_strong = etag is not None and not etag.lower().startswith("w/")
        is_strong = is_strong or any(details.get(name) is not None for name in VERSION_NUMBERS)
        if is_first and not (is_strong and self._is_seekable and size):
            end = None
        lock = self._locks.setdefault(id(file), threading.Lock()) if self._is_seekable else None
        may_mix = self.remote.file_system.may_mix_versions and not COMMIT.search(self.remote.path)
        blocks = BlockFile(self, file, lock, start, end, version if may_mix else ())
        file = MonitoredFile(blocks, self.remote)
        stop = end if size is None or end is None else min(end, size)
        return OpenedSource(file, start, size, version, etag, is_strong, stop, can_seek=self._is_seekable)

    def close(self) -> None:
        """Close the files that are kept open."""
        self._keeps_open = False
        while self._idle:
            with suppress(Exception):  # the connection may be broken
                self._idle.pop().close()

    def _open(self, start: int) -> tuple[Any, int]:
        """Open the file; return it and its offset, which is 0 if it cannot seek."""
        if start:
            self.remote.forget_listing()
        file = wait_for(start_call(self._open_file), self.remote.timeouts.silent_s)
        if start or self._keeps_open:
            try:
                file.seek(start)
                self._is_seekable = self._keeps_open
            except (AttributeError, OSError, ValueError):  # includes io.UnsupportedOperation
                start, self._keeps_open = 0, False
        return file, start

    def release(self, file: Any) -> None:
        """Keep a file for the next range, or close it."""
        self._idle.append(file)
        if not self._keeps_open:
            self.close()

    def _open_file(self) -> Any:
        filesystem = self.remote.filesystem_of_file()
        file = filesystem.open(self.remote.path, "rb", block_size=BLOCK_BYTES, cache_type="none")
        if callable(stat := getattr(file, "stat", None)):  # of paramiko
            facts = stat()
            file.details = {"size": facts.st_size, "mtime": facts.st_mtime}
        _ = getattr(file, "details", None)  # some file systems send a request for it
        return file

    def current_version(self) -> tuple[str, ...]:
        """Return the version that the store has now."""
        self.remote.forget_listing()
        details = self.remote.filesystem.info(self.remote.path)
        return version_of(*(details.get(name) for name in VERSION_FACTS))


class BlockFile:
    """Reads an fsspec file sequentially, block by block.

    A thread fetches each block, because a library may block for any length of time.

    Args:
        store: the store of the file, which gets the file back unless reading fails.
        file: the file, at its next byte.
        lock: held while the file seeks and reads, if other readers may share it; None for a file of this reader.
        start: the offset of the next byte.
        end: where to end; None for the end of the file.
        version: the version of the file, if the store does not check it itself.
    """

    def __init__(
        self,
        store: FsspecStore,
        file: Any,
        lock: threading.Lock | None,
        start: int,
        end: int | None,
        version: tuple[str, ...],
    ) -> None:
        self._store, self._file, self._version = store, file, version
        self._file_lock, self._position, self._end = lock, start, end
        self._block = memoryview(b"")
        self._attempt: Future[bytes] | None = None
        self._is_closed = self._has_failed = False
        self._lock = threading.Lock()

    def readinto(self, view: memoryview) -> int:
        """Read at most ``len(view)`` bytes; 0 at the end.

        Raises:
            FileExpired: the file was replaced since it was opened.
            TooSlowError: fetching a block takes too long.
        """
        if not self._block:
            self._block = memoryview(self._fetch())
        count, self._block = move_bytes(self._block, view)
        return count

    def close(self) -> None:
        """Close the file; if a thread is still fetching a block, that thread closes it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            attempt = self._attempt
        if attempt is not None:
            with suppress(InvalidStateError):  # it has ended
                attempt.set_exception(ValueError("the file is closed"))
        elif self._has_failed:
            self._file.close()
        else:
            self._store.release(self._file)

    abort = close

    def _fetch(self) -> bytes:
        with self._lock:
            if self._is_closed:
                raise ValueError("the file is closed")
            self._attempt = attempt = start_call(self._next)
        remote = self._store.remote
        with known_store(remote.store).limit.watch(time.perf_counter()):
            return wait_for(attempt, remote.timeouts.block_s)

    def _next(self) -> bytes:
        """Return the next block; runs in another thread."""
        try:
            count = BLOCK_BYTES if self._end is None else min(self._end - self._position, BLOCK_BYTES)
            with self._file_lock or nullcontext():
                if self._file_lock is not None:
                    self._file.seek(self._position)
                data: bytes = self._file.read(count)
            is_first, self._position = not self._position, self._position + len(data)
            # The first block belongs to any version; the file may have been opened long before any other one.
            if data and self._version and not is_first and self._store.current_version() != self._version:
                raise FileExpired("the file was replaced while it was read")
            return data
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._lock:
                self._attempt = None
                is_abandoned = self._is_closed
            if is_abandoned:
                self._file.close()
