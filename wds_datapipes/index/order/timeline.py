"""The timeline of a run: which phase, epoch, batch and draws each of its steps has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count as count_from
from itertools import pairwise, zip_longest
from typing import NamedTuple, Protocol

import numpy as np

from wds_datapipes.errors import StateError
from wds_datapipes.index.order.draw_pattern import DrawPattern
from wds_datapipes.index.order.draws import Draws, Pass, add_passes, passes_drawn
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.weight_schedule import weights_between
from wds_datapipes.received_epochs import NONE_RECEIVED, ReceivedEpochs
from wds_datapipes.seeds import derived_seed


class Stretch(NamedTuple):
    """Consecutive epochs with the same number of steps.

    Attributes:
        step: the first step.
        epoch: the first epoch.
        epochs: the number of epochs; None if the others follow.
        steps: the number of steps that the loop received in each of them; -1 if it is unknown.
        known: the number of those whose samples are known.
        is_whole: whether the loop received the whole epochs.
    """

    step: int
    epoch: int
    epochs: int | None
    steps: int
    known: int
    is_whole: bool = True


class RowCounts(Protocol):
    """The numbers of rows and samples in a run whose rows are planned."""

    def rows_in(self, epoch: int) -> int:
        """Return the number of rows in an epoch."""

    def samples_in(self, steps: int, phase: Phase, weights: Mapping[str, int]) -> int:
        """Return the number of samples that some steps are expected to have, with the weights of datasets."""


class RunTimeline:
    """The phases of a run and the arithmetic of its steps and draws.

    The phase in which an epoch begins determines its number of samples. Weights, batches and datasets change with the
    phase. Each dataset is read pass by pass through all epochs and phases; if it has grown, its next pass contains the
    new samples.

    Args:
        phases: the phases in order; the first begins with the run.
        lanes: the number of lanes.
        drops: whether an epoch consists of whole batches only.
        received: the epochs that the loop has received. Their steps count; the draws of an epoch do not depend on them.
        rows: the numbers of planned rows, if rows are planned. Positions are then those of rows, and batches consist of
            rows; an epoch draws all of its samples, and weights by step change where their steps are expected.

    Examples:
        >>> points = [(0, {"a": 1, "b": 1}), (3, {"a": 1, "b": 3})]
        >>> timeline = RunTimeline([Phase(20, 4, {"a": (1, 10), "b": (1, 10)}, points)])
        >>> timeline.locate(7)[1:], timeline.step_at(1, 8)
        ((1, 2), 7)
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        lanes: int = 1,
        *,
        drops: bool = True,
        received: ReceivedEpochs = NONE_RECEIVED,
        rows: RowCounts | None = None,
    ) -> None:
        self.phases, self.lanes, self.received, self._drops, self._rows = tuple(phases), lanes, received, drops, rows

    def phase_of(self, epoch: int) -> Phase:
        """Return the phase in which an epoch begins."""
        return [each for each in self.phases if (each.epoch, each.start) <= (epoch, 0)][-1]

    def phases_within(self, epoch: int) -> list[Phase]:
        """Return the phases that begin after the beginning of an epoch."""
        return [each for each in self.phases if each.epoch == epoch and each.start]

    def end_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch that are not dropped, which fill batches of its last phase."""
        if self._rows is not None:
            rows = self._rows.rows_in(epoch)
            return rows - rows % self.phase_of(epoch).batch if self._drops else rows
        return self._end(self.phase_of(epoch), *self.phases_within(epoch)[-1:])

    def _end(self, phase: Phase, within: Phase | None = None) -> int:
        if self._rows is not None:
            return phase.count
        last = within or phase
        start = within.start if within else 0
        return phase.count - max(phase.count - start, 0) % last.batch if self._drops else phase.count

    def locate(self, step: int) -> tuple[Phase, int, int]:
        """Return the phase of a step, its epoch, and the number of its batch in the epoch or in its rest.

        Raises:
            StateError: the samples of the step are unknown.
        """
        stretches = self._stretches_to(step=step)
        if unknown := [each for each in stretches if each.steps < 0 and each.step <= step]:
            raise unknown_step_error(step, unknown[0].epoch)
        found = [each for each in stretches if each.step <= step and each.steps][-1]
        epochs, number = divmod(step - found.step, found.steps)
        epoch = found.epoch + epochs
        if number >= found.known:
            raise unknown_step_error(step, epoch)
        for start, end, phase in self.segments(epoch):
            steps = -(-(end - start) // phase.batch)
            if number < steps:
                break
            number -= steps
        return phase, epoch, number

    def step_at(self, epoch: int, position: int) -> int:
        """Return the step that begins at a position of an epoch, or after the batch that the position divides.

        Raises:
            StateError: the loop left an earlier epoch after an unknown number of steps.
        """
        stretches = self._stretches_to(epoch=epoch)
        found = [each for each in stretches if each.epoch <= epoch < each.epoch + (each.epochs or epoch + 1)][-1]
        if unknown := [each for each in stretches[: stretches.index(found)] if each.steps < 0]:
            raise unknown_step_error(unknown[0].step, unknown[0].epoch)
        return found.step + (epoch - found.epoch) * found.steps + self.steps_before(epoch, position)

    def at(self, step: int) -> RunTimeline:
        """Return the timeline at the time of a step: later phases had not begun, and the loop had not left its epoch.

        Raises:
            StateError: the samples of the step are unknown.
        """
        _, epoch, _ = self.locate(step)
        rows = list[tuple[int, ...]]()
        for each in self._stretches_to(step=step):
            left = () if each.is_whole else (each.steps, each.known)
            if step < each.step + each.steps * (each.epochs or step + 1):
                rows += [(each.epoch, epoch - each.epoch, *left)] if epoch > each.epoch else []
                break
            rows.append((each.epoch, each.epochs or 0, *left))
        phases = [each for each in self.phases if each.step <= step]
        received = ReceivedEpochs((*rows, (epoch, 1)))
        return RunTimeline(phases, self.lanes, drops=self._drops, received=received, rows=self._rows)

    def steps_before(self, epoch: int, position: int) -> int:
        """Return the number of steps of an epoch before a position; one that it divides counts as well."""
        if self._rows is not None and not self.phases_within(epoch):  # without the number of rows
            return -(-position // self.phase_of(epoch).batch)
        return sum(-(-max(min(position, end) - start, 0) // phase.batch) for start, end, phase in self.segments(epoch))

    def segments(self, epoch: int) -> Iterator[tuple[int, int, Phase]]:
        """Yield the first position of each phase of an epoch, the one after its last, and the phase."""
        phases, end = [self.phase_of(epoch), *self.phases_within(epoch)], self.end_of(epoch)
        starts = [0, *(min(each.start, end) for each in phases[1:])]
        return zip(starts, [*starts[1:], end], phases, strict=True)

    def _stretches_to(self, *, step: int = -1, epoch: int = -1) -> list[Stretch]:
        """Return the epochs of the run up to a step or an epoch; planned rows make each epoch a stretch of its own."""
        if self._rows is None:
            return self._stretches
        found, begin = list[Stretch](), 0
        for first, epochs, left in self.received.stretches():
            for number in count_from(first) if epochs is None else range(first, first + epochs):
                steps, known = left or (self.steps_before(number, self.end_of(number)),) * 2
                found.append(Stretch(begin, number, 1, steps, known, left is None))
                if steps < 0:
                    return [*found, Stretch(begin, number + 1, None, -1, 0)]
                begin += steps
                if epochs is None and begin > step and number >= epoch:
                    break
        return found

    @cached_property
    def _stretches(self) -> list[Stretch]:
        """The epochs of the run, from the first step on."""
        found, step = list[Stretch](), 0
        changes = sorted({epoch for phase in self.phases for epoch in (phase.epoch, phase.epoch + 1)})
        for first, epochs, left in self.received.stretches():
            last = None if epochs is None else first + epochs
            inner = [each for each in changes if first < each and (last is None or each < last)]
            for epoch, end in zip([first, *inner], [*inner, last], strict=True):
                whole = self.steps_before(epoch, self.end_of(epoch))
                steps, known = (whole, whole) if left is None else left
                count = None if end is None else end - epoch
                found.append(Stretch(step, epoch, count, steps, known, left is None))
                if steps < 0:
                    return [*found, Stretch(step, epoch + 1, None, -1, 0)]
                step += (count or 0) * steps
        return found

    def drawn(self, epoch: int) -> Numbers:
        """Return the number of draws from each lane before an epoch."""
        firsts = [(phase.epoch + (phase.start > 0), phase) for phase in self.phases]
        amended = {phase.epoch for phase in self.phases if phase.start and phase.epoch < epoch and self._rows is None}
        samples = sum(self.end_of(each) - self._end(self.phase_of(each)) for each in amended)
        for (first, phase), (end, _) in pairwise([*firsts, (epoch, self.phases[-1])]):
            samples += max(min(end, epoch) - first, 0) * self._end(phase)
        return np.full(self.lanes, samples // self.lanes)

    def seen(self, seed: int | None, epoch: int, position: int) -> dict[str, tuple[int, float]]:
        """Return the number of samples of each dataset before a position of an epoch, and of passes that they make.

        Args:
            seed: as for `draws`.
            epoch: the epoch.
            position: the position in it.
        """
        names, draws, passes = self.draws(seed)
        found = dict.fromkeys(names or [""], (0, 0.0))
        for first, last, end in self._received_until(epoch, position):
            if self._rows is not None and end:  # about as many samples in each row
                end = end * self.phase_of(last).count // self._rows.rows_in(last)
            begins, ends = self.drawn(first), self.drawn(last) + end // self.lanes
            if not names:
                samples = int((ends - begins).sum()) + end % self.lanes
                found[""] = found[""][0] + samples, found[""][1] + last - first + end / self.phase_of(last).count
                continue
            before, after = (
                [each for each in draws if (each.begins <= some).all()][-1].count_to(some).sum(axis=1).tolist()
                for some in (begins, ends)
            )
            for name, old, new, known in zip(names, before, after, passes, strict=True):
                samples, passed = found[name]
                found[name] = samples + new - old, passed + passes_drawn(known, new) - passes_drawn(known, old)
        return found

    def _received_until(self, epoch: int, position: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of the run that the loop has received until a position of the epoch that it began last.

        Yields:
            The epoch that a part begins with, and the epoch and the position in it where it ends.

        Raises:
            StateError: the samples of a step are unknown.
        """
        for first, epochs, left in self.received.stretches():
            if left is not None and left[0] != left[1]:
                raise unknown_step_error(self.step_at(first, 0), first)
            if epochs is None:
                yield first, epoch, position
            elif left is None:
                yield first, first + epochs, 0
            else:
                for number in range(first, first + epochs):
                    yield number, number, self._position(number, left[0])

    def _position(self, epoch: int, steps: int) -> int:
        """Return the position of an epoch after some of its steps."""
        for start, end, phase in self.segments(epoch):
            position = min(start + steps * phase.batch, end)
            steps -= -(-(end - start) // phase.batch)
            if steps <= 0:
                break
        return position

    def draws(self, seed: int | None) -> tuple[list[str], list[Draws], list[list[Pass]]]:
        """Return the names of the datasets, the draws of all phases, and the passes of each dataset.

        Args:
            seed: selects where the patterns begin; None for their beginnings.
        """
        names = list(
            dict.fromkeys(name for phase in self.phases for _, weights, *_ in phase.points or () for name in weights)
        )
        passes: list[list[Pass]] = [[] for _ in names]
        found = list[Draws]()
        count = np.zeros((len(names), self.lanes), np.int64)
        lanes = np.arange(self.lanes)
        # If rows are planned, a phase within an epoch only shares the rest of it otherwise.
        phases = [phase for phase in self.phases if self._rows is None or not phase.start]
        for phase, later in zip_longest(phases, phases[1:]):
            end = None if later is None else later.step
            before: tuple[int, Mapping[str, int]] | None = None
            for number, (step, weights) in enumerate(weights_between(phase, end)):
                epoch, first = phase.epoch, phase.start
                if number and self._rows is None:
                    _, epoch, batch = self.locate(step)
                    first = batch * phase.batch + (phase.start if epoch == phase.epoch else 0)
                begins = self.drawn(epoch)
                if first:
                    begins += min(-(-first // self.lanes), self.end_of(epoch) // self.lanes)
                if self._rows is not None and before is not None:
                    begins = found[-1].begins - -self._rows.samples_in(step - before[0], phase, before[1]) // self.lanes
                    begins = begins if later is None else np.minimum(begins, self.drawn(later.epoch))
                before = step, weights
                count = found[-1].count_to(begins) if found else count
                if not number:
                    add_passes(passes, names, phase, count)
                key = None if seed is None else derived_seed("mixture", seed, len(found))
                pattern = DrawPattern(tuple(weights.get(name, 0) for name in names), key)
                found.append(Draws(begins, pattern, lanes * (phase.batch // self.lanes), count))
        return names, found, passes


def unknown_step_error(step: int, epoch: int) -> StateError:
    """Return the error for a step in, or after, an epoch that the loop left at an unknown place."""
    return StateError(
        f"The samples of step {step:,} are unknown: the loop left epoch {epoch:,} within a global batch, or after a "
        "number of steps that its loader did not report. Loop over data.tracked(loader), DataLoader2 with "
        "ShardReadingService, or StatefulDataLoader with snapshot_every_n_steps=1"
    )
