"""Sink that writes to a file system of fsspec, such as an object store."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]  # it carries no types

from wds_datapipes.errors import ShardWriteError
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.http import is_web
from wds_datapipes.io.urls import split_scheme
from wds_datapipes.redaction import redact
from wds_datapipes.redaction.storage_options import raise_alone

#: Part size of multipart uploads, in bytes. S3 allows 10,000 parts: 160 GB.
PART_BYTES = 16 << 20


class RemoteSink:
    """Uploads to an object store; on other file systems, writes under a temporary name and renames.

    Stores such as S3 and Google Cloud Storage make an upload visible only when it is finished, and can abort it. Other
    file systems get a temporary name in the same folder.

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
        try:
            self._part = f"{remote.path}.{secrets.token_hex(8)}.part"
            self._file = remote.filesystem.open(self._part, "wb", block_size=PART_BYTES)
            if _can_discard(self._file):
                _abandon(self._file)  # nothing was sent yet
                self._part = ""
                self._file = remote.filesystem.open(remote.path, "wb", block_size=PART_BYTES)
        except Exception as error:  # noqa: BLE001  every file system has errors of its own
            raise_alone(self._failure(error))

    def write(self, *chunks: bytes) -> None:
        """Write all chunks."""
        for chunk in chunks:
            try:
                self._file.write(chunk)
            except Exception as error:  # noqa: BLE001  as above
                raise_alone(self._failure(error))
            self._written += len(chunk)

    def finish(self) -> None:
        """Finish the upload, or rename the file."""
        try:
            self._file.close()
            if self._part:
                self._remote.filesystem.mv(self._part, self._remote.path)
        except Exception as error:  # noqa: BLE001  as above
            raise_alone(self._failure(error))

    def discard(self) -> None:
        """Abort the upload, or remove the file."""
        with contextlib.suppress(Exception):
            if not self._part:
                _abandon(self._file)
                return
            self._file.close()
        with contextlib.suppress(Exception):
            self._remote.filesystem.rm(self._part)

    def _failure(self, error: Exception) -> ShardWriteError:
        message = self._remote.reason(error)
        return ShardWriteError(f"{self._remote.name} cannot be written: {message}, after {self._written} bytes")


def _can_discard(file: Any) -> bool:
    """Whether a file is invisible until it is closed, and its upload can be aborted."""
    kind = type(file)
    return isinstance(file, AbstractBufferedFile) and kind.discard is not AbstractBufferedFile.discard


def _abandon(file: Any) -> None:
    """Abort an upload, and mark the file closed so that its garbage collection sends nothing more."""
    try:
        file.discard()
    finally:
        file.closed = True
