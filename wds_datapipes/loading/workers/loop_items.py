"""The items that the loop of a `ShardReadingService` receives, and the state of each worker after them."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.report import LoadingReport, WorkerReport, log_skipped, log_stragglers
from wds_datapipes.loading.snapshots import LoopPosition
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.roles import Loader
from wds_datapipes.pipes.stage import Stage, iterated_by_loader
from wds_datapipes.user_warnings import warn_user

Pipe = IterDataPipe[Any]


class LoopItems(Loader, Stage[Any]):
    """The items of this rank, as the source of the main process's pipeline.

    Args:
        positions: for each worker, the items that the loop has received.
        continues: whether an epoch continues where the previous one ended.

    Attributes:
        epoch: the number of epochs that have begun.
        turn: the worker that yields the next item.
        is_over: whether the epoch has ended.
        current: the epoch that begins, if the loader counts epochs.
        rank: the number of this rank, for reports.
        stragglers: the slow workers that were logged.
        ahead: the worker of each item that was taken but not delivered yet, if a stage of the main process prefetches.
    """

    def __init__(self, positions: Sequence[LoopPosition], *, continues: bool) -> None:
        self.epoch = 0
        self.turn = 0
        self.is_over = False
        self.current: Epoch | None = None
        self.rank = 0
        self.stragglers = set[str]()
        self.ahead: deque[int] | None = None
        self._positions = positions
        self._continues = continues
        self._has_warned = False
        self._logged = LoadingReport(0, [])
        self._began = time.monotonic()

    @abstractmethod
    def begin(
        self, seed_generator: Any, resumed: Checkpoint | None, iter_reset_fn: Callable[[Pipe], Pipe] | None, pipe: Pipe
    ) -> None:
        """Begin an epoch.

        Args:
            seed_generator: the seed generator of this rank.
            resumed: the checkpoint from which it resumes.
            iter_reset_fn: the reset function of a preceding reading service.
            pipe: the pipeline of the main process.
        """
        self.epoch += 1
        self.turn = 0 if resumed is None else resumed.next_worker
        self.is_over = False
        if self.ahead is not None:
            self.ahead.clear()

    def bases(self, resumed: Checkpoint | None) -> Sequence[WorkerState] | None:
        """Return the state from which each worker begins the next epoch; None if it continues, or starts, by itself.

        If the loop has left an epoch of a stream, the workers continue after the items that the loop has received,
        and not after those that they have prefetched, whose number depends on timing.

        Args:
            resumed: the checkpoint from which the epoch resumes.
        """
        if resumed is not None:
            return resumed.parts
        if not self._continues or not self.epoch or self.is_over:
            return None
        try:
            return [state.renewed() for state in self.states()]
        except StateError as error:
            self._warn_of_lost_items(str(error))
            return None

    def _warn_of_lost_items(self, reason: str) -> None:
        """Warn once that the next epoch does not continue where the loop has left this one."""
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                "The loop has left an epoch of .with_epoch() before its end. The next epoch continues after the "
                f"items that were prefetched, whose number depends on timing, because there is no state: {reason}"
            )

    def taken(self, worker: int) -> None:
        """Count the next item of a worker as taken by the pipeline of the main process."""
        if self.ahead is None:
            self.deliver(worker)
        else:
            self.ahead.append(worker)

    def deliver(self, worker: int) -> None:
        """Count the next item of a worker as delivered to the loop."""
        self._positions[worker].delivered += 1
        self.turn = worker + 1

    def end(self) -> None:
        """Record that there are no more items in this epoch."""
        self.is_over = self.ahead is None
        before, self._logged = self._logged, self.report()
        log_skipped(recent := self._logged.since(before))
        log_stragglers(recent, "workers", self.stragglers)

    def states(self) -> list[WorkerState]:
        """Return the position of each worker after the items that the loop has received.

        Raises:
            StateError: the pipeline of a worker has no state.
        """
        return [position.state() for position in self._positions]

    def report(self) -> LoadingReport:
        """Return statistics of the workers so far."""
        host = socket.gethostname()
        workers = [replace(each, rank=self.rank, host=each.host or host) for each in self.reports()]
        dispatcher = self.report_of_dispatcher()
        dispatcher = None if dispatcher is None else replace(dispatcher, rank=self.rank, host=host)
        return LoadingReport(self.epoch, workers, time.monotonic() - self._began, dispatcher)

    @abstractmethod
    def reports(self) -> list[WorkerReport]:
        """Return statistics of each worker so far."""

    def report_of_dispatcher(self) -> WorkerReport | None:
        """Return statistics of the process that dispatches items to the workers, if there is one."""
        return None

    def close(self) -> None:
        """End the workers."""


@iterated_by_loader
class DeliveredCount(Loader, Stage[Any]):
    """Reports each delivered item to the source of the items, downstream of stages that prefetch."""

    process_boundary = "loop"

    def __init__(self, source: Pipe, items: LoopItems) -> None:
        self.source = source
        self._items = items
        items.ahead = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if self._items.ahead:
                self._items.deliver(self._items.ahead.popleft())
            yield item
        self._items.is_over = True


def users_part(pipe: Any) -> Any:
    """Return a pipeline without the stages that count its items, which are the last ones."""
    while declared(pipe).process_boundary == "loop":
        pipe = pipe.source
    return pipe
