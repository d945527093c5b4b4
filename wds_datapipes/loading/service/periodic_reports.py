"""Periodic reports of a loader, which its callback receives and its rank publishes."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

from wds_datapipes.errors import RankLostError
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.report import LOGGER, LoadingReport, WorkerReport, log_stragglers
from wds_datapipes.loading.workers.loop_items import LoopItems

#: How long to wait for a running callback when the loader shuts down, in seconds.
CLOSE_S = 1.0


class PeriodicReports:
    """A thread that reports at regular intervals, even while the loop waits.

    Each loader has its own thread, so that a slow callback does not delay other loaders. Between reports, the thread
    sleeps; it does not keep the loader alive.

    Args:
        items: the items of the loader.
        ranks: the ranks that share their reports, if there are several.
        service: a weak reference to the service, whose callback may refer to the loader in turn.
        every_s: the interval, in seconds.
    """

    def __init__(self, items: LoopItems, ranks: Ranks | None, service: weakref.ref[Any], every_s: float) -> None:
        self._items, self._ranks, self._service, self._every_s = items, ranks, service, every_s
        self._before = self._all_before = LoadingReport(0, [])
        self._stragglers = set[str]()
        self._is_closed = False
        # Not an Event: garbage collection of the loader may interrupt its wait(), and set() would then deadlock.
        self._closing = threading.Lock()
        self._closing.acquire()
        self._thread = threading.Thread(target=self._run, name="wds_datapipes reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reporting; the callback is not called again."""
        if not self._is_closed:
            self._is_closed = True
            self._closing.release()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.acquire(timeout=min(self._every_s, threading.TIMEOUT_MAX)):
            try:
                self._report()
            except Exception:  # noqa: BLE001, PERF203  the user's function may raise anything
                LOGGER.exception("The report of a loader has failed; the loader continues")

    def _report(self) -> None:
        before, self._before = self._before, self._items.report()
        recent = self._before.since(before)
        log_stragglers(recent, "workers", self._items.stragglers)
        found = recent.as_dict()
        if self._ranks is not None:
            with suppress(RankLostError):  # the loop raises it at the beginning of the next epoch
                reads, earlier = self._ranks.rank == 0, self._all_before
                self._all_before = share_report(self._before, self._ranks, reads=reads)
                recent = self._all_before.since(earlier)
                log_stragglers(recent, "ranks", self._stragglers)
                if reads:
                    found.update({f"all_ranks_{name}": value for name, value in recent.as_dict().items()})
        on_report = getattr(self._service(), "on_report", None)
        if on_report is not None and not self._is_closed:
            on_report(found)


def share_report(report: LoadingReport, ranks: Ranks, *, reads: bool) -> LoadingReport:
    """Publish the report of this rank; with ``reads``, return the latest one of each rank.

    Raises:
        RankLostError: the store of the process group does not respond.
    """
    texts = ranks.share(report.total.to_json(), reads=reads)
    return LoadingReport(report.epoch, [WorkerReport.from_json(text) for text in texts], report.elapsed_s)
