"""Steps of a run that reads a stream, from the log of the positions of its samples."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wds_datapipes.errors import StateError
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.timeline import unknown_step_error
from wds_datapipes.loading.checkpoint.received import LoggedBatches
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.inspection import call_of
from wds_datapipes.pipes.samples.indexed_samples import IndexedSamples
from wds_datapipes.pipes.state.pipeline_state import first_uneven_stage
from wds_datapipes.received_epochs import UNKNOWN, ReceivedEpochs
from wds_datapipes.samples.sample_log import BYTES, OFFSET_BITS


class LoggedSteps:
    """Finds the samples of each step in a log: the loop of a rank takes batches from its workers in turn.

    Args:
        pipeline: the pipeline, with ``.log_samples(positions=)``.
        first: the seed of the first epoch of the run.
        received: the epochs that the loops of the ranks have received.

    Raises:
        ValueError: the pipeline has no log, or a stage after it does not make batches of a fixed size.
    """

    def __init__(self, pipeline: Any, first: int, received: Sequence[ReceivedEpochs]) -> None:
        self._batches = LoggedBatches(PipelineGraph(pipeline).chain)
        if self._batches.folder is None:
            raise ValueError("The steps of a stream require the log of .log_samples(positions=)")
        if (uneven := first_uneven_stage(self._batches.later)) is not None:
            raise ValueError(f"{call_of(uneven)} comes after the log and may drop samples or hold them back")
        self._folder, self._size = self._batches.folder / f"{first:016x}", self._batches.size
        self._received = [*received]

    def rows(self, step: int) -> tuple[IndexedShards, int, Numbers]:
        """Return the shards of the samples of a step, its epoch, and a row of numbers for each sample.

        A row has the rank, the worker, the number of the shard, that of the sample in it, and 0: it is not padding.

        Raises:
            StateError: the log ends before the step, lacks some workers, or refers to samples that do not exist; or the
                state does not contain how many steps the loops have received of an epoch.
        """
        batch = step
        for found_epoch in self._epochs(step):
            if batch < (steps := int(found_epoch[1].max())):
                break
            batch -= steps
        epoch, received, logs, counts = found_epoch
        found = list[tuple[int, int, str, int]]()
        for rank, own in enumerate(counts):
            if batch < received[rank]:
                # The loop takes batch 0 of every worker, then batch 1 of those that have one, and so on.
                number = bisect_right(range(int(own.max())), batch, key=lambda n: np.minimum(own, n).sum()) - 1
                worker = np.flatnonzero(own > number)[batch - np.minimum(own, number).sum()]
                log, first = logs[rank][worker], number * self._size * BYTES
                urls = os.fsdecode(log.with_suffix(".shards").read_bytes()).split("\0")
                for position in np.fromfile(log, "<u8", self._size, offset=first).tolist():
                    found.append((rank, worker, urls[position >> OFFSET_BITS], position % (1 << OFFSET_BITS)))
        dataset = IndexedSamples([*dict.fromkeys(url for _, _, url, _ in found)]).dataset
        rows = np.array([[rank, worker, dataset.urls.index(url), at, 0] for rank, worker, url, at in found], np.int64)
        for shard in np.unique(rows[:, 2]).tolist():
            own, begins = rows[:, 2] == shard, dataset.read_index(shard).columns["sample_offsets"][:-1]
            if not np.isin(rows[own, 3], begins).all():
                raise StateError(f"{dataset.urls[shard]} was replaced: it lacks samples that are in the log")
            rows[own, 3] = np.searchsorted(begins, rows[own, 3])
        return dataset, epoch, rows

    def _epochs(self, step: int) -> Iterator[tuple[int, Numbers, list[list[Path]], Numbers]]:
        """Yield the epochs of the run: number, batches that each rank has received, and the result of `_open_epoch`.

        Raises:
            StateError: the log ends, or the loops have received an unknown number of batches.
        """
        for visits in zip(*(each.visits() for each in self._received), strict=False):  # they have no end
            epochs, lefts = {epoch for epoch, _ in visits}, [left for _, left in visits]
            epoch = visits[0][0]
            if lefts == [(0, 0)] * len(lefts):
                continue
            logs, counts = self._open_epoch(epoch)
            received, ranks = counts.sum(axis=1), len(counts)
            if len(epochs) > 1 or (any(lefts) and len(lefts) != ranks):
                raise StateError(
                    f"The loops of {ranks} ranks have left epochs early, but there are the states of {len(lefts)}, or "
                    "they have received other epochs. Pass merge_states([...]) of the states of all ranks"
                )
            if UNKNOWN in lefts:
                raise unknown_step_error(step, epoch)
            for rank, left in enumerate(lefts):
                if left is not None:
                    received[rank] = min(received[rank], left[0])
            # If all loops have left the epoch early, some workers may have ended before they began their logs.
            lacking = [worker for row in logs for worker, log in enumerate(row) if None in lefts and not log.exists()]
            if lacking:
                received = np.minimum(received, min(lacking))
            yield epoch, received, logs, counts
            if lacking:
                raise self._incomplete_error(epoch)

    def _open_epoch(self, epoch: int) -> tuple[list[list[Path]], Numbers]:
        """Return the logs of an epoch by rank and worker, and the number of batches in each; 0 if it does not exist.

        Raises:
            StateError: there is no log, or the logs have different numbers of ranks or workers.
        """
        attempts = [*self._folder.glob(f"{epoch:06}-0of*-0of*.positions")]
        if len(attempts) != 1:
            raise self._incomplete_error(epoch)
        ranks, workers = map(int, re.findall(r"of(\d+)", attempts[0].name))
        names = [[f"{rank}of{ranks}-{worker}of{workers}" for worker in range(workers)] for rank in range(ranks)]
        logs = [[self._folder / f"{epoch:06}-{name}.positions" for name in row] for row in names]
        sizes = np.array([[path.stat().st_size if path.exists() else 0 for path in row] for row in logs])
        return logs, self._batches.count(sizes // BYTES)

    def _incomplete_error(self, epoch: int) -> StateError:
        return StateError(f"The log in {self._folder} ends before epoch {epoch} or lacks some of its workers")
