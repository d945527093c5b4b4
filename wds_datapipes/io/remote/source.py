"""Sources: files on stores that were opened at an offset, with the version that they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wds_datapipes.io.daemon_threads import TooSlowError
from wds_datapipes.io.file_systems import ETAGS

if TYPE_CHECKING:
    from wds_datapipes.io.remote.filesystem import RemotePath

#: The maximum number of characters of a header in error messages.
SHOWN = 100
#: A connection that delivers fewer bytes per second than this has stalled; a new one is opened in its place.
STALLED_BYTES_PER_S = 1 << 10


#: The form of a strong ETag; ``w/"1"``, ``1`` and ``""`` guarantee nothing.
STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]+"')


class UnexpectedResponseError(Exception):
    """A server has sent an unexpected response that a retry would not change."""


class RawReader(Protocol):
    """An open remote file that reads into a buffer without an intermediate copy."""

    def readinto(self, view: memoryview) -> int:
        """Read the available bytes, at most ``len(view)``; 0 at the end."""

    def abort(self) -> None:
        """Abort a read in another thread, which then closes the file."""

    def close(self) -> object:
        """Close the file."""


class MonitoredFile:
    """A remote file that counts its bytes and drops a stalled connection.

    Only the time spent waiting for a store counts, not the time between requests.

    Args:
        file: the file.
        remote: its path, with the counters and the time after which a slow connection has stalled.
    """

    def __init__(self, file: RawReader, remote: RemotePath) -> None:
        self._file, self._remote = file, remote
        self._bytes, self._waited_s = 0, 0.0

    def readinto(self, view: memoryview) -> int:
        """Read the available bytes, at most ``len(view)``; 0 at the end.

        Raises:
            TooSlowError: the connection has stalled.
        """
        clock = self._remote.retry.clock
        begin = clock()
        count = self._file.readinto(view)
        waited_s = clock() - begin
        self._remote.counters.count(f"fetched_bytes/{self._remote.store}", count)
        self._remote.counters.count(f"fetching_s/{self._remote.store}", waited_s)
        self._bytes += count
        self._waited_s += waited_s
        if self._waited_s >= self._remote.timeouts.stalled_s:
            found, found_s = self._bytes, self._waited_s
            self._bytes, self._waited_s = 0, 0.0
            if found < STALLED_BYTES_PER_S * found_s and count:  # waiting for the end of the file does not count
                raise TooSlowError(f"received only {found} bytes in {found_s:.1f} s")
        return count

    def abort(self) -> None:
        """End a read in another thread."""
        self._file.abort()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class OpenedSource(NamedTuple):
    """A remote file that was opened at an offset."""

    file: RawReader
    #: The offset of its first byte; less than the requested offset if the store sends the whole file again.
    start: int
    #: The size of the whole file, if the store reports it.
    size: int | None
    #: Identifies this version of the file; empty if the store reports neither ETag nor date.
    version: tuple[str, ...]
    #: The ETag, as in the index of a shard.
    etag: str | None = None
    #: Whether two files with this version have the same bytes, unlike with a weak ETag or a date.
    is_strong: bool = False
    #: The offset at which the response ends, if the store sends only part of the requested range.
    stop: int | None = None
    #: Whether the store can open the file at any offset.
    can_seek: bool = False


class SentRequest(NamedTuple):
    """A request for a part of a file that was sent.

    Attributes:
        open: waits for the answer and returns the part, or raises any error of the store's library.
        close: drops the request.
        since: when it was begun, by `time.perf_counter`.
    """

    open: Callable[[], OpenedSource]
    close: Callable[[], object]
    since: float


def version_of(*facts: Any) -> tuple[str, ...]:
    """Return the facts that identify a version of a file."""
    return tuple(str(fact) for fact in facts if fact is not None)


def etag_of(facts: Mapping[str, Any]) -> str | None:
    """Return the ETag of a file, without quotes, from the metadata that an fsspec file system or a server reports."""
    etag = next((facts[name] for name in ETAGS if facts.get(name)), None)
    return str(etag).strip('"') or None if etag else None


def is_strong_etag(etag: str | None) -> bool:
    """Whether the ETag of a response guarantees that files have the same bytes (RFC 9110, section 8.8)."""
    return etag is not None and STRONG_ETAG.fullmatch(etag) is not None
