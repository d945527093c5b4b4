"""Throughput monitoring: warn about slow stores, drop stalled connections."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from wds_datapipes.counters import Counters
from wds_datapipes.io.remote.resuming_stream import RawReader

if TYPE_CHECKING:
    from typing_extensions import Buffer


T = TypeVar("T")

LOGGER = logging.getLogger("wds_datapipes")

#: A connection that delivers fewer bytes per second than this has stalled: it is dropped, and a new one opened.
STALLED_BYTES_PER_S = 1 << 10
#: A connection below this rate, or below this fraction of the pipeline's average, is logged as slow
SLOW_BYTES_PER_S, SLOW_FRACTION = 64 << 10, 1 / 20
#: after this many seconds of waiting, and at most once in this many seconds.
SLOW_AFTER_S, QUIET_S = 10.0, 60.0


class TooSlowError(TimeoutError):
    """A connection has stalled; a new one may be faster."""


class ThroughputMonitor:
    """Measures the throughput of one connection.

    Only the time spent waiting for a store counts, not the time between requests.

    Args:
        name: the shard's name in the log, without credentials.
        timeout_s: the seconds of waiting after which a connection below the minimum rate has stalled.
        counters: the counters of the pipeline that reads the shard.
        clock: returns the time in seconds.
    """

    def __init__(
        self, name: str, timeout_s: float, counters: Counters | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self.timeout_s, self.clock = name, timeout_s, clock
        self.counters = Counters() if counters is None else counters
        self._is_logged = False
        self._bytes, self._waited_s = 0, 0.0
        self._recent_bytes, self._recent_s = 0, 0.0

    def record(self, count: int, waited_s: float) -> None:
        """Count received bytes.

        Raises:
            TooSlowError: the connection has stalled.
        """
        self.counters.count_fetched(count, waited_s)
        self._bytes += count
        self._waited_s += waited_s
        self._recent_bytes += count
        self._recent_s += waited_s
        if self._recent_s >= SLOW_AFTER_S:
            fetched_bytes, fetching_s = self.counters.fetched()
            if self._recent_bytes < max(SLOW_BYTES_PER_S, SLOW_FRACTION * fetched_bytes / fetching_s) * self._recent_s:
                self.log_slow(self._recent_bytes, self._recent_s)
            self._recent_bytes, self._recent_s = 0, 0.0
        if self._waited_s >= self.timeout_s:
            is_stalled = self._bytes < STALLED_BYTES_PER_S * self._waited_s
            message = f"received only {self._bytes} bytes in {self._waited_s:.1f} s"
            self._bytes, self._waited_s = 0, 0.0
            if is_stalled and count:  # waiting for the end of the file does not count
                raise TooSlowError(message)

    def log_slow(self, count: int, waited_s: float) -> None:
        """Log that the store is slow, once per connection and not too often."""
        now, logged_at = self.clock(), self.counters.slow_logged_at
        if not self._is_logged and (logged_at is None or now - logged_at >= QUIET_S):
            self.counters.slow_logged_at = now
            LOGGER.warning("Reading %s is slow: received %d bytes in %.0f s", self._name, count, waited_s)
        self._is_logged = True


class MonitoredFile:
    """A file whose throughput is monitored."""

    def __init__(self, file: RawReader, monitor: ThroughputMonitor) -> None:
        self._file, self._monitor = file, monitor

    def readinto(self, buffer: Buffer, /) -> int:
        """Read the available bytes, at most ``len(buffer)``; 0 at the end."""
        begin = self._monitor.clock()
        count = self._file.readinto(buffer)
        self._monitor.record(count, self._monitor.clock() - begin)
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Attempt(Generic[T]):
    """A call in a thread, abandoned if it takes too long.

    Libraries may wait for a response for any time, and cannot be interrupted.

    Args:
        call: the function to call.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wds-store", daemon=True)

    def result(self, most_s: float, slow_s: float = 0.0, on_slow: Callable[[], object] | None = None) -> T:
        """Run the call, and return its result.

        Args:
            most_s: the time-out in seconds.
            slow_s: the seconds after which ``on_slow`` is called.
            on_slow: called if the call is slow.

        Raises:
            TooSlowError: the call took longer, or was abandoned.
            BaseException: any error of the call.
        """
        self._thread.start()
        if on_slow is not None and not self._has_ended.wait(slow_s):
            on_slow()
        self._has_ended.wait(most_s - slow_s)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if self._results:
                return self._results.pop()
            raise TooSlowError(f"no response within {most_s:g} s")
        finally:
            del error  # breaks the reference cycle between the error and this frame

    def abandon(self) -> None:
        """Stop waiting for the thread."""
        self._has_ended.set()

    def _run(self) -> None:
        call, self._call = self._call, None
        try:
            if call is not None:
                self._results.append(call())
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self._error = error
        self._has_ended.set()
