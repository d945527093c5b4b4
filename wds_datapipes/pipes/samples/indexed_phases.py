"""The phases of a run of indexed samples: in which order an epoch reads them, and how a run is amended."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from wds_datapipes.epoch import NO_EPOCH, Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.index.format.options import EpochOptions
from wds_datapipes.index.order.batch_share import BatchShare, Remainder, RestOfEpoch
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase, check_amendment, phases_in, record_of
from wds_datapipes.index.order.rows.row_plan import RowPlan
from wds_datapipes.index.order.sample_order import LaneOrder, Order
from wds_datapipes.index.order.timeline import RunTimeline
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.received_epochs import Left, ReceivedEpochs
from wds_datapipes.types import Instance

if TYPE_CHECKING:
    from typing_extensions import Self


class PhasedSamples(SeededStage):
    """The phases of a run, and the global batches and steps that follow from them.

    Attributes:
        timeline: the phases of the run, and the epochs that the loop has received.
        number: the number of the epoch.
        run_seed: the seed of the order in the first epoch of the run.
        plan: the rows of the latest epoch, if rows are planned.
    """

    order: Order
    lanes: int
    remainder: Remainder
    epoch: EpochOptions
    global_batch_size: int | None
    timeline: RunTimeline
    number: int
    run_seed: int
    plan: RowPlan | None = None
    shares_seed = True
    _first: int
    _shuffles: bool
    _own_phase: Phase
    _shards: IndexedShards

    @property
    def _count(self) -> int:
        """The number of samples in the latest epoch."""
        return self.timeline.phase_of(self.number).count

    def set_shuffle(self, shuffle: bool = True) -> Self:
        """Turn shuffling on or off; loaders call this."""
        self._shuffles = shuffle
        return self

    def phased_source(self) -> Self:
        """Return the stage, which has the phases and exclusions of a run."""
        return self

    @property
    def unit(self) -> Literal["sample", "row"]:
        """What the positions of an epoch count: samples, or rows if rows are planned."""
        return "sample" if self.epoch.pack is None else "row"

    def timeline_of(self, phases: Sequence[Phase], received: ReceivedEpochs | None = None) -> RunTimeline:
        """Return the timeline of a run with some phases, whose loop has received some epochs; by default, as known."""
        received = self.timeline.received if received is None else received
        drops, rows = self.remainder == "drop", None if self.epoch.pack is None else self
        return RunTimeline(phases, self.lanes, drops=drops, received=received, rows=rows)

    def rows_in(self, epoch: int) -> int:
        """Return the number of rows in an epoch of the run, if rows are planned."""
        raise NotImplementedError

    def samples_in(self, steps: int, phase: Phase, weights: Mapping[str, int]) -> int:
        """Return the number of samples that some steps are expected to have, if rows are planned."""
        raise NotImplementedError

    def order_of_epoch(self, *, following: bool = False) -> LaneOrder:
        """Return the order of the epoch whose seed was set last, or of the following one, if its seed is known.

        If rows are planned, begin the plan of the epoch, too.

        Raises:
            RuntimeError: weights change by step, but the loader does not count steps.
        """
        if self.epoch.pack is not None:
            self.plan = self.plan_of_epoch()
            return self.plan.order
        known, number, facts = self._facts_of_epoch(following=following)
        return self._shards.order_of(self.timeline, number, known, self.epoch, **facts)

    def plan_of_epoch(self, *, following: bool = False) -> RowPlan:
        """Return a new plan of the rows of the epoch whose seed was set last, or of the following one."""
        order, number, facts = self._facts_of_epoch(following=following)
        return self._shards.rows_of(self.timeline, number, order, self.epoch, **facts)

    def _facts_of_epoch(self, *, following: bool) -> tuple[Order, int, dict[str, int]]:
        """Return the order of an epoch, its number, and the seeds of the epoch and of the run."""
        order: Order = self.order if self._shuffles else "sequential"
        if following:
            seed, number = self.next_seed or 0, self.number + 1
        else:
            seed, known = 0 if order == "sequential" else self.take_seed(), self.take_epoch()
            if known is not None and self._first not in (-1, known.first):  # another run begins
                self.load_phases([])
            self._check_schedule(known)
            self.run_seed, self.number = seed, 0
            if known is not None:
                self.run_seed, self.number = self.first_seed or 0, known.number
                self.timeline = self.timeline_of(self.timeline.phases, known.received)
            number = self.number
        return order, number, {"seed": seed, "run": self.run_seed}

    def _check_schedule(self, epoch: Epoch | None) -> None:
        """Check that the steps of a run are known if its weights change by step."""
        if all(len(phase.points or ()) <= 1 for phase in self.timeline.phases):
            return
        if epoch is None:
            raise RuntimeError(
                "The weights change by step, but the steps of the run are not counted here. Read with "
                "StatefulShards, or with DataLoader2, ShardReadingService and a seed, and without a later stage "
                "that restarts IndexedSamples, such as .with_epoch() or .mix_samples(). To set the length of an "
                "epoch, pass epoch=EpochOptions(samples=n); to mix, pass all datasets to IndexedSamples"
            )
        if not epoch.received.follows:
            raise RuntimeError(
                f"The weights change by step, so each epoch must follow the previous one, but set_epoch() has selected "
                f"epoch {epoch.number}. Call it with the number of the next epoch, or not at all"
            )
        if self.epoch.pack is not None and any(left is not None for _, _, left in epoch.received.stretches()):
            raise RuntimeError(
                "The weights change by step, and the loop has left an epoch early. With pack, the steps are those of "
                "whole epochs: set the length of an epoch with EpochOptions(samples=n) instead"
            )

    def first_phase(self) -> dict[str, Any]:
        """Return the record of the first phase of a run that begins with this pipeline."""
        return record_of(self._described_phase())

    def load_phases(self, records: Sequence[Mapping[str, Any]], epoch: Epoch = NO_EPOCH) -> None:
        """Continue the phases of a run.

        Args:
            records: the records in its state; empty if a run begins with this pipeline.
            epoch: the epoch in which it resumes.
        """
        phases = phases_in(records) or [self._own_phase]
        self.timeline, self._first = self.timeline_of(phases, epoch.received), epoch.first if records else -1
        self.number = max(epoch.number, 0)

    def begin_phase(self, records: Sequence[Mapping[str, Any]], epoch: int, position: int) -> dict[str, Any]:
        """Return the record of the phase that begins with this pipeline at a position of a run.

        Args:
            records: the phases before it.
            epoch: the epoch.
            position: the position in the epoch.

        Raises:
            StateError: the phase would repeat or lose samples.
        """
        timeline = self.timeline_of(phases_in(records))
        own = replace(self._described_phase(), epoch=epoch, start=position, step=timeline.step_at(epoch, position))
        record = record_of(own, timeline.phases[-1])
        if "start" in record:
            check_amendment(timeline, own, self._shards.digest_of)
            has_windows = self._shards.lengths is not None or self._shards.columns is not None
            if self.global_batch_size is None or (position and has_windows):
                raise StateError(
                    "The datasets, weights and batches of a run can be amended only if it has a global_batch_size and, "
                    "with bucket_by or pack, only at the end of an epoch"
                )
        return record

    def _described_phase(self) -> Phase:
        """Return the phase of this pipeline with the digests of its datasets."""
        facts = {
            name: (shards, samples, self._shards.digest_of(name, shards))
            for name, (shards, samples, *_) in self._own_phase.datasets.items()
        }
        return replace(self._own_phase, datasets=facts)

    def batch_of(self, ranks: int) -> int:
        """Return the number of samples in a batch over all ranks, in the last phase up to this epoch."""
        phase = [each for each in self.timeline.phases if each.epoch <= self.number][-1]
        return ranks if self.global_batch_size is None else phase.batch

    def find_batch(self, number: int, ranks: int, rest: RestOfEpoch, batch: int) -> list[Numbers]:
        """Return the positions in the epoch of the samples of a global batch on each rank.

        Args:
            number: the number of the batch in the epoch, or in the rest of an epoch.
            ranks: the number of ranks.
            rest: the rest of the epoch, if a different number of ranks or workers has begun it.
            batch: the number of samples in a batch.
        """
        ranks = 1 if batch % ranks else ranks  # an earlier phase had other ranks
        lanes = self.lanes if self.epoch.pack is None else 1
        shares = [
            BatchShare(self._count, batch, self.remainder, Instance(rank, ranks), rest, lanes) for rank in range(ranks)
        ]
        none = np.zeros(0, np.int64)  # of the last batch, some ranks may get no sample
        return [np.concatenate([none, *share.positions(number * share.size, number + 1)]) for share in shares]

    def timeline_on(self, ranks: int) -> RunTimeline:
        """Return the timeline of the run on some ranks, on which the size of a batch may depend."""
        phases = [replace(each, batch=ranks) if each.batch == 1 else each for each in self.timeline.phases]
        return self.timeline_of(phases)

    def steps_received(
        self, epoch: int, ranks: int, begun: Mapping[str, Any] | None, left: Mapping[str, Any] | None
    ) -> Left:
        """Return how a loop has left an epoch.

        Args:
            epoch: the epoch.
            ranks: the number of ranks.
            begun: the state of the part of the epoch with which the loop resumed, if on other ranks or workers.
            left: that of the part that it has not received.
        """
        resumed, rest = map(RestOfEpoch.from_state, (begun, left))
        has_rows = self.epoch.pack is not None
        # The number of rows in an epoch is planned as late as possible; until then, its end is far away.
        last = (sys.maxsize if rest.end is None else rest.end) if has_rows else self.timeline.end_of(epoch)
        timeline, (begin, end) = self.timeline_on(ranks), (each.start - len(each.missing) for each in (resumed, rest))
        before = timeline.steps_before(epoch, begin)
        is_even = timeline.steps_before(epoch, begin + 1) > before or begin >= last
        if is_even and not resumed.missing:
            if end >= last:
                return None
            steps, parts = timeline.steps_before(epoch, end), rest.missing
        else:  # the batches of the rest lie across those of the epoch
            batches = (
                [phase.batch for start, _, phase in timeline.segments(epoch) if start <= begin] if not has_rows else []
            )
            batch = batches[-1] if batches else timeline.phase_of(epoch).batch
            steps, parts = before - (begin - end) // batch, (*resumed.missing, *rest.missing, begin)
        return steps, timeline.steps_before(epoch, min(parts) + 1) - 1 if parts else steps
