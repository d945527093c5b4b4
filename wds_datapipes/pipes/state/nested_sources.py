"""Passes that a stage starts over its source, with their seeds and their resume state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.inspection import count_yielded
from wds_datapipes.pipes.sharding import rotate_assignments
from wds_datapipes.pipes.stage import position_reader_of
from wds_datapipes.pipes.state.pipeline_state import load_state
from wds_datapipes.pipes.state.seeding import later_seed, pending_seed
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, ItemCounter
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Instance

#: The state of a source that has not started.
BEGINNING: Mapping[str, Any] = {"pass": 0, "state": None}

Pipe = IterDataPipe[Any]

_END = object()


class NestedPasses:
    """Iterates over a source repeatedly, with different seeds each time, and records the current position.

    The first pass uses the seeds that the loader has set. A loader sets seeds once per epoch, but workers may reach a
    later pass in different epochs, or several passes in one. The seeds of later passes are therefore derived from those
    of the first. Before the data is split, the seeds are the same in all workers and ranks, because all must split the
    same order.

    Args:
        graph: the graph of the source. This object keeps no reference to it, because its owner has the source.
        instance: the rank and the worker of this instance.
        seed: the seed of this instance, or None if no loader has set one.
        first: the seeds of the stages in the first pass, if it was started elsewhere.
        first_rotation: the rotation of the shares in the first pass (see `rotate_assignments`).
        loaded: the state to resume from. It remains the state until `resume_from` has reached new items, because a
            stage that waits for replayed samples may stop at the last of them.

    Attributes:
        number: the number of the current pass, from 0.
        first: the seeds of the stages in the first pass, each None if no loader has set it.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        instance: Instance,
        seed: int | None,
        first: Sequence[int | None] | None = None,
        loaded: Mapping[str, Any] | None = None,
        first_rotation: int = 0,
    ) -> None:
        self.number = 0
        self.first_rotation = first_rotation
        self.seed = seed
        self.first = first_seeds(graph) if first is None else [*first]
        self._instance = instance
        self._state: Any = None  # the state to resume the current pass from, if it has not started
        self._has_started = False
        self._stages: list[Any] = []
        self._yielded, self._snapshot = -1, dict[str, Any]()  # of the last item that the source has yielded
        self._loaded = loaded

    def begin(self, source: Pipe, number: int, state: Any = None, again: Awaited = NONE_AWAITED) -> Iterator[Any]:
        """Return an iterator over a pass, which starts when the first item is requested.

        Args:
            source: the source.
            number: the number of the pass.
            state: the state to resume from, or None at the beginning.
            again: samples to yield first.
        """
        self.number, self._state, self._has_started, self._stages = number, state, False, []
        self._yielded = -1
        return self._items(source, again)

    def resume_from(self, source: Pipe, again: Awaited) -> Generator[Any, None, Iterator[Any]]:
        """Yield the samples that later stages wait for; return an iterator over the rest of the current pass.

        The pass resumes from ``loaded``: a state from `snapshot`, or ``{}`` if only these samples remain.

        Args:
            source: the source.
            again: the samples that later stages wait for; the route of each begins with the number of its pass.

        Returns:
            Iterator: over the items that follow.
        """
        of_pass = defaultdict[int, Awaited](Awaited)  # a later stage does not know which source an item is from
        for address, holder in again.items():
            number, *way = address.route
            of_pass[number][address._replace(route=tuple(way))] = holder
        state = self._loaded or {}
        number = state.get("pass", -1)
        for earlier in sorted(of_pass.keys() - {number}):
            items = self.begin(source, earlier, [{} for _ in PipelineGraph(source).stateful_stages()], of_pass[earlier])
            yield from _awaited_of(items, of_pass[earlier], position_reader_of(source))
            del items  # closes the current shard
        items = self.begin(source, number, state.get("state"), of_pass[number])
        following = yield from _awaited_of(items, of_pass[number], position_reader_of(source))
        if following is not _END:
            return self._later(following, items)
        self._loaded = None
        return items

    def _later(self, following: Any, items: Iterator[Any]) -> Iterator[Any]:
        """Yield a new item and those after it; the state remains the loaded one until then."""
        self._loaded = None
        yield following
        yield from items

    def snapshot(self, source: Pipe) -> dict[str, Any]:
        """Return the number of the current pass, and its position; None means its beginning."""
        if self._loaded is not None:
            return {"pass": self._loaded["pass"], "state": self._loaded["state"]}
        if not self._has_started:
            return {"pass": self.number, "state": self._state}
        # Finding the stages takes longer than saving their states.
        self._stages = self._stages or PipelineGraph(source).stateful_stages()
        if (yielded := count_yielded(source)) != self._yielded:
            snapshots = [stage.snapshot() for stage in self._stages]
            self._yielded, self._snapshot = yielded, {"pass": self.number, "state": snapshots}
        return self._snapshot

    def _items(self, source: Pipe, again: Awaited) -> Iterator[Any]:
        graph = PipelineGraph(source)
        self._set_seeds(graph)
        rotate_assignments(graph, self.first_rotation + self.number)
        load_state(graph, self._state, again)
        self._state, self._has_started = None, True
        yield from source

    def _set_seeds(self, graph: PipelineGraph) -> None:
        before = graph.before_split
        own = self._instance.rank, self._instance.workers, self._instance.worker
        stages = list(zip(graph.random_stages, self.first, strict=True))
        shared = [first for stage, first in stages if id(stage) in before and first is not None]
        for position, (stage, first) in enumerate(stages):
            if self.number == 0:
                if first is not None:
                    stage.set_seed(first)
            elif id(stage) in before:
                if shared:
                    stage.set_seed(derived_seed("shared", *shared, self.number, position))
            elif self.seed is not None:
                stage.set_seed(derived_seed("own", self.seed, *own, self.number, position))


def first_seeds(graph: PipelineGraph, before: Sequence[int | None] | None = None) -> list[int | None]:
    """Return the seeds of a source's stages in the first pass of an epoch, or of a repeated part of an epoch.

    Args:
        graph: the graph of the source.
        before: the previous result of this function. If no loader has set seeds since then, the new seeds are derived
            from it, because the number of passes since then may differ between workers.
    """
    seeds = [pending_seed(stage) for stage in graph.random_stages]
    if before is None or any(seed is not None for seed in seeds):
        return seeds
    return [None if seed is None else later_seed(seed) for seed in before]


def _awaited_of(
    items: Iterator[Any], awaited: Awaited, position: Callable[[], SamplePosition] | None
) -> Generator[Any, None, Any]:
    """Yield the samples that later stages held back; return the item after them if it was read to find that out."""
    pending = ItemCounter(again=awaited)
    while pending.has_pending and (item := next(items, _END)) is not _END:
        if not pending.is_repeat(position):
            return item
        yield item
    return _END
