"""Prefetching of remote shards: threads fetch parts of the current and the next ones, unless they are near."""

from __future__ import annotations

import io
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from wds_datapipes.counters import Counters
from wds_datapipes.interrupts import defer_interrupts
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.part_share import PartShare
from wds_datapipes.io.urls import OpeningURL, is_remote, split_scheme, store_of

if TYPE_CHECKING:
    from wds_datapipes.io.remote.remote_file import RemoteFile
    from wds_datapipes.io.remote.remote_parts import RemoteParts

T = TypeVar("T")

#: Default limit of prefetched bytes, for all shards together.
READ_AHEAD_BYTES = 64 << 20
#: Reading without a thread from a near store may have taken at most the first number of seconds longer than if the
#: store sent the second number of bytes per second. Otherwise, threads fetch parts.
MAX_DELAY_S, NEAR_BYTES_PER_S = 0.03, 400e6
#: The minimum and maximum size of a part; between them, this many parts have the size of the limit. Smaller parts need
#: more requests, and a connection is slow at its start.
MIN_PART_BYTES, MAX_PART_BYTES, PARTS = 1 << 20, 8 << 20, 32
#: The number of parts that are fetched at the same time at first, and its maximum, besides one for each further open
#: shard. It doubles whenever the reader has to wait, so a process has as many connections as it needs.
FIRST_PARTS, MAX_PARTS = 4, 64
#: With a smaller buffer per shard, threads would wait for each other more than for the store.
MIN_SHARD_BYTES = 64 << 10
#: At most this many URLs are taken from the source to find the next shard to prefetch.
MAX_PENDING = 1000


class ShardPrefetcher(Iterable[T]):
    """Yields the URLs of shards and opens the shards; threads prefetch the remote ones, unless their store is near.

    URLs are taken from the source in advance only while all of them are remote shards, since a source that yields a
    local file may wait until the file has been read. Errors of the source and of the shards are raised at the same
    point as without prefetching.

    Args:
        source: yields the URLs.
        max_bytes: the maximum number of bytes to prefetch into memory for all shards together, raised to at least 64
            KiB for the next shard and each open one; 0 disables prefetching.
        options: passed to `open_url`.
        is_requested: whether all of a shard will be read, by its index in the source.
        open_shards: the number of shards that are read at the same time. With 1, a shard is closed when the next one is
            requested, or iteration ends; otherwise with its stream, or by `close`.
        share: what it may hold of the parts that several of them have in common; by default, it has its own.
    """

    def __init__(
        self,
        source: Iterable[T],
        max_bytes: int,
        options: Mapping[str, Any],
        is_requested: Callable[[int], bool],
        open_shards: int = 1,
        share: PartShare | None = None,
    ) -> None:
        self._source: Iterator[tuple[int, T]] | None = enumerate(source)
        self._open_shards = open_shards
        self._max_bytes = max(max_bytes, MIN_SHARD_BYTES * (open_shards + 1)) if max_bytes else 0
        self._shard_bytes = self._max_bytes // (open_shards + 1)
        #: The share of a shard that is fetched in parts: the next one needs space only once all its parts have begun.
        self._share_bytes = self._max_bytes if open_shards == 1 else self._shard_bytes
        part_bytes = min(max(self._share_bytes // PARTS, MIN_PART_BYTES), MAX_PART_BYTES)
        self._part_bytes = part_bytes if self._share_bytes >= 2 * part_bytes else 0
        self._most_parts = self._allowed_parts = FIRST_PARTS
        self._options, self._is_requested = options, is_requested
        #: URLs taken from the source but not yielded yet.
        self._pending: deque[tuple[int, T]] = deque()
        self._failure: Exception | None = None
        #: The shards that are being read, by index; the first ones may have been yielded.
        self._fetches: dict[int, RemoteParts] = {}
        #: The bytes to reserve for a shard whose size is not known yet.
        self._expected_bytes = self._shard_bytes
        self._share = share
        self._unused: list[bytearray] = [] if share is None else share.common.unused
        self._current = -1
        self._can_extend = True

    def __iter__(self) -> Iterator[T]:
        try:
            while self._pending or self._take():
                if self._open_shards == 1:
                    self._release(self._current)
                self._current, url = self._pending.popleft()
                self._can_extend = True
                if self._open_shards > 1 and self._is_prefetchable(url) and self._is_requested(self._current):
                    self._fetch(self._current, str(url))  # it may be opened later
                yield url
            if self._failure is not None:
                raise self._failure
        finally:
            if self._open_shards == 1:
                self.close()

    def stop(self) -> None:
        """Stop prefetching all shards, without waiting for the threads."""
        for fetch in [*self._fetches.values()]:
            fetch.stop()

    def close(self) -> None:
        """Stop prefetching all shards."""
        self.stop()  # all of them before waiting for the first
        for index in [*self._fetches]:
            self._release(index)

    def open(self, index: int, path: str, /, **options: Any) -> BinaryIO:
        """Open a shard that was yielded, by its index in the source, as `open_url` does."""
        if index not in self._fetches and not self._is_prefetchable(path):
            return open_url(path, **options)
        self._fetch(index, path)
        return self._stream_of(index)

    def open_rest(self, index: int, path: str, file: RemoteFile, start: int) -> BinaryIO | None:
        """Open the rest of a shard that was yielded, from an offset on; None if it should be read as one stream.

        Args:
            index: the index of the shard in the source.
            path: the shard.
            file: the same, open.
            start: the offset.
        """
        if not file.has_parts or not self._part_bytes or start >= (file.size or 0) or not self._is_prefetchable(path):
            return None
        self._fetch(index, path, file, start)
        return self._stream_of(index)

    def _stream_of(self, index: int) -> BinaryIO:
        self._extend(index, False)
        parts, extend, release = self._fetches[index], partial(self._extend, index), partial(self._release, index)
        return cast(BinaryIO, PrefetchedStream(parts, extend, release))

    def _fetch(self, index: int, url: str, *rest: Any) -> None:
        """Start prefetching a shard, or the rest of an open one, unless it is already being prefetched."""
        if index not in self._fetches:
            from wds_datapipes.io.remote.remote_parts import RemoteParts  # only remote shards need it

            with defer_interrupts():  # otherwise a started thread could be unknown and never stopped
                self._fetches[index] = RemoteParts(
                    url, self._options, self._part_bytes, self._expected_bytes, self._unused, *rest
                )

    def _release(self, index: int) -> None:
        """Stop prefetching a shard."""
        if (fetch := self._fetches.get(index)) is not None:
            self._expect([fetch])
            fetch.close()
            self._fetches.pop(index, None)  # only now: Ctrl-C before would leave its threads
            if self._share is not None:
                self._share.end()

    def _expect(self, fetches: Iterable[RemoteParts]) -> None:
        """Expect the next shards to be as large as the largest of these."""
        if sizes := [fetch.size for fetch in fetches if fetch.size is not None]:
            self._expected_bytes = min(max(*sizes, MIN_SHARD_BYTES), self._shard_bytes)

    def _is_prefetchable(self, url: object) -> bool:
        if not isinstance(url, str) or isinstance(url, OpeningURL) or not is_remote(split_scheme(url)[0]):
            return False
        from wds_datapipes.io.remote.known_stores import known_store  # only remote shards need it

        of_thread, store = self._options["counters"].of_thread, store_of(url)
        allowed_s = MAX_DELAY_S + of_thread(f"fetched_bytes/{store}") / NEAR_BYTES_PER_S
        return self._max_bytes > 0 and (not known_store(store).is_near or of_thread(f"fetching_s/{store}") > allowed_s)

    def _extend(self, current: int, has_to_wait: bool) -> None:
        """Fetch more of a shard that is read, and begin to fetch the next ones, within the limits."""
        # One may just have been read to its end.
        if has_to_wait and self._part_count + 1 >= self._most_parts + self._open_count - 1:
            self._most_parts = min(2 * self._most_parts, MAX_PARTS)
        self._expect(self._fetches.values())
        reading = self._fetches[current]
        from wds_datapipes.io.remote.known_stores import known_store  # only remote shards need it

        self._allowed_parts = known_store(reading.store).limit.allow(self._wanted_parts)
        others = self._reserved_bytes - reading.reserved_bytes
        if self._share is None:
            reading.allow(min(self._shard_bytes, self._max_bytes - others))
        else:
            self._share.hold(self._part_count)
        # First of all, because the parts of the next shards can only begin once their stores have answered.
        self._begin_following(current, reading)
        others = self._reserved_bytes - reading.reserved_bytes
        self._begin_parts(reading, min(self._share_bytes, self._max_bytes - others))
        for fetch in self._following(current):
            if not self._is_begun(reading):
                return
            reading = fetch
            self._begin_parts(reading, self._max_bytes - self._reserved_bytes + reading.reserved_bytes)

    def _begin_following(self, current: int, reading: RemoteParts) -> None:
        """Begin to fetch the next shards whose turn comes within the limit."""
        expected = min(self._expected_bytes, self._part_bytes or sys.maxsize)
        while self._can_extend and len(self._pending) < MAX_PENDING and self._is_soon(current, reading):
            if not self._may_begin(self._reserved_bytes + expected, self._max_bytes) or not self._take():
                return
            index, url = self._pending[-1]
            self._can_extend = self._is_prefetchable(url)
            if self._can_extend and self._is_requested(index):
                self._fetch(index, str(url))

    def _is_soon(self, current: int, reading: RemoteParts) -> bool:
        """Whether the parts of one more shard begin soon: what comes before it is less than the limit of its share."""
        if not self._part_bytes or self._expected_bytes <= self._part_bytes:  # its first part is all of it
            return True
        following = self._following(current)
        closed = sum(not fetch.is_open for fetch in following)
        waiting = sum(fetch.waiting_bytes for fetch in (reading, *following)) + closed * self._expected_bytes
        # A part of the first parts, so that they do not take the place of those that the reader needs.
        return reading.is_open and waiting <= self._share_bytes and closed < max(self._most_parts // FIRST_PARTS, 1)

    def _following(self, current: int) -> list[RemoteParts]:
        return [fetch for index, fetch in self._fetches.items() if index > max(current, self._current)]

    def _begin_parts(self, fetch: RemoteParts, room: int) -> None:
        """Begin to fetch the next parts of a shard that has so much space."""
        open_count = self._open_count
        # Equally many of each open shard, or those that come first would leave none for the others.
        most = 1 + max(self._most_parts // open_count, 1) if open_count > 1 else sys.maxsize
        while (
            (count := fetch.next_bytes) and fetch.count < most and self._may_begin(fetch.reserved_bytes + count, room)
        ):
            fetch.begin_next()

    def _is_begun(self, fetch: RemoteParts) -> bool:
        """Whether all parts of a shard have begun; one that is expected to be small has only one."""
        is_known = fetch.is_open or not self._part_bytes or self._expected_bytes <= self._part_bytes
        return is_known and not fetch.next_bytes

    def _may_begin(self, reserved: int, room: int) -> bool:
        count, others = self._part_count + 1, self._open_count - 1
        in_flight = sum(fetch.in_flight for fetch in self._fetches.values())
        if reserved > room or count > self._wanted_parts + others or in_flight >= self._allowed_parts + others:
            return False
        return self._share is None or self._share.hold(count)

    @property
    def _reserved_bytes(self) -> int:
        return sum(fetch.reserved_bytes for fetch in self._fetches.values())

    @property
    def _open_count(self) -> int:
        """The number of open shards, at least one; each of them has a part, whatever the limits."""
        return max(sum(index <= self._current for index in self._fetches), 1)

    @property
    def _wanted_parts(self) -> int:
        """The number of parts, besides one of each further open shard: at least one more of each, and the next one."""
        return max(self._most_parts, self._open_count + 2)

    @property
    def _part_count(self) -> int:
        return sum(fetch.count for fetch in self._fetches.values())

    def _take(self) -> bool:
        """Take a URL from the source; return False at its end."""
        if self._source is None:
            return False
        try:
            self._pending.append(next(self._source))
        except StopIteration:
            self._source = None
        except Exception as error:  # noqa: BLE001  raised after the pending shards were read
            self._source, self._failure = None, error
        return self._source is not None


def open_ahead(url: str, max_bytes: int, /, share: PartShare | None = None, **options: Any) -> BinaryIO:
    """Open a file that is read to its end, as `open_url` does; threads fetch its parts, unless its store is near.

    Args:
        url: the file.
        max_bytes: the maximum number of bytes to hold in memory.
        share: see `ShardPrefetcher`.
        options: see `open_url`.
    """
    options["counters"] = options.get("counters") or Counters()
    return ShardPrefetcher((), max_bytes, options, lambda _: True, share=share).open(0, url, **options)


class PrefetchedStream(io.BufferedIOBase):
    """A stream of prefetched bytes, which are copied once.

    Args:
        parts: the parts of the shard.
        extend: called when buffered bytes were consumed, and with True when the reader has to wait.
        release: called when the stream is closed.
    """

    def __init__(self, parts: RemoteParts, extend: Callable[[bool], None], release: Callable[[], None]) -> None:
        self._parts, self._extend, self._release = parts, extend, release
        self._until_extend = 0  # with the first bytes, it is known what follows: the store has answered

    @property
    def etag(self) -> str | None:
        """The ETag of the shard, if its store reports one."""
        self._wait(1)
        return self._parts.etag

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end of the shard."""
        size = sys.maxsize if size is None or size < 0 else size
        pieces = []  # more than one if it is larger than a part, or than the limit of prefetched bytes
        while size and (data := self._take(size, size)):
            pieces.append(data)
            size -= len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read1(self, size: int = -1, /) -> bytes:
        """Return the available bytes, at most ``size``."""
        return self._take(sys.maxsize if size < 0 else size, 1)

    def peek(self, size: int = 0, /) -> bytes:
        """Return the available bytes, at most ``size``, without consuming them."""
        self._wait(1)
        return self._parts.peek(max(size, 1))

    def _take(self, size: int, least: int) -> bytes:
        self._wait(least)
        data = self._parts.take(size)
        self._until_extend -= len(data)
        if self._until_extend <= 0:
            self._until_extend = self._parts.block_bytes
            self._extend(False)
        return data

    def _wait(self, count: int) -> None:
        has_waited = False
        while not self._parts.is_ready(count):
            self._extend(not has_waited)
            has_waited = True
            self._parts.wait(count)

    def close(self) -> None:
        """Stop reading."""
        if not self.closed:
            self._release()
            super().close()
