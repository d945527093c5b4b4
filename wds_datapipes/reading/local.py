"""A pipeline without workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from torch.utils.data import IterDataPipe
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes.core.ledger import LEDGER
from wds_datapipes.reading.report import WorkerReport, log_skipped
from wds_datapipes.reading.seeding import returned

__all__ = ["LocalItems"]


class LocalItems(IterDataPipe[Any]):
    """The whole pipeline, in the main process.

    Args:
        source: the pipeline.
    """

    _is_child_datapipe = False

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source
        self._items = 0
        self._making_s = 0.0
        self._epoch = 0
        self._told: Mapping[str, int] = LEDGER.skipped().counts

    def __iter__(self) -> Iterator[Any]:
        begin = perf_counter()
        for item in self.source:
            self._making_s += perf_counter() - begin
            self._items += 1
            yield item
            begin = perf_counter()
        self._told = log_skipped(self._epoch, LEDGER.skipped(), self._told)

    def reset_with(
        self,
        iter_reset_fn: Callable[[Any], Any] | None,
        worker_reset_fn: Callable[[Any, Any, Any], Any] | None,
        seed_generator: Any,
    ) -> None:
        """Call what is to be called at the beginning of an epoch."""
        self._epoch += 1
        if iter_reset_fn is not None:
            self.source = returned("iter_reset_fn", iter_reset_fn(self.source))
        if worker_reset_fn is not None:
            source = worker_reset_fn(self.source, WorkerInfo(1, 0), seed_generator)
            self.source = returned("worker_reset_fn", source)

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
        )
