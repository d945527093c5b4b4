"""The phases of a run of indexed samples: which part of an order each step reads, and how a run is amended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wds_datapipes.epoch import NO_EPOCH, Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.index.order.batch_share import BatchShare, Remainder, RestOfEpoch
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.phase_records import check_amendment, phases_in, record_of
from wds_datapipes.index.order.timeline import RunTimeline
from wds_datapipes.received_epochs import Left, ReceivedEpochs
from wds_datapipes.types import Instance


class PhasedSamples:
    """The phases of a run, and the global batches and steps that follow from them.

    Attributes:
        timeline: the phases of the run, and the epochs that the loop has received.
        number: the number of the epoch.
    """

    lanes: int
    remainder: Remainder
    global_batch_size: int | None
    timeline: RunTimeline
    number: int
    _first: int
    _own_phase: Phase
    _shards: IndexedShards

    @property
    def _count(self) -> int:
        """The number of samples in the latest epoch."""
        return self.timeline.phase_of(self.number).count

    def timeline_of(self, phases: Sequence[Phase], received: ReceivedEpochs | None = None) -> RunTimeline:
        """Return the timeline of a run with some phases, whose loop has received some epochs; by default, as known."""
        received = self.timeline.received if received is None else received
        return RunTimeline(phases, self.lanes, drops=self.remainder == "drop", received=received)

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
            if self.global_batch_size is None or (position and self._shards.lengths is not None):
                raise StateError(
                    "The datasets, weights and batches of a run can be amended only if it has a global_batch_size and, "
                    "with bucket_by, only at the end of an epoch"
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
        shares = [
            BatchShare(self._count, batch, self.remainder, Instance(rank, ranks), rest, self.lanes)
            for rank in range(ranks)
        ]
        return [np.concatenate([*share.positions(number * share.size, number + 1)]) for share in shares]

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
        timeline, (begin, end) = self.timeline_on(ranks), (each.start - len(each.missing) for each in (resumed, rest))
        before = timeline.steps_before(epoch, begin)
        is_even = timeline.steps_before(epoch, begin + 1) > before or begin >= timeline.end_of(epoch)
        if is_even and not resumed.missing:
            if end >= timeline.end_of(epoch):
                return None
            steps, parts = timeline.steps_before(epoch, end), rest.missing
        else:  # the batches of the rest lie across those of the epoch
            batch = [phase.batch for start, _, phase in timeline.segments(epoch) if start <= begin][-1]
            steps, parts = before - (begin - end) // batch, (*resumed.missing, *rest.missing, begin)
        return steps, timeline.steps_before(epoch, min(parts) + 1) - 1 if parts else steps
