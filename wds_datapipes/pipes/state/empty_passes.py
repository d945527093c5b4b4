"""Detection of endless streams without items: a stage drops all samples while shards are repeated or resampled."""

from __future__ import annotations

import itertools
import sys
import weakref
from traceback import walk_stack
from typing import Any, NamedTuple

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import count_yielded, iteration_of, name_of
from wds_datapipes.samples.epochs import EMPTY_PASSES

#: The maximum number of items that a stage of another package may read before yielding one.
MAX_HELD_BACK = 100_000


class _Yielded(NamedTuple):
    """The progress of a stage that is waiting for items.

    Attributes:
        stage: the stage.
        mark: the number of its iteration, and the number of items it has yielded.
        taken: the number of items that the preceding stage had yielded when this stage last yielded an item.
        before: the ``mark`` of the preceding stage.
        passes: the number of passes since then in which ``before`` changed.
    """

    stage: weakref.ref[Any]
    mark: tuple[int, int]
    taken: int
    before: tuple[int, int]
    passes: int = 0


class EmptyPassGuard:
    """Detects that a stage repeats all of its data while a later stage yields nothing.

    A stage has references only to earlier stages, but later ones are on the call stack while they wait for an item. A
    copy, such as one in another process, starts from scratch.
    """

    def __init__(self) -> None:
        self._yielded: dict[int, _Yielded] = {}

    def __reduce__(self) -> tuple[type[EmptyPassGuard], tuple[()]]:
        return type(self), ()

    def check(self, stage: IterDataPipe[Any], rounds: int = 1) -> None:
        """Record that a stage has read all of its data, or a share of it.

        Args:
            stage: the stage, which is being iterated.
            rounds: the number of calls that together cover all of the data.

        Raises:
            EmptySourceError: a later stage has yielded nothing for many rounds, although it needs only a single item.
        """
        waiting = _waiting_for(stage)
        for before, each in itertools.pairwise(waiting):
            mark, made = _mark_of(each), count_yielded(before)
            if made < getattr(each, "skipped_shards", 0):  # it is still resuming
                self._yielded.clear()
                return
            found = self._yielded.get(id(each))
            # Some stages are copied for each pass, and a copy may reuse the id of an earlier one.
            if found is None or found.stage() is not each or found.mark != mark:
                self._yielded[id(each)] = _Yielded(weakref.ref(each), mark, made, _mark_of(before))
                continue
            if before is not stage and _mark_of(before) == found.before:
                continue  # it received nothing, for example while a shuffle fills its buffer
            self._yielded[id(each)] = found = found._replace(before=_mark_of(before), passes=found.passes + 1)
            if found.passes >= EMPTY_PASSES * rounds and not _may_hold(each, made - found.taken):
                raise EmptySourceError(
                    f"{name_of(each)} has yielded nothing while {name_of(stage)} has gone through all of its shards "
                    f"{EMPTY_PASSES} times. Are the shards empty, or does a stage drop all of their samples?"
                )


def _waiting_for(stage: IterDataPipe[Any]) -> list[Any]:
    """Return a stage and the later stages that wait for its items in this thread and may drop some."""
    waiting: list[Any] = [stage]
    for frame, _ in walk_stack(sys._getframe(2)):
        # Skip other frames: f_locals keeps all objects of a frame alive while its function runs.
        found = frame.f_locals.get("self") if frame.f_code.co_name in ("__iter__", "__next__") else None
        if isinstance(found, IterDataPipe) and found is not waiting[-1]:
            if all(each is not stage for each in graph_of(found).stages):
                break  # a function in another pipeline reads this one
            known = declared(found)
            if not (
                known.is_transparent or known.process_boundary == "loop"
            ):  # they drop nothing, and torch may not count their items
                waiting.append(found)
    return waiting


def _mark_of(stage: Any) -> tuple[int, int]:
    """Return the number of a stage's iteration, and the number of items it has yielded, by torch's counters."""
    return iteration_of(stage), count_yielded(stage)


def _may_hold(stage: Any, taken: int) -> bool:
    """Whether a stage may need more items than it has read since it last yielded one."""
    holds_items = declared(stage).holds_items
    return taken < MAX_HELD_BACK if holds_items is None else holds_items
