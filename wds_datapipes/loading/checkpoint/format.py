"""The state of a loader between two items, as JSON-compatible values."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from zlib import crc32

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.state.description import PER_RANK, difference
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state

logger = logging.getLogger("wds_datapipes")

#: Matches a number in the description of a stage that is divided between the ranks, such as the size of a batch.
OF_RANK = re.compile(rf"=(\d+){PER_RANK}")

#: The numeric fields, and their bounds.
NUMBERS = {
    **dict.fromkeys(("seed", "first", "next"), (0, 1 << 64)),
    **dict.fromkeys(("epoch", "wanted"), (-1, 1 << 62)),
    **dict.fromkeys(("rank", "ranks", "workers", "turn", "worker"), (0, 1 << 24)),
}
OPTIONAL = ("next", "worker", "wanted")


@dataclass(frozen=True)
class WorkerState:
    """The state from which a worker resumes in the middle of an epoch.

    Attributes:
        stages: the state of the pipeline, as JSON-compatible values; ``None`` is its beginning.
    """

    stages: Sequence[Mapping[str, Any] | None] | None

    @property
    def mark(self) -> int | None:
        """A number that identifies a position in an epoch; ``None`` at the beginning of one, or if it is replayed."""
        begins = all(set(stage or ()) <= {"lasting", "replayed", "digest"} for stage in self.stages or ())
        return None if begins else crc32(json.dumps(self.stages).encode())

    def renewed(self) -> WorkerState:
        """Return the position at which the next epoch begins, if this is the end of one."""
        return WorkerState(next_epoch_state(self.stages))

    def load(self, pipe: Any) -> None:
        """Load this state into a pipeline, which resumes at the next iteration."""
        if self.stages is not None:
            load_state(pipe, self.stages)


@dataclass(frozen=True)
class Checkpoint:
    """The state of an epoch, on one rank.

    Attributes:
        stages: descriptions of the pipeline's stages, the last one first.
        seed: the seed of the orders of this epoch.
        epoch: the number of this epoch since the loader was seeded, from 0.
        first: the seed of the first epoch since then.
        next: the seed of the next epoch.
        engines: the positions of the loader's seed generator, if another reading service has used it.
        is_over: whether the epoch has ended.
        rank: the number of this rank among ``ranks``.
        ranks: the number of ranks.
        distributed: whether the service has split the data among ranks.
        workers: the number of worker processes on this rank.
        turn: the worker that yields the next item.
        parts: the position from which each worker resumes.
        worker: the number of the worker, if this is the state of a single worker; ``parts`` then has one element.
        wanted: the number selected for the next epoch, or ``None``.
        is_drained: whether the epoch is over because the pipeline in the main process has ended, although the loader
            may hold its last items.
        replay: if the epoch resumes by replay, the number of items that the loop has received, and a digest of the
            last.
    """

    stages: list[str]
    seed: int
    epoch: int
    first: int
    next: int | None
    engines: list[list[int]] | None
    is_over: bool
    rank: int
    ranks: int
    distributed: bool
    workers: int
    turn: int
    parts: list[WorkerState]
    worker: int | None = None
    wanted: int | None = None
    is_drained: bool = False
    replay: Mapping[str, int] | None = None

    @property
    def identity(self) -> tuple[int, int, bool, int]:
        """The rank, the number of ranks, whether the service has split among them, and the number of workers."""
        return self.rank, self.ranks, self.distributed, self.workers

    def as_dict(self) -> dict[str, Any]:
        """Return the checkpoint as plain values."""
        return {**vars(self), "parts": [vars(part) for part in self.parts]}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint from the return value of `as_dict`.

        Raises:
            StateError: it is not a return value of `as_dict`.
        """
        try:
            found = dict(state)
            parts = [WorkerState(**part) for part in found.pop("parts")]
            checkpoint = cls(**found, parts=parts)
            checkpoint._check_kinds()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"This state of a loader is corrupt: {error}") from None
        return checkpoint

    def _check_kinds(self) -> None:
        """Check the types of all fields, since a wrong type would be detected late or not at all.

        Raises:
            TypeError: a field has the wrong type.
        """
        for name, (least, most) in NUMBERS.items():
            value = getattr(self, name)
            if not (value is None and name in OPTIONAL) and (type(value) is not int or not least <= value < most):
                raise TypeError(f"its {name} is {value!r:.100}")
        texts = {*map(type, self.stages)} <= {str}
        engines = self.engines is None or all(type(number) is int for each in self.engines for number in each)
        flags = {type(self.is_over), type(self.distributed), type(self.is_drained)} == {bool}
        pipes = [part.stages for part in self.parts if part.stages is not None]
        states = all(
            isinstance(stages, list) and all(stage is None or isinstance(stage, Mapping) for stage in stages)
            for stages in pipes
        )
        numbers = self.replay is None or {*map(type, self.replay.values())} <= {int}
        if not (texts and engines and flags and states and numbers):
            raise TypeError("one of its values has the wrong type")
        workers = 1 if self.worker is not None else max(self.workers, 1)
        if len(self.parts) != workers and (self.parts or not self.is_over):
            raise TypeError(f"it has {len(self.parts)} parts, but {workers} workers")

    def ended(self) -> Checkpoint:
        """Return the state in which this epoch is over: the next one follows."""
        return replace(self, is_over=True, is_drained=False, parts=[part.renewed() for part in self.parts])

    def check(self, stages: Sequence[str], ranks: int | None = None) -> None:
        """Check that this is the state of a pipeline.

        On a different number of ranks, ``.batch()`` may have a different size if the batches of all ranks together have
        as many samples as before: the rest of an epoch consists of samples, however they are batched.

        Args:
            stages: descriptions of the stages of the pipeline, the last one first.
            ranks: the current number of ranks; ``None`` if that is not known yet, and is checked later.

        Raises:
            StateError: it is the state of a different pipeline.
        """
        if not self.stages:  # it was saved before any pipeline began
            return
        for number, (saved, own) in enumerate(zip_longest(self.stages, stages)):
            if saved != own:
                before, now = _batch_size(saved), _batch_size(own)
                if before and now and _without_size(saved) == _without_size(own) and ranks != self.ranks:
                    if ranks is None or before * self.ranks == now * ranks:
                        continue
                    raise StateError(
                        f"The state was saved with batches of {before} on each of {self.ranks} ranks, but now there "
                        f"are batches of {now} on each of {ranks}. On a different number of ranks, the batches of all "
                        f"ranks together must have as many samples as before, {before * self.ranks}"
                    )
                raise StateError(
                    f"The state was saved with a different pipeline. Counted from the end, stage {number} "
                    f"{difference(saved, own)}. Load it into the pipeline that it was saved with"
                )

    def log_replay(self, reason: str) -> None:
        """Log how many items are made again to resume, if the pipeline is replayed.

        Args:
            reason: why it is.
        """
        stages = [stage or {} for part in self.parts for stage in part.stages or ()]
        count = sum(stage.get("replayed", 0) for stage in [*stages, self.replay or {}])
        if count and not self.is_over:
            logger.warning("Resuming by replay: %d items are made again. %s", count, reason)

    def epoch_error(self, chosen: int | None) -> StateError:
        """Return the error for selecting an epoch although the state is from the middle of another one."""
        return StateError(
            f"set_epoch({chosen}) was called, but the state was saved in the middle of epoch {self.epoch}. To resume "
            f"that epoch, call set_epoch({self.epoch}), or do not call set_epoch before it"
        )


def _batch_size(stage: str | None) -> int:
    """Return the number in the description of a stage that is divided between the ranks, as of ``.batch()``, or 0."""
    found = OF_RANK.search(stage or "")
    return 0 if found is None else int(found[1])


def _without_size(stage: str | None) -> str:
    return OF_RANK.sub("", stage or "")
