"""Remote file: opened at any offset, as often as needed; streams, ranges and spans of it are of one version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, BinaryIO, Protocol, cast

from wds_datapipes.errors import ChangedShardError, ShardError
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.fsspec_file import FsspecStore
from wds_datapipes.io.remote.http import HttpStore, UnexpectedResponseError, is_web
from wds_datapipes.io.remote.resuming_stream import OpenedSource, ResumingStream, fill
from wds_datapipes.io.remote.retry import status_of
from wds_datapipes.redaction.storage_options import raise_alone

#: Bytes read from the start of a shard to detect its format: one tar header.
HEAD_BYTES = 512


class Store(Protocol):
    """A file of a store, which is opened by a request, or by the store's library."""

    def open_at(self, start: int, end: int | None = None) -> OpenedSource:
        """Open the file at an offset, up to ``end``; at its beginning if the store sends only whole files.

        Raises:
            Exception: any error of the store's library.
        """

    def can_seek(self) -> bool:
        """Whether the store sends ranges of the file, which was opened before."""

    def close(self) -> None:
        """Close what is kept open for the next range."""


class RemoteFile:
    """A remote file with random access; it is thread-safe.

    Args:
        remote: the path of the file.

    Attributes:
        head: its first bytes.
        size: its size, if the store reports it.
        etag: its ETag, if the store reports one.
        version: identifies the version of the file, as far as the store reports it.
    """

    def __init__(self, remote: RemotePath) -> None:
        self._remote = remote
        self._store = _store_of(remote, keep_open=True)
        self.head = b""
        self.size: int | None = None
        self.etag: str | None = None
        self.version: tuple[str, ...] = ()

    @classmethod
    def open(cls, url: str, /, **options: Any) -> RemoteFile | None:
        """Open a file, and read its first bytes; return None if it can only be read as a whole.

        Args:
            url: ``scheme://...``.
            options: see `RemotePath`.

        Raises:
            ShardOpenError: there is no such file, or access is denied.
        """
        remote = RemotePath(url, **options)
        file = cls(remote)
        try:
            return file if remote.call(file._probe) else None
        except ShardError:
            raise
        except Exception as error:  # noqa: BLE001  every file system has errors of its own
            remote.raise_open_error(error)

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1.

        Raises:
            ChangedShardError: the file has changed since it was opened, or it ends before ``start``.
            ShardOpenError: it cannot be opened.
        """
        stop = self.size if end < 0 else end

        def open_at(offset: int) -> OpenedSource:
            opened = self.open_at(start + offset, stop)
            # If the store does not report the size of the file, the range may be shorter.
            size = None if stop is None or opened.size is None else stop - start
            return opened._replace(start=offset, size=size, stop=None if opened.stop is None else opened.stop - start)

        return _stream(self._remote, open_at, f" at byte {start}")

    def open_at(self, start: int, end: int | None) -> OpenedSource:
        """Open the file at an offset, in the version that was opened first.

        Raises:
            ChangedShardError: it was replaced since then, or it ends before ``start``.
            Exception: any error of the store's library.
        """
        if end is not None and start >= end:
            raise self._shorter_error(start)
        try:
            opened = self._store.open_at(start, end)
        except UnexpectedResponseError as error:
            raise_alone(self._changed_error(str(error)))
        except Exception as error:
            if status_of(error) == 416:
                raise_alone(self._shorter_error(start))
            raise
        if opened.start != start or (opened.size, opened.version) != (self.size, self.version):
            opened.file.close()
            raise self._changed_error("its ETag, date or size differs, or the store sent another range")
        return opened

    def close(self) -> None:
        """Close the file, except streams of it."""
        self._store.close()

    def _probe(self) -> bool:
        """Read the first bytes; return whether the store sends ranges of the file."""
        try:
            opened = self._store.open_at(0, HEAD_BYTES)
        except UnexpectedResponseError:  # it can only be read as a whole
            return False
        except Exception as error:
            if status_of(error) == 416:  # the file is empty
                return False
            raise
        with closing(opened.file):
            head = bytearray(HEAD_BYTES)
            self.head = bytes(head[: fill(opened.file, memoryview(head))])
        self.size, self.etag, self.version = opened.size, opened.etag, opened.version
        return not opened.start and self._store.can_seek()

    def _changed_error(self, found: str) -> ChangedShardError:
        return ChangedShardError(
            f"{self._remote.name} was replaced while it was read: {found}. Load the state again, with the shards that "
            "it was saved with"
        )

    def _shorter_error(self, begin: int) -> ChangedShardError:
        return ChangedShardError(
            f"{self._remote.name} ends before byte {begin}, where reading should resume. A state can only be loaded "
            "with the same shards that it was saved with"
        )


def open_remote(url: str, /, **options: Any) -> BinaryIO:
    """Open a remote file for sequential reading.

    Args:
        url: ``scheme://...``.
        options: see `RemotePath`.

    Raises:
        ShardOpenError: the file cannot be opened.
    """
    remote = RemotePath(url, **options)
    return _stream(remote, _store_of(remote).open_at, "")


def _stream(remote: RemotePath, open_at: Callable[[int], OpenedSource], where: str) -> BinaryIO:
    """Return a stream of what a function opens."""
    try:
        return cast(BinaryIO, ResumingStream(open_at, remote.name, remote.reason, remote.retry))
    except ShardError:
        raise
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        remote.raise_open_error(error, where)


def _store_of(remote: RemotePath, *, keep_open: bool = False) -> Store:
    return HttpStore(remote) if is_web(remote.scheme) else FsspecStore(remote, keep_open=keep_open)
