"""Remote sink: uploads to an object store, or writes under a temporary name and renames."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]  # it carries no types

from wds_datapipes.errors import ShardWriteError
from wds_datapipes.io.daemon_threads import TooSlowError, start_call, wait_for
from wds_datapipes.io.file_systems import is_web
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.remote.filesystem import RemotePath

T = TypeVar("T")

LOGGER = logging.getLogger("wds_datapipes")

#: Part size of multipart uploads, in bytes. S3 allows 10,000 parts: 160 GB.
PART_BYTES = 16 << 20


class RemoteSink:
    """Uploads to an object store; on other file systems, writes under a temporary name and renames.

    Stores such as S3 and Google Cloud Storage make an upload visible only when it is finished and can abort it. On
    other file systems, the file has a temporary name in the same folder.

    Args:
        url: ``scheme://...``.
        storage_options: passed to the file system, such as credentials and an endpoint. Never printed.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._written = 0
        if is_web(split_scheme(url)[0]):
            raise ShardWriteError(
                f"{redact(url)} cannot be written: web servers differ in how they accept uploads. Use a command "
                f"for your server, such as pipe:curl -fsS -T - URL"
            )
        self._remote = remote = RemotePath(url, storage_options)
        self._part = ""
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        with remote.replace_errors(self._failure):
            self._file = self._call(self._open)

    def write(self, *chunks: bytes) -> None:
        """Write all chunks, a part at a time."""
        with self._remote.replace_errors(self._failure):
            for chunk in chunks:
                self._waiting.append(chunk)
                self._waiting_bytes += len(chunk)
                self._written += len(chunk)
                if self._waiting_bytes >= PART_BYTES:
                    self._call(self._send, 1 + self._waiting_bytes // PART_BYTES)

    def finish(self) -> None:
        """Finish the upload, or rename the file."""
        with self._remote.replace_errors(self._failure):
            self._call(self._close, 2)

    def discard(self) -> None:
        """Abort the upload, or remove the file."""
        with contextlib.suppress(Exception):
            self._call(self._remove)

    def _call(self, call: Callable[[], T], parts: int = 1) -> T:
        """Call a function of the store's library, which may block, or retry, for any length of time.

        Raises:
            TooSlowError: it takes longer than ``Timeouts.block_s`` for each part.
        """
        future, most_s = start_call(call), parts * self._remote.timeouts.block_s
        warned_s = min(self._remote.timeouts.silent_s, most_s)
        try:
            return wait_for(future, warned_s)
        except TooSlowError:
            if warned_s >= most_s:
                raise
            LOGGER.warning(
                "Writing %s takes long: no success for %.0f s, given up after %.0f s",
                self._remote.name,
                warned_s,
                most_s,
            )
        return wait_for(future, most_s - warned_s)

    def _open(self) -> Any:
        filesystem, path = self._remote.filesystem, self._remote.path
        self._part = f"{path}.{secrets.token_hex(8)}.part"
        file = filesystem.open(self._part, "wb", block_size=PART_BYTES)
        if not _can_discard(file):
            return file
        _abandon(file)  # nothing was sent yet
        self._part = ""
        return filesystem.open(path, "wb", block_size=PART_BYTES)

    def _send(self) -> None:
        chunks, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for chunk in chunks:
            self._file.write(chunk)

    def _close(self) -> None:
        self._send()
        try:
            self._file.close()
        except Exception as error:
            if not self._was_completed(error):
                raise
            with contextlib.suppress(Exception):  # the upload does not exist any more
                _abandon(self._file)
        if self._part:
            self._remote.filesystem.mv(self._part, self._remote.path)

    def _was_completed(self, error: Exception) -> bool:
        """Whether S3 has finished the upload, but its answer was lost, and it does not know the upload any more."""
        if not (isinstance(error, FileNotFoundError) and getattr(self._file, "parts", None)):
            return False
        self._remote.forget_listing()
        with contextlib.suppress(FileNotFoundError):
            return bool(self._remote.filesystem.info(self._remote.path).get("size") == self._written)
        return False

    def _remove(self) -> None:
        with contextlib.suppress(Exception):
            if not self._part:
                _abandon(self._file)
                return
            self._file.close()
        self._remote.filesystem.rm(self._part)

    def _failure(self, error: Exception) -> ShardWriteError:
        reason = self._remote.reason(error)
        return ShardWriteError(f"{self._remote.name} cannot be written: ", reason, f", after {self._written} bytes")


def _can_discard(file: Any) -> bool:
    """Whether a file is invisible until it is closed and its upload can be aborted."""
    kind = type(file)
    return isinstance(file, AbstractBufferedFile) and kind.discard is not AbstractBufferedFile.discard


def _abandon(file: Any) -> None:
    """Abort an upload and mark the file as closed, so that its garbage collection sends nothing more."""
    try:
        file.discard()
    finally:
        file.closed = True
