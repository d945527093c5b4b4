"""Remote shards of which parts are read: by range requests, or by seeking in what fsspec opens."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol, cast

from wds_datapipes.core.openers.filesystems import (
    BLOCK_BYTES,
    RETRIES,
    RETRY_S,
    hiding,
    reason,
    remote_filesystem,
)
from wds_datapipes.core.openers.forward import ForwardStream
from wds_datapipes.core.openers.patience import Patience, status_of, was_replaced
from wds_datapipes.core.openers.schemes import split_scheme
from wds_datapipes.core.openers.steady import Opened, SteadyStream
from wds_datapipes.core.openers.web import CONTENT_RANGE, open_web, version_of_response
from wds_datapipes.errors import ChangedShard, ShardError, ShardNotOpened

__all__ = ["RemoteParts", "open_remote_parts"]

#: How much of a shard's beginning is read to find out what it is: one header of a tar archive.
HEAD_BYTES = 512


class RemoteParts(Protocol):
    """A remote file of which parts are read.

    Attributes:
        head: its first bytes.
    """

    head: bytes

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""

    def close(self) -> None:
        """Give the file back."""


def open_remote_parts(
    url: str,
    /,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    retries: int = RETRIES,
    retry_s: float = RETRY_S,
    **_options: object,
) -> RemoteParts | None:
    """Open a file of a file system that fsspec knows for reading parts; return None where only all can be read.

    Raises:
        ShardNotOpened: there is nothing to read, or it may not be read.
    """
    options = storage_options or {}
    filesystem, path = remote_filesystem(url, options)
    scheme, _ = split_scheme(url)
    store = Store(url, hiding(options), Patience(retries, retry_s))
    try:
        if scheme in ("http", "https"):

            def request(part: str) -> Any:
                return open_web(filesystem, path, options, timeout_s, part=part)

            return store.patience.patiently(lambda: WebParts.found(store, request), f"{store.name} cannot be opened")
        file = filesystem.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none")
        return FileParts.found(store, file)
    except ShardError:
        raise
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        raise ShardNotOpened(f"{store.name} cannot be opened: {store.tell(error)}{store.patience.told()}") from None


class Store:
    """What a remote file is called, and how errors of its library are told."""

    def __init__(self, url: str, hide: Callable[[str], str], patience: Patience) -> None:
        self.url, self.hide, self.patience = url, hide, patience
        self.name = hide(url)
        self._scheme, _ = split_scheme(url)

    def tell(self, error: Exception) -> str:
        """Say what an error means, without secrets."""
        return reason(error, self._scheme, self.hide)


class WebParts:
    """A file on a web server that answers requests for ranges."""

    def __init__(self, store: Store, request: Callable[[str], Any]) -> None:
        self.head = b""
        self._store = store
        self._request = request
        self._version: tuple[str, ...] = ()

    @classmethod
    def found(cls, store: Store, request: Callable[[str], Any]) -> WebParts | None:
        """Ask for the first bytes; return None if the server sends all instead."""
        parts = cls(store, request)
        try:
            first = request(f"0-{HEAD_BYTES - 1}")
        except Exception as error:
            if status_of(error) == 416:  # there is not one byte
                return None
            raise
        with contextlib.closing(first):
            sent = CONTENT_RANGE.fullmatch(first.r.headers.get("Content-Range", ""))
            if first.r.status != 206 or sent is None or sent[1] != "0":
                return None
            parts._version = (sent[3], *version_of_response(first.r))
            while len(parts.head) < HEAD_BYTES and (data := first.read(HEAD_BYTES - len(parts.head))):
                parts.head += data
        return parts

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        store = self._store
        try:
            origin = WebPart(store, self._request, self._version, start, end)
            return cast(BinaryIO, SteadyStream(origin, store.name, store.tell, store.patience))
        except ShardError:
            raise
        except Exception as error:  # noqa: BLE001  aiohttp has many
            raise ShardNotOpened(
                f"{store.name} cannot be opened at byte {start}: {store.tell(error)}{store.patience.told()}"
            ) from None

    def close(self) -> None:
        """Do nothing: each part is a request of its own."""


class WebPart:
    """A part of a file on a web server, from any of its bytes on: where a `SteadyStream` opens it."""

    def __init__(
        self, store: Store, request: Callable[[str], Any], version: tuple[str, ...], start: int, end: int
    ) -> None:
        self._store, self._request, self._version, self._start, self._end = store, request, version, start, end

    def open_at(self, start: int) -> Opened:
        """Open the part at a byte, if it is one of the very file that was found.

        Raises:
            ChangedShard: it is another one.
        """
        begin = self._start + start
        try:
            file = self._request(f"{begin}-{'' if self._end < 0 else self._end - 1}")
        except Exception as error:
            if status_of(error) == 416:
                raise ChangedShard(
                    f"{self._store.name} ends before byte {begin}, where it was to be read on. A state can be loaded "
                    "only with the very shards that it was saved with"
                ) from None
            raise
        sent = CONTENT_RANGE.fullmatch(file.r.headers.get("Content-Range", ""))
        is_same = sent is not None and (sent[3], *version_of_response(file.r)) == self._version
        if file.r.status != 206 or sent is None or int(sent[1]) != begin or not is_same:
            file.close()
            raise ChangedShard(
                f"{self._store.name} was replaced while parts of it were read: its ETag, date or size is another, or "
                "the server has sent another part. Load the state again, with the shards that it was saved with"
            )
        return Opened(file, start, int(sent[2]) + 1 - self._start, self._version)


class FileParts:
    """A file of fsspec in which one can seek."""

    def __init__(self, store: Store, file: Any, head: bytes) -> None:
        self.head = head
        self._store = store
        self._file = file

    @classmethod
    def found(cls, store: Store, file: Any) -> FileParts | None:
        """Read the first bytes, and go back; return None if that cannot be done."""
        head = file.read(HEAD_BYTES)
        try:
            file.seek(0)
        except (AttributeError, OSError, ValueError):  # that of io.UnsupportedOperation, too
            file.close()
            return None
        return cls(store, file, head)

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        whole = ForwardStream(Window(self._store, self._file, start, end), self._store.url, hide=self._store.hide)
        # Each read is a request. No more is asked for than the part has.
        block = BLOCK_BYTES if end < 0 else min(end - start, BLOCK_BYTES)
        return cast(BinaryIO, io.BufferedReader(whole, block))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Window:
    """The bytes of a file from one place to another; each read is a request, and may be tried again."""

    def __init__(self, store: Store, file: Any, start: int, end: int) -> None:
        self._store = store
        self._file = file
        self._at = start
        self._end = end

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        size = size if self._end < 0 else min(size, self._end - self._at)
        if size <= 0:
            return b""
        what = f"Reading {self._store.name} was interrupted after {self._at} bytes"
        data = self._store.patience.patiently(lambda: self._read(size), what)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Leave the file open: there may be other parts."""

    def _read(self, size: int) -> bytes:
        try:
            self._file.seek(self._at)
            data: bytes = self._file.read(size)
        except Exception as error:
            if was_replaced(error):
                raise ChangedShard(
                    f"{self._store.name} was replaced while parts of it were read. Load the state again, with the "
                    "shards that it was saved with"
                ) from None
            raise
        return data
