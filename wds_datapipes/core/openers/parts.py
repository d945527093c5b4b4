"""Remote shards of which parts are read: by range requests, or by seeking in what fsspec opens."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol, cast

from wds_datapipes.core.openers.filesystems import BLOCK_BYTES, hiding, open_web, reason, remote_filesystem
from wds_datapipes.core.openers.forward import ForwardStream
from wds_datapipes.core.openers.schemes import split_scheme
from wds_datapipes.errors import ChangedShard, ShardError, ShardNotOpened

__all__ = ["RemoteParts", "open_remote_parts"]

#: How much of a shard's beginning is read to find out what it is: one header of a tar archive.
HEAD_BYTES = 512

#: What of an answer tells one version of a file from another.
VERSION_HEADERS = ("ETag", "Last-Modified")

#: ``bytes 512-1023/4096``: the first byte, the last one, and the size of the file.
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


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
    url: str, /, *, storage_options: Mapping[str, Any] | None = None, timeout_s: float = 60.0, **_options: object
) -> RemoteParts | None:
    """Open a file of a file system that fsspec knows for reading parts; return None where only all can be read.

    Raises:
        ShardNotOpened: there is nothing to read, or it may not be read.
    """
    options = storage_options or {}
    hide = hiding(options)
    filesystem, path = remote_filesystem(url, options)
    scheme, _ = split_scheme(url)
    try:
        if scheme in ("http", "https"):
            return WebParts.found(url, hide, lambda part: open_web(filesystem, path, options, timeout_s, part=part))
        file = filesystem.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none")
        return FileParts.found(file, url, hide)
    except ShardError:
        raise
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        raise ShardNotOpened(f"{hide(url)} cannot be opened: {reason(error, scheme, hide)}") from None


class WebParts:
    """A file on a web server that answers requests for ranges."""

    def __init__(self, url: str, hide: Callable[[str], str], request: Callable[[str], Any]) -> None:
        self.head = b""
        self._url = url
        self._hide = hide
        self._request = request
        self._version: tuple[str | None, ...] = ()

    @classmethod
    def found(cls, url: str, hide: Callable[[str], str], request: Callable[[str], Any]) -> WebParts | None:
        """Ask for the first bytes; return None if the server sends all instead."""
        parts = cls(url, hide, request)
        try:
            first = request(f"0-{HEAD_BYTES - 1}")
        except Exception as error:
            if getattr(error, "status", None) == 416:  # there is not one byte
                return None
            raise
        with cast(BinaryIO, ForwardStream(first, url, hide=hide)) as stream:
            sent = CONTENT_RANGE.fullmatch(first.r.headers.get("Content-Range", ""))
            if first.r.status != 206 or sent is None or sent[1] != "0":
                return None
            parts._version = _version(first.r, sent)
            parts.head = io.BufferedReader(cast(io.RawIOBase, stream)).read(HEAD_BYTES)
        return parts

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        try:
            file = self._request(f"{start}-{'' if end < 0 else end - 1}")
        except Exception as error:  # noqa: BLE001  aiohttp has many
            if getattr(error, "status", None) == 416:
                raise ChangedShard(
                    f"{self._hide(self._url)} ends before byte {start}, where it was to be read on. A state can be "
                    "loaded only with the very shards that it was saved with"
                ) from None
            scheme, _ = split_scheme(self._url)
            raise ShardNotOpened(
                f"{self._hide(self._url)} cannot be opened at byte {start}: {reason(error, scheme, self._hide)}"
            ) from None
        sent = CONTENT_RANGE.fullmatch(file.r.headers.get("Content-Range", ""))
        if file.r.status != 206 or sent is None or int(sent[1]) != start or _version(file.r, sent) != self._version:
            file.close()
            raise ChangedShard(
                f"{self._hide(self._url)} was replaced while parts of it were read: its ETag, date or size is another, "
                "or the server has sent another part. Load the state again, with the shards that it was saved with"
            )
        return cast(BinaryIO, ForwardStream(file, self._url, hide=self._hide))

    def close(self) -> None:
        """Do nothing: each part is a request of its own."""


class FileParts:
    """A file of fsspec in which one can seek."""

    def __init__(self, file: Any, url: str, hide: Callable[[str], str], head: bytes) -> None:
        self.head = head
        self._file = file
        self._url = url
        self._hide = hide

    @classmethod
    def found(cls, file: Any, url: str, hide: Callable[[str], str]) -> FileParts | None:
        """Read the first bytes, and go back; return None if that cannot be done."""
        head = file.read(HEAD_BYTES)
        try:
            file.seek(0)
        except (AttributeError, OSError, ValueError):  # that of io.UnsupportedOperation, too
            file.close()
            return None
        return cls(file, url, hide, head)

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        whole = ForwardStream(Window(self._file, start, end), self._url, hide=self._hide)
        # Each read is a request. No more is asked for than the part has.
        block = BLOCK_BYTES if end < 0 else min(end - start, BLOCK_BYTES)
        return cast(BinaryIO, io.BufferedReader(whole, block))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Window:
    """The bytes of a file from one place to another."""

    def __init__(self, file: Any, start: int, end: int) -> None:
        self._file = file
        self._at = start
        self._end = end

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        size = size if self._end < 0 else min(size, self._end - self._at)
        if size <= 0:
            return b""
        self._file.seek(self._at)
        data: bytes = self._file.read(size)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Leave the file open: there may be other parts."""


def _version(response: Any, sent: re.Match[str]) -> tuple[str | None, ...]:
    """Return what is another if the file is."""
    return (sent[3], *(response.headers.get(name) for name in VERSION_HEADERS))
