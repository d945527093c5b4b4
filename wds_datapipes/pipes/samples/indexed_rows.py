"""The planned rows of indexed samples: which rows an instance reads, and its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from wds_datapipes.epoch import NO_EPOCH, Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.index.order.batch_share import BatchShare, RestOfEpoch
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.rows.row_plan import RowPlan
from wds_datapipes.index.order.sample_order import Order
from wds_datapipes.index.order.substitutes import Substitutes
from wds_datapipes.index.read.dataset_reader import DatasetReader, ProcessReaders
from wds_datapipes.index.read.epoch import read_epoch
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.pipes.samples.indexed_share import SharedSamples
from wds_datapipes.samples.fields import PADDING_MARK, ROW_MARK
from wds_datapipes.samples.row_joining import RowMark
from wds_datapipes.seeds import SeedGenerator
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import Resharding
from wds_datapipes.types import Instance, Sample

#: The number of rows whose samples are located at a time.
ROWS = 256
#: Stands for the number of rows in an epoch whose end is not planned yet.
ENDLESS = 1 << 60


class IndexedRows(SharedSamples):
    """Reads whole rows, if rows are planned.

    Positions are then the numbers of rows, and an instance counts the rows whose samples it has yielded. Each process
    plans the windows that it reaches, in the order of the epoch; the number of rows in an epoch is known after its last
    window, or by `len`.
    """

    _readers: ProcessReaders
    _planned: tuple[int, ...] = ()  # where a loaded state begins to plan; see `RowPlan.window_at`
    #: The rows yielded, the last batch begun, and where planning begins for its first row.
    _begun: tuple[int, int, tuple[int, ...]] = (0, -1, ())
    _part: int = 0  # how many samples of the next row this instance has yielded
    _first_row: int = 0  # how many rows it had yielded when this pass began
    _has_ended: bool = False  # whether a handler of errors has ended this pass
    _known: Epoch = NO_EPOCH  # an epoch of the run, from which the seeds of others follow
    _rows_of: dict[tuple[int, int], int]  # the numbers of rows in its epochs

    @property
    def _leaves_holes(self) -> bool:
        return self.epoch.pack is None and super()._leaves_holes

    @property
    def _count(self) -> int:
        """The number of samples, or of rows, in the latest epoch; before the first one, in that if its seed is set.

        Raises:
            TypeError: rows are planned, and the seed of the epoch is unknown.
        """
        if self.epoch.pack is None:
            return super()._count
        if self.plan is None and self._seed is not None:
            number, run = (self.current_epoch or Epoch(number=0)).number, self.first_seed or self._seed
            if (found := self._rows_of.get(known := (number, self._seed))) is None:
                found = self._rows_of[known] = len(self._plan_with(number, self._seed, run))
            return found
        if self.plan is None and self._shuffles and self.order != "sequential" and self._known.number < 0:
            raise TypeError(
                "IndexedSamples has no length yet, because the seed of the epoch decides how samples share rows. A "
                "loader sets the seed when it begins the epoch"
            )
        return self.rows_in(self.number)

    def rows_in(self, epoch: int) -> int:
        """Return the number of rows in an epoch of the run."""
        if self.plan is not None and epoch == self.number:
            return len(self.plan)
        if (found := self._rows_of.get(known := (epoch, len(self.timeline.phases)))) is None:
            found = self._rows_of[known] = len(self._plan_of(epoch))
        return found

    def samples_in(self, steps: int, phase: Phase, weights: Mapping[str, int]) -> int:
        """Return the number of samples that some steps are expected to have, from the mean lengths of the datasets.

        Args:
            steps: the number of steps.
            phase: the phase of the run, in which they have these datasets and as many rows.
            weights: the weight of each dataset.
        """
        if (pack := self.epoch.pack) is None:
            raise ValueError("rows are planned only with EpochOptions(pack=)")
        used = {name: weight for name, weight in weights.items() if weight}
        parts = {name: phase.drawn_datasets(name) for name in used}
        tokens = sum(
            Fraction(
                weight * self._shards.tokens_in(parts[name], pack), sum(phase.datasets[each][1] for each in parts[name])
            )
            for name, weight in used.items()
        )
        return int(steps * phase.batch * pack.row * sum(used.values()) / max(tokens, Fraction(1)))

    def _plan_of(self, epoch: int) -> RowPlan:
        """Return the plan of an epoch of the run.

        Raises:
            StateError: its seed is unknown.
        """
        run, seed = (SeedGenerator(self._known.seed_of(each)).generate_shared_seed() for each in (0, epoch))
        return self._plan_with(epoch, seed, run)

    def _plan_with(self, epoch: int, seed: int, run: int) -> RowPlan:
        """Return the plan of an epoch, given the seeds of this stage in it and in the first epoch of the run."""
        order: Order = self.order if self._shuffles else "sequential"
        return self._shards.rows_of(self.timeline, epoch, order, self.epoch, seed=seed, run=run)

    def load_phases(self, records: Sequence[Mapping[str, Any]], epoch: Epoch = NO_EPOCH) -> None:
        """Continue the phases of a run."""
        self._known, self.plan, self._rows_of = epoch, None, {}
        super().load_phases(records, epoch)

    def take_epoch(self) -> Epoch | None:
        """Return the epoch of the pass; None for all but the first pass of an epoch."""
        epoch = super().take_epoch()
        self._known = self._known if epoch is None else epoch
        return epoch

    def _share_of(self, instance: Instance, rest: RestOfEpoch, rows: int | None = None) -> BatchShare:
        if self.epoch.pack is None:
            return super()._share_of(instance, rest)
        count = self._count if rows is None else rows
        return BatchShare(count, self.batch_of(instance.ranks), self.remainder, instance, rest, unit=self.unit)

    def _share_in(self, instance: Instance, rest: RestOfEpoch, states: Sequence[Mapping[str, Any]]) -> BatchShare:
        if self.epoch.pack is None:
            return super()._share_in(instance, rest, states)
        return self._share_of(instance, rest, _rows_in(states) or ENDLESS)

    def _window_of_batch(self) -> tuple[int, ...]:
        """Return where to begin to plan the batch that this instance has begun last, the same on every rank."""
        if self.plan is None or not self._done or self._rest.missing:
            return ()
        if self._begun[0] == self._done:
            return self._begun[2]
        share = self._share_of(self._instance, self._rest, ENDLESS)
        batch = share.batches_begun(self._done) - 1
        found = self._begun[2]
        if self._begun[1] != batch:
            found = (*self.plan.window_at(self._rest.start + batch * share.batch),)
        self._begun = self._done, batch, found
        return found

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state, from which the next iteration resumes.

        Raises:
            StateError: it divides a row between instances.
        """
        planned = state.get("planned", [])
        if any(type(number) is not int for number in planned):
            raise ValueError(f"the plan of a state begins with {planned!r:.100}")
        if state.get("divided"):
            raise StateError(
                "The state was saved in the middle of a planned row, so other ranks or workers cannot share the rest. "
                "Put .pack_rows() after IndexedSamples, and save states after whole rows"
            )
        super().load_state_dict(state, again)
        self._part, self._planned = state.get("part", 0), tuple(planned)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of samples or rows that this instance has yielded, and the number of ranks."""
        state = super().snapshot()
        if self.epoch.pack is not None:
            if self._part:
                state["part"] = self._part
            if planned := self._planned if self._loaded else self._window_of_batch():
                state["planned"] = planned
            if self.plan is not None and self.plan.is_complete:
                state["rows"] = len(self.plan)
        return state

    def reshard_states(self, resharding: Resharding) -> list[dict[str, Any]]:
        """Return the states from which a different number of instances resumes; they share the rest of the epoch."""
        found = super().reshard_states(resharding)
        if self.epoch.pack is None:
            return found
        known = [state or {} for state in resharding.states]
        facts: dict[str, Any] = {"divided": True} if any(state.get("part") for state in known) else {}
        if found and not found[0]["rest"]["missing"] and all(state.get("planned") for state in known):
            facts["planned"] = min(state["planned"] for state in known)
        if (rows := _rows_in(known)) is None:
            return [{**state, **facts, "rest": {**state["rest"], "end": None}} for state in found]
        return [{**state, **facts, "rows": rows} for state in found]

    def rows_of_rank(self) -> int:
        """Return the number of rows of this rank in the latest epoch, with those that only pad its last step."""
        share = self._share()
        return share.whole_batches * share.size

    def rows_read(self) -> int:
        """Return the number of rows whose samples this pass has yielded; -1 if a handler of errors has ended it."""
        return -1 if self._has_ended else self._done - self._first_row

    def expand(self, parts: Sequence[Numbers]) -> list[tuple[Numbers, list[RowMark]]]:
        """Return the positions in the latest epoch of the samples of some rows, part by part, and their marks."""
        return [] if self.plan is None else [*map(self.plan.expand, parts)]

    def _read_rows(self, plan: RowPlan) -> Iterator[Sample]:
        """Yield the samples of the rows of this instance, each with its mark."""
        marks, skipped, self._first_row, self._has_ended = deque[RowMark](), self._part, self._done, False
        policy = ErrorPolicy(self.counted_errors, type(self).__name__)
        marks_padding = self.remainder == "pad" or bool(self.exclusions) or not policy.always_raises

        def positions() -> Iterator[Numbers]:
            left = skipped
            for rows in self._row_chunks(plan, reader):
                found, own = plan.expand(rows)
                marks.extend(own[left:])
                yield found[left:]
                left = 0

        with self._readers.open(self.counters) as reader:
            substitutes = Substitutes(self._shards, plan.order, reader.start)
            for sample, _, is_substitute in read_epoch(reader, positions(), substitutes, policy):
                mark = marks.popleft()._replace(turn=self.rows_read())
                self._position, self._part = mark.row, mark.place + 1
                if self._part == mark.samples:
                    self._done, self._part = self._done + 1, 0
                if sample is not None:
                    sample[ROW_MARK] = mark
                    if marks_padding or mark.is_padding:
                        sample[PADDING_MARK] = is_substitute or mark.is_padding
                    yield sample
            if self._instance.is_first:
                substitutes.warn_of_unknown_keys()
        self._has_ended = policy.has_ended
        if policy.has_ended:
            policy.count_unread(self._share(self._rest), self._done, "rows ")
        policy.finish()

    def _row_chunks(self, plan: RowPlan, reader: DatasetReader) -> Iterator[Numbers]:
        """Yield the numbers of the rows of this instance, planning one window after the other.

        When all are planned, open the first shards of the next epoch.
        """
        rest, batch, done = self._rest, self.batch_of(self._instance.ranks), self._done
        endless = self._share_of(self._instance, rest, ENDLESS)
        while not plan.is_complete:
            # Whole steps of known rows; those of an interrupted epoch begin with the rows that nobody has read.
            known = (len(rest.missing) + max(plan.rows_known - rest.start, 0)) // batch
            for chunk in endless.positions(done, known):
                yield from _parts_of(chunk)
                done += len(chunk)
            plan.extend()
        if reader.has_copies and self.next_seed is not None:
            self._open_ahead(reader)
        for chunk in self._share_of(self._instance, rest, len(plan)).positions(done):
            yield from _parts_of(chunk)

    def _open_ahead(self, reader: DatasetReader) -> None:
        """Open the shards of the first rows of the next epoch."""
        plan = self.plan_of_epoch(following=True)
        plan.extend()
        first = np.arange(min(plan.rows_known, ROWS))
        self._readers.open_ahead(reader, plan.order.find(plan.expand(first)[0]), self.counters)


def _parts_of(rows: Numbers) -> Iterator[Numbers]:
    return (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))


def _rows_in(states: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of rows in the epoch of some states, if one of them has it."""
    return next((state["rows"] for state in states if "rows" in state), None)
