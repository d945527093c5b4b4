"""A pipeline without workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from torch.utils.data import IterDataPipe
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes.core.ledger import LEDGER
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.state import lasts, load_state, renewed, save_state
from wds_datapipes.reading.report import WorkerReport, log_skipped
from wds_datapipes.reading.resuming import Resumed
from wds_datapipes.reading.seeding import returned

__all__ = ["LocalItems"]


class LocalItems(IterDataPipe[Any]):
    """The whole pipeline, in the main process.

    Args:
        source: the pipeline.
    """

    _is_child_datapipe = False

    #: There is no other worker.
    turn = 0

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self._items = 0
        self._making_s = 0.0
        self._epoch = 0
        self._told: Mapping[str, int] = LEDGER.skipped().counts
        self._resumed: Resumed | None = None
        self._made = 0  # in this epoch
        #: Where the pipeline was after each item that was taken and is not delivered yet; and after the last delivered.
        self.ahead: deque[Resumed] | None = None
        self._mark = Resumed(0, 0, None)
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        begin = perf_counter()
        load_state(self.source, None)
        if resumed is not None:
            resumed.load(self.source)
        for item in self.source if resumed is None else resumed.pass_over(self.source):
            self._making_s += perf_counter() - begin
            self._items += 1
            self._made += 1
            if self.ahead is not None:
                self.ahead.append(Resumed(self._made, 0, save_state(self.source)))
            yield item
            begin = perf_counter()
        self.is_over = self.ahead is None
        self._told = log_skipped(self._epoch, LEDGER.skipped(), self._told)

    def go_on_from(self, resumed: Resumed) -> None:
        """Go on in the middle of an epoch when it is iterated next."""
        self._resumed = self._mark = resumed
        self._made = resumed.items

    def deliver(self, mark: Resumed) -> None:
        """Take note that the loop gets an item, and where the pipeline was after it."""
        self._mark = mark

    def states(self) -> list[Resumed]:
        """Return where to go on behind what the loop has."""
        if (self.ahead is None and self._made > self._mark.items) or (self.is_over and lasts(self.source)):
            return [Resumed(self._made, 0, save_state(self.source))]
        return [self._mark]

    def reset_with(
        self,
        iter_reset_fn: Callable[[Any], Any] | None,
        worker_reset_fn: Callable[[Any, Any, Any], Any] | None,
        seed_generator: Any,
    ) -> None:
        """Call what is to be called at the beginning of an epoch."""
        self._epoch += 1
        self._mark = self._beginning()
        self._resumed = None if self._resumed is None else self._mark
        self._made = 0
        self.is_over = False
        if self.ahead is not None:
            self.ahead.clear()
        if iter_reset_fn is not None:
            self.source = returned("iter_reset_fn", iter_reset_fn(self.source))
        if worker_reset_fn is not None:
            source = worker_reset_fn(self.source, WorkerInfo(1, 0), seed_generator)
            self.source = returned("worker_reset_fn", source)

    def _beginning(self) -> Resumed:
        """Return where an epoch begins behind the last one."""
        if self._resumed is not None:
            return self._resumed.renewed()
        try:
            return Resumed(0, 0, renewed(save_state(self.source)) if lasts(self.source) else None)
        except StateError:  # whoever asks for a state is told
            return Resumed(0, 0, None)

    def report(self) -> WorkerReport:
        """Return what was done so far. All that is passed over in this process counts."""
        return WorkerReport(
            name="The main process",
            pid=os.getpid(),
            items=self._items,
            bytes=0,
            making_s=self._making_s,
            waiting_s=0.0,
            waited_s=self._making_s,
            shard=LEDGER.shard,
            skipped=LEDGER.skipped(),
            fetched_bytes=LEDGER.fetched_bytes,
            fetching_s=LEDGER.fetching_s,
        )
