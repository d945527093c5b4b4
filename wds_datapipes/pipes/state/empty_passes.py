"""Endless streams that yield nothing: shards are drawn or repeated without end, and a stage drops all samples."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe

from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes.state.graph import as_stage, upstream
from wds_datapipes.pipes.state.unsupported import name_of
from wds_datapipes.samples.epochs import EMPTY_PASSES

__all__ = ["EmptyPassGuard"]

#: How many items a stage of another package may wait for before it yields one.
MOST_HELD = 100_000

#: Stages that wait for several items before they yield one.
HOLDING = {
    *("Batcher", "ReplayedItems", "SampleShuffler", "SampleUnbatcher", "SampleWriter", "Shuffler"),
    "StreamComposer",
}


#: Stages of other packages that wait for one item alone.
WAITING_FOR_ONE = ("Collator", "Cycler", "Filter", "Mapper")


class _Yielded(NamedTuple):
    """What was found of a stage that waits for items.

    Attributes:
        stage: it.
        mark: which iteration it is, and how many items it has yielded.
        taken: how many items the stage before it had yielded when this one was found to have yielded something.
        before: the ``mark`` of that stage.
        passes: how many passes since then have changed that, and given this one items or an end.
    """

    stage: weakref.ref[Any]
    mark: tuple[int, int]
    taken: int
    before: tuple[int, int]
    passes: int = 0


class EmptyPassGuard:
    """Notices that a stage goes through all its data again and again, and that one behind it yields nothing of it.

    A stage knows only those before it. Those behind it are on the stack while they wait for an item. A copy, as in
    another process, begins at the beginning.
    """

    def __init__(self) -> None:
        self._yielded: dict[int, _Yielded] = {}

    def __reduce__(self) -> tuple[type[EmptyPassGuard], tuple[()]]:
        return type(self), ()

    def check(self, stage: IterDataPipe[Any], rounds: int = 1) -> None:
        """Take note that a stage has gone through all its data, or a share of it.

        Args:
            stage: the stage, which is being iterated.
            rounds: how many times it has to be called for all the data.

        Raises:
            EmptySourceError: a stage behind it has yielded nothing for many rounds, though it waits for one item alone.
        """
        waiting = _waiting_for(stage)
        for before, each in itertools.pairwise(waiting):
            mark, made = _mark_of(each), before._number_of_samples_yielded
            if made < as_stage(each).skipped_shards:  # it resumes, and those behind it wait
                self._yielded.clear()
                return
            found = self._yielded.get(id(each))
            # Some stages are copied for each pass, and a copy may have the id of an earlier one.
            if found is None or found.stage() is not each or found.mark != mark:
                self._yielded[id(each)] = _Yielded(weakref.ref(each), mark, made, _mark_of(before))
                continue
            if before is not stage and _mark_of(before) == found.before:
                continue  # it has got nothing, such as from a shuffle that fills its buffer
            self._yielded[id(each)] = found = found._replace(before=_mark_of(before), passes=found.passes + 1)
            if found.passes >= EMPTY_PASSES * rounds and not _may_hold(each, made - found.taken):
                raise EmptySourceError(
                    f"{name_of(each)} has yielded nothing, while {name_of(stage)} has gone through all its shards "
                    f"{EMPTY_PASSES} times. Are the shards empty, or does a stage drop all that they hold?"
                )


def _waiting_for(stage: IterDataPipe[Any]) -> list[Any]:
    """Return a stage and those that wait for an item of it in this thread, up to the last one."""
    waiting: list[Any] = [stage]
    frame = sys._getframe(2)
    while frame is not None:
        # Other frames are left alone: f_locals keeps all objects of a frame alive for as long as its function runs.
        found = frame.f_locals.get("self") if frame.f_code.co_name in ("__iter__", "__next__") else None
        if isinstance(found, IterDataPipe) and found is not waiting[-1]:
            if all(each is not stage for each in upstream(found)):
                break  # another pipeline, whose function reads this one
            waiting.append(found)
        frame = frame.f_back  # type: ignore[assignment]  # it is None at the end
    return waiting


def _mark_of(stage: Any) -> tuple[int, int]:
    """Return which iteration of a stage this is, and how many items it has yielded; torch counts both."""
    return stage._valid_iterator_id or 0, stage._number_of_samples_yielded


def _may_hold(stage: Any, taken: int) -> bool:
    """Whether a stage may wait for more items than those that it has taken since it has yielded one."""
    if name_of(stage) in HOLDING:
        return True
    is_ours = type(stage).__module__.partition(".")[0] == "wds_datapipes"
    return not (is_ours or name_of(stage) in WAITING_FOR_ONE) and taken < MOST_HELD
