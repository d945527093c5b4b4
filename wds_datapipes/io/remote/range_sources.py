"""Range access to remote shards: by HTTP range requests, or by seeking in a file of fsspec."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from wds_datapipes.counters import Counters
from wds_datapipes.errors import ChangedShardError, ShardError
from wds_datapipes.io.remote.filesystem import raise_open_error, reason, remote_filesystem
from wds_datapipes.io.remote.fsspec_file import BLOCK_BYTES, BLOCK_TIMEOUTS, VERSION_FACTS
from wds_datapipes.io.remote.http import HttpFile, UnexpectedResponseError, is_web
from wds_datapipes.io.remote.resuming_stream import (
    ForwardStream,
    OpenedSource,
    ResumingStream,
    etag_of,
    fill,
    is_strong_etag,
    version_of,
)
from wds_datapipes.io.remote.retry import RetryPolicy, status_of, was_replaced
from wds_datapipes.io.remote.throughput import Attempt, MonitoredSource, ThroughputMonitor
from wds_datapipes.io.remote.timeouts import StoreTimeouts
from wds_datapipes.io.urls import split_scheme
from wds_datapipes.redaction.storage_options import raise_alone, redactor_of

__all__ = ["RangeSource", "open_remote_parts"]

T = TypeVar("T")
Request = Callable[[str], HttpFile]
"""Requests a range of a file, such as ``"512-1023"``."""

#: Bytes read from the start of a shard to detect its format: one tar header.
HEAD_BYTES = 512


class RangeSource(Protocol):
    """A remote file with random access.

    Attributes:
        head: its first bytes.
        size: its size, if the store reports it.
        etag: its ETag, if the store reports one.
        version: identifies the version of the file, as far as the store reports it.
        is_shared: whether several threads may read parts at the same time.
    """

    head: bytes
    size: int | None
    etag: str | None
    version: tuple[str, ...]
    is_shared: bool

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""

    def close(self) -> None:
        """Close the file."""


def open_remote_parts(
    url: str,
    /,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
    pause: Callable[[float], object] | None = None,
    counters: Counters | None = None,
    **_options: object,
) -> RangeSource | None:
    """Open a remote file for range reads, or return None if it can only be read as a whole; see `open_remote`.

    Raises:
        ShardOpenError: there is no such file, or access is denied.
    """
    options, timeouts = StoreTimeouts.split(storage_options, timeout_s, retries)
    retry = timeouts.retry_policy(pause)
    filesystem, path = remote_filesystem(url, options, timeouts.timeout_s, retry)
    scheme, _ = split_scheme(url)
    store = Store(url, redactor_of(options, url), retry, timeouts.seconds, counters)
    try:
        if is_web(scheme):
            request: Request = partial(filesystem.open, path)
            return store.retry.call(lambda: HttpRangeSource.probe(store, request), f"{store.name} cannot be opened")

        def probe() -> FsspecRangeSource | None:
            file = filesystem.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none")
            return FsspecRangeSource.probe(store, file)

        return store.retry.call(lambda: store.attempt(probe), f"{store.name} cannot be opened")
    except ShardError:
        raise
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        raise_open_error(error, store.name, store.describe(error), store.retry)


class Store:
    """A remote file's name, time-outs, retries and error messages."""

    def __init__(
        self,
        url: str,
        hide: Callable[[str], str],
        retry: RetryPolicy,
        timeout_s: float,
        counters: Counters | None = None,
    ) -> None:
        self.url, self.hide, self.retry = url, hide, retry
        self.name = hide(url)
        self.monitor = ThroughputMonitor(self.name, timeout_s, counters)
        self._scheme, _ = split_scheme(url)

    def describe(self, error: Exception) -> str:
        """Return the message of an error, without credentials."""
        return reason(error, self._scheme, self.hide)

    def attempt(self, call: Callable[[], T]) -> T:
        """Return the result of a call to the store's library, within its time-out."""
        monitor = self.monitor
        return Attempt(call).result(
            BLOCK_TIMEOUTS * monitor.timeout_s, monitor.timeout_s, lambda: monitor.log_slow(0, monitor.timeout_s)
        )


class HttpRangeSource:
    """A file on a web server that supports range requests."""

    is_shared = True

    def __init__(self, store: Store, request: Request) -> None:
        self.head = b""
        self._store = store
        self._request = request
        self.size: int | None = None
        self.etag: str | None = None
        self.version: tuple[str, ...] = ()

    @classmethod
    def probe(cls, store: Store, request: Request) -> HttpRangeSource | None:
        """Request the first bytes; return None if the server sends the whole file."""
        parts = cls(store, request)
        try:
            first = request(f"0-{HEAD_BYTES - 1}")
        except UnexpectedResponseError:  # it can only be read as a whole
            return None
        except Exception as error:
            if status_of(error) == 416:  # the file is empty
                return None
            raise
        with contextlib.closing(first):
            if first.part is None or first.part.first or first.part.total is None:
                return None
            parts.size, parts.etag = first.part.total, etag_of({"ETag": first.etag})
            parts.version = (str(parts.size), *first.version)
            head = bytearray(HEAD_BYTES)
            parts.head = bytes(head[: fill(first, memoryview(head))])
        return parts

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        store = self._store
        try:
            last = (self.size or 0) if end < 0 else end
            # Several ranges may be read at a time, and each connection may stall.
            monitor = ThroughputMonitor(store.name, store.monitor.timeout_s, store.monitor.counters)
            source = MonitoredSource(HttpRange(store, self._request, self.version, start, last), monitor)
            return cast(BinaryIO, ResumingStream(source, store.name, store.describe, store.retry))
        except ShardError:
            raise
        except Exception as error:  # noqa: BLE001  network libraries raise many types
            raise_open_error(error, store.name, store.describe(error), store.retry, f" at byte {start}")

    def close(self) -> None:
        """Do nothing: each range is a separate request."""


class HttpRange:
    """A range of a file on a web server, as the source of a `ResumingStream`."""

    def __init__(self, store: Store, request: Request, version: tuple[str, ...], start: int, end: int) -> None:
        self._store, self._request, self._version, self._start, self._end = store, request, version, start, end

    def open_at(self, start: int) -> OpenedSource:
        """Open the range at an offset within it.

        Raises:
            ChangedShardError: the file was replaced since it was opened first.
        """
        begin = self._start + start
        if begin >= self._end:
            raise self._shorter(begin)
        try:
            file = self._request(f"{begin}-{self._end - 1}")
        except UnexpectedResponseError as error:
            raise_alone(self._changed(str(error)))
        except Exception as error:
            if status_of(error) == 416:
                raise_alone(self._shorter(begin))
            raise
        part = file.part
        if part is None or part.first != begin or (str(part.total), *file.version) != self._version:
            file.close()
            raise self._changed("its ETag, date or size differs, or the server sent another range")
        facts = self._version, etag_of({"ETag": file.etag}), is_strong_etag(file.etag)
        return OpenedSource(file, start, self._end - self._start, *facts, part.last + 1 - self._start)

    def _changed(self, found: str) -> ChangedShardError:
        return ChangedShardError(
            f"{self._store.name} was replaced while it was read: {found}. Load the state again, with the shards that "
            "it was saved with"
        )

    def _shorter(self, begin: int) -> ChangedShardError:
        return ChangedShardError(
            f"{self._store.name} ends before byte {begin}, where reading should resume. A state can only be loaded "
            "with the same shards that it was saved with"
        )


class FsspecRangeSource:
    """A seekable file of fsspec."""

    is_shared = False

    def __init__(self, store: Store, file: Any, head: bytes) -> None:
        self.head = head
        details = getattr(file, "details", None) or {}
        self.size, self.etag = details.get("size"), etag_of(details)
        self.version = version_of(*(details.get(name) for name in ("size", *VERSION_FACTS)))
        self._store = store
        self._file = file

    @classmethod
    def probe(cls, store: Store, file: Any) -> FsspecRangeSource | None:
        """Read the first bytes and seek back; return None if the file cannot seek."""
        head = file.read(HEAD_BYTES)
        try:
            file.seek(0)
        except (AttributeError, OSError, ValueError):  # includes io.UnsupportedOperation
            file.close()
            return None
        return cls(store, file, head)

    def part(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the file if that is -1."""
        raw = ForwardStream(Window(self._store, self._file, start, end), self._store.url, hide=self._store.hide)
        # Each read is a request, which should not exceed the range.
        block = BLOCK_BYTES if end < 0 else min(end - start, BLOCK_BYTES)
        return cast(BinaryIO, io.BufferedReader(raw, block))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Window:
    """A range of a file; each read is a request with retries."""

    def __init__(self, store: Store, file: Any, start: int, end: int) -> None:
        self._store = store
        self._file = file
        self._position = start
        self._end = end

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        size = size if self._end < 0 else min(size, self._end - self._position)
        if size <= 0:
            return b""
        what = f"Reading {self._store.name} was interrupted after {self._position} bytes"
        begin = self._store.monitor.clock()
        data = self._store.retry.call(lambda: self._store.attempt(lambda: self._read(size)), what)
        self._store.monitor.counters.count_fetched(len(data), self._store.monitor.clock() - begin)
        self._position += len(data)
        return data

    def close(self) -> None:
        """Do nothing: other ranges use the same file."""

    def _read(self, size: int) -> bytes:
        try:
            self._file.seek(self._position)
            data: bytes = self._file.read(size)
        except Exception as error:
            if was_replaced(error):
                raise_alone(_changed_error(self._store.name))
            raise
        return data


def _changed_error(name: str) -> ChangedShardError:
    return ChangedShardError(
        f"{name} was replaced while it was read. Load the state again, with the shards that it was saved with"
    )
