"""Throughput monitoring: warn about slow stores, drop stalled connections."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from wds_datapipes.counters import COUNTERS
from wds_datapipes.io.remote.resuming_stream import OpenedSource, Readable, StreamSource

__all__ = ["Attempt", "MonitoredSource", "ThroughputMonitor", "TooSlowError"]

T = TypeVar("T")

LOGGER = logging.getLogger("wds_datapipes")

#: A connection with less than this many bytes per second is dropped, and another one is opened.
DRIP_BYTES_PER_S = 1 << 10
#: One with less than this, or than a small part of this process's average, is logged as slow
SLOW_BYTES_PER_S, SLOW_PART = 64 << 10, 1 / 20
#: after this many seconds of waiting, and then not again for this many.
NOTICED_AFTER_S, QUIET_S = 10.0, 60.0

#: When a slow store was last logged.
_logged_at = -QUIET_S


class TooSlowError(TimeoutError):
    """A connection has stalled; a new one may be faster."""


class ThroughputMonitor:
    """Measures the throughput of one shard.

    Only the time spent waiting for a store counts, not the time between requests.

    Args:
        name: the shard's name in the log, without secrets.
        timeout_s: the seconds of waiting after which a connection that delivers next to nothing has stalled.
        clock: returns the time in seconds.
    """

    def __init__(self, name: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self.timeout_s, self.clock = name, timeout_s, clock
        self._is_logged = False
        self.begin()

    def begin(self) -> None:
        """Restart, after a reconnection."""
        self._bytes, self._waited_s = 0, 0.0
        self._noticed_bytes, self._noticed_s = 0, 0.0

    def record(self, count: int, waited_s: float) -> None:
        """Count received bytes.

        Raises:
            TooSlowError: too few have come.
        """
        usual = COUNTERS.fetched_bytes / COUNTERS.fetching_s if COUNTERS.fetching_s else 0.0
        COUNTERS.fetched(count, waited_s)
        self._bytes += count
        self._waited_s += waited_s
        self._noticed_bytes += count
        self._noticed_s += waited_s
        if self._noticed_s >= NOTICED_AFTER_S:
            if self._noticed_bytes < max(SLOW_BYTES_PER_S, usual * SLOW_PART) * self._noticed_s:
                self.log_slow(self._noticed_bytes, self._noticed_s)
            self._noticed_bytes, self._noticed_s = 0, 0.0
        if self._waited_s >= self.timeout_s:
            few = self._bytes < DRIP_BYTES_PER_S * self._waited_s
            found = f"only {self._bytes} bytes came in {self._waited_s:.1f} s"
            self._bytes, self._waited_s = 0, 0.0
            if few and count:  # the end takes its time too, and is no drip
                raise TooSlowError(found)

    def log_slow(self, count: int, waited_s: float) -> None:
        """Log that the store is slow, once per shard and not too often."""
        global _logged_at
        now = self.clock()
        if not self._is_logged and now - _logged_at >= QUIET_S:
            _logged_at = now
            LOGGER.warning("Reading %s is slow: %d bytes came in %.0f s", self._name, count, waited_s)
        self._is_logged = True


class MonitoredSource:
    """A source whose files have their throughput monitored.

    Args:
        origin: opens the file.
        monitor: measures the throughput of the shard.
    """

    def __init__(self, origin: StreamSource, monitor: ThroughputMonitor) -> None:
        self._origin, self._monitor = origin, monitor

    def open_at(self, start: int) -> OpenedSource:
        """Open the file at an offset, or at its beginning."""
        opened = self._origin.open_at(start)
        self._monitor.begin()
        return opened._replace(file=MonitoredFile(opened.file, self._monitor))


class MonitoredFile:
    """A file whose throughput is monitored."""

    def __init__(self, file: Readable, monitor: ThroughputMonitor) -> None:
        self._file, self._monitor = file, monitor

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        begin = self._monitor.clock()
        data = self._file.read(size)
        self._monitor.record(len(data), self._monitor.clock() - begin)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Attempt(Generic[T]):
    """A call in a thread, abandoned if it takes too long.

    Libraries wait for each byte of a response as long as they like, and cannot be stopped.

    Args:
        what: it.
    """

    def __init__(self, what: Callable[[], T]) -> None:
        self._what: Callable[[], T] | None = what
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wds-store", daemon=True)

    def result(self, most_s: float, slow_s: float = 0.0, on_slow: Callable[[], object] | None = None) -> T:
        """Run the call, and return its result.

        Args:
            most_s: the seconds that the call may take.
            slow_s: the seconds after which ``on_slow`` is called.
            on_slow: called if the call is slow.

        Raises:
            TooSlowError: it takes longer, or was abandoned.
            BaseException: whatever the call raises.
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
            raise TooSlowError(f"what was asked for did not come within {most_s:g} s")
        finally:
            del error  # this frame would hold the error, and the error this frame

    def abandon(self) -> None:
        """Stop waiting for the thread."""
        self._has_ended.set()

    def _run(self) -> None:
        what, self._what = self._what, None
        try:
            if what is not None:
                self._results.append(what())
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._error = error
        self._has_ended.set()
