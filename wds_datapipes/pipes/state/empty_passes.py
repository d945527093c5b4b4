"""Detection of endless streams without items: a stage drops all samples while shards are repeated or resampled."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import attribute_of, count_yielded, iteration_of, name_of
from wds_datapipes.samples.epochs import EMPTY_PASSES
from wds_datapipes.user_warnings import callers


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


class _Later(NamedTuple):
    """A later stage, and its iteration when a loader first saw it.

    Another stage may read its source in its place, as ``.group_samples()`` does: then it never begins another one.
    """

    stage: weakref.ref[Any]
    iteration: int | None

    @classmethod
    def of(cls, stage: Any) -> _Later:
        """Return a stage as it is now."""
        return cls(weakref.ref(stage), _iteration_of(stage))

    def begun(self) -> Any:
        """Return the stage if it is iterated; otherwise None."""
        stage = self.stage()
        return None if stage is None or _iteration_of(stage) == self.iteration else stage


class EmptyPassGuard:
    """Detects that a stage repeats all of its data while a later stage yields nothing.

    A copy, such as one in another process, starts from scratch.

    Attributes:
        later: the stages after it, from the nearest to the last, as the loader of this epoch knows them; a stage itself
            refers only to earlier ones. None in a loop without a loader, where they are on the call stack.
    """

    def __init__(self) -> None:
        self.later: list[_Later] | None = None
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
        if self.later is None:
            later = _waiting_for(stage)
        else:
            later = [each for each in map(_Later.begun, self.later) if each is not None]
        for before, each in itertools.pairwise([stage, *later]):
            mark, made = _mark_of(each), count_yielded(before)
            if made < (attribute_of(each, "skipped_shards") or 0):  # it is still resuming
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
            if found.passes >= EMPTY_PASSES * rounds and not declared(each).may_hold(made - found.taken):
                raise EmptySourceError(
                    f"{name_of(each)} has yielded nothing while {name_of(stage)} has gone through all of its shards "
                    f"{EMPTY_PASSES} times. Are the shards empty, or does a stage drop all of their samples?"
                )


def watch_empty_passes(pipe: Any) -> None:
    """Tell the guards of a pipeline which stages come after theirs; loaders call this at the beginning of an epoch."""
    graph = graph_of(pipe)
    readers: dict[int, list[Any]] = {}
    for each in graph.stages:
        for source in graph.sources_of(each):
            readers.setdefault(id(source), []).append(each)
    for stage in graph.stages:
        if isinstance(guard := vars(stage).get("_empty_passes"), EmptyPassGuard):
            known = {id(each.stage()): each for each in guard.later or ()}
            guard.later = [known.get(id(each)) or _Later.of(each) for each in _later(stage, readers)]


def _later(stage: Any, readers: Mapping[int, list[Any]]) -> Iterator[Any]:
    """Yield the later stages that may drop items, and stop at a stage with several readers."""
    while len(following := readers.get(id(stage), [])) == 1:
        stage = following[0]
        if _may_drop(stage):
            yield stage


def _waiting_for(stage: Any) -> list[Any]:
    """Return the later stages that wait for an item of a stage in this thread and may drop some."""
    found = list[Any]()
    for frame in callers():
        # Skip other frames: reading the locals of a frame keeps all of them alive while its function runs.
        each = frame.f_locals.get("self") if frame.f_code.co_name in ("__iter__", "__next__") else None
        if not isinstance(each, IterDataPipe) or each is (found or [stage])[-1]:
            continue
        if all(before is not stage for before in graph_of(each).stages):
            break  # a function in another pipeline reads this one
        if _may_drop(each):
            found.append(each)
    return found


def _may_drop(stage: Any) -> bool:
    """Whether a stage may drop items. The others yield all, and torch may not count their items."""
    known = declared(stage)
    return not (known.is_transparent or known.process_boundary == "loop")


def _iteration_of(stage: Any) -> int | None:
    """Return the number of a stage's latest iteration; None if it has not begun any."""
    number: int | None = getattr(stage, "_valid_iterator_id", None)
    return number


def _mark_of(stage: Any) -> tuple[int, int]:
    """Return the number of a stage's iteration, and the number of items it has yielded, by torch's counters."""
    return iteration_of(stage), count_yielded(stage)
