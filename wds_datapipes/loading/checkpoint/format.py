"""The state of a loader between two items, as values that JSON has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from zlib import crc32

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.encoding import decode_state, encode_state
from wds_datapipes.pipes.state.description import difference
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state

__all__ = ["Checkpoint", "WorkerState"]

#: How the description of torch's ``.batch()`` begins.
BATCH_SIZE = re.compile(r"BatcherIterDataPipe\(batch_size=(\d+)")

#: The numbers, and within which bounds they are.
NUMBERS = {
    **dict.fromkeys(("seed", "first", "next"), (0, 1 << 64)),
    **dict.fromkeys(("epoch", "wanted"), (-1, 1 << 62)),
    **dict.fromkeys(("rank", "ranks", "workers", "turn", "worker"), (0, 1 << 24)),
}
OPTIONAL = ("next", "worker", "wanted")


@dataclass(frozen=True)
class WorkerState:
    """What a worker needs to resume in the middle of an epoch.

    Attributes:
        stages: the state of the pipeline, or the text of it; None is its beginning.
    """

    stages: Sequence[Mapping[str, Any] | None] | str | None

    @property
    def state(self) -> Sequence[Mapping[str, Any] | None] | None:
        """The state of the pipeline.

        Raises:
            StateError: it is a text that is none.
        """
        return decode_state(self.stages) if isinstance(self.stages, str) else self.stages

    @property
    def mark(self) -> int | None:
        """A number that identifies this position in an epoch; None at the beginning of one, and where it is replayed.

        Raises:
            StateError: the state is a text that is none.
        """
        begins = all(set(stage or ()) <= {"lasting", "replayed", "digest"} for stage in self.state or ())
        return None if begins else crc32(str(self.as_dict()["stages"]).encode())

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values; the state as text."""
        stages = self.stages if self.stages is None or isinstance(self.stages, str) else encode_state(self.stages)
        return {"stages": stages}

    def renewed(self) -> WorkerState:
        """Return where the next epoch begins, if this is the end of one."""
        return WorkerState(next_epoch_state(self.state))

    def load(self, pipe: Any) -> None:
        """Have a pipeline resume from here when it is iterated next."""
        if self.stages is not None:
            load_state(pipe, self.state)


@dataclass(frozen=True)
class Checkpoint:
    """Where an epoch is, on one rank.

    Attributes:
        stages: descriptions of the pipeline's stages, the last one first.
        seed: what the orders of this epoch follow from.
        epoch: the number of this one since the loader was seeded, from 0.
        first: the seed of the first epoch since then.
        next: the seed of the next epoch.
        engines: where the loader's seed generator was, if another reading service has used it.
        is_over: whether it has ended.
        rank: of which rank it is, among how many ``ranks``.
        ranks: see ``rank``.
        distributed: whether the service has split the data among ranks.
        workers: how many worker processes there are on this rank.
        turn: which worker's turn is next.
        parts: where each worker goes on.
        worker: of which worker it is, if it is that of one alone, whose part is the only one.
        wanted: the number that was chosen for the next epoch, or None.
        is_drained: whether it is over because the pipeline in the main process has ended, although the loader may hold
            its last items.
        replay: if the epoch resumes by replay, how many items the loop has, and a digest of the last one.
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
    def place(self) -> tuple[int, int, bool, int]:
        """Whose state it is: the rank, of how many, whether the service has split among them, and the workers."""
        return self.rank, self.ranks, self.distributed, self.workers

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "parts": [part.as_dict() for part in self.parts]}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> Checkpoint:
        """Return what `as_dict` was called on.

        Raises:
            StateError: it is not what `as_dict` returns.
        """
        try:
            found = dict(state)
            parts = [WorkerState(**part) for part in found.pop("parts")]
            checkpoint = cls(**found, parts=[replace(part, stages=part.state) for part in parts])
            checkpoint._check_kinds()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"This state of a loader is not whole: {error}") from None
        return checkpoint

    def _check_kinds(self) -> None:
        """Make sure that all is of its kind, as what is not would be noticed late, or not at all.

        Raises:
            TypeError: something is not.
        """
        for name, (least, most) in NUMBERS.items():
            value = getattr(self, name)
            if not (value is None and name in OPTIONAL) and (type(value) is not int or not least <= value < most):
                raise TypeError(f"its {name} is {value!r:.100}")
        texts = {*map(type, self.stages)} <= {str}
        engines = self.engines is None or all(type(number) is int for each in self.engines for number in each)
        flags = {type(self.is_over), type(self.distributed), type(self.is_drained)} == {bool}
        pipes = [part.stages for part in self.parts if part.stages is not None]
        states = all(stage is None or isinstance(stage, Mapping) for stages in pipes for stage in stages)
        numbers = self.replay is None or {*map(type, self.replay.values())} <= {int}
        if not (texts and engines and flags and states and numbers):
            raise TypeError("one of its values is of another kind")
        workers = 1 if self.worker is not None else max(self.workers, 1)
        if len(self.parts) != workers and (self.parts or not self.is_over):
            raise TypeError(f"it has {len(self.parts)} parts, and is that of {workers} workers")

    def check(self, stages: Sequence[str], ranks: int | None = None) -> None:
        """Make sure that it is the state of a pipeline.

        On another number of ranks, ``.batch()`` may have another size if as many samples as before are in the batches
        of all ranks: what is left of an epoch are samples, whatever batches they come in.

        Args:
            stages: descriptions of the stages of the pipeline, the last one first.
            ranks: how many there are now; None if that is not known yet, and is checked later.

        Raises:
            StateError: it is the state of another one.
        """
        if not self.stages:  # it was saved before a pipeline was begun
            return
        for number, (saved, own) in enumerate(zip_longest(self.stages, stages)):
            if saved != own:
                before, now = _batch_size(saved), _batch_size(own)
                if before and now and _without_size(saved) == _without_size(own) and ranks != self.ranks:
                    if ranks is None or before * self.ranks == now * ranks:
                        continue
                    raise StateError(
                        f"The state was saved with batches of {before} on each of {self.ranks} ranks, and there are "
                        f"batches of {now} on each of {ranks} now. On another number of ranks, the batches of all of "
                        f"them together stay as large as they were, {before * self.ranks}"
                    )
                raise StateError(
                    f"The state was saved with another pipeline. Counted from the end, stage {number} "
                    f"{difference(saved, own)}. Load it into the pipeline that it is from"
                )


def _batch_size(stage: str | None) -> int:
    """Return the size of torch's batches by the description of a stage; 0 if it is another stage."""
    found = BATCH_SIZE.match(stage or "")
    return 0 if found is None else int(found[1])


def _without_size(stage: str | None) -> str:
    return BATCH_SIZE.sub("", stage or "")
