"""The stage ``.mix_samples()``: mix several sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

from wds_datapipes.arguments import check_choice
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.instance import instance_of
from wds_datapipes.pipes.roles import Transform
from wds_datapipes.pipes.sharding import has_no_shards, refuse_remote, rotation_period
from wds_datapipes.pipes.stage import SnapshotStage, position_reader_of
from wds_datapipes.pipes.state.nested_sources import BEGINNING, NestedPasses, first_seeds
from wds_datapipes.pipes.state.pipeline_state import reshard_states
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.mixing import MixState, Stop, check_weights, mix_samples
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import Resharding, SamplePosition


class SampleMixer(Transform, SeededStage, SnapshotStage[Any]):
    """Mix this source with others (functional name: ``mix_samples``).

    The sources must be separate pipelines, including their lists of shards, because torch allows only one reader per
    stage. If two of them share a stage, use ``.fork()`` after it. The seed of the loader determines the order.

    A source without a shard for a worker ends immediately in that worker, so do not use ``stop="first"`` with fewer
    shards than workers. With ``stop="never"``, the assignment of shards rotates between the workers whenever a source
    restarts, so that each worker eventually gets all of the data.

    Yields:
        Any: the items of the sources, unchanged.

    Args:
        source: yields samples, or anything else.
        others: the other sources.
        weights: the relative frequencies of the sources, starting with ``source``. By default, the sources take turns.
            A source of weight 0 is not read.
        stop: when the epoch ends: when the ``"first"`` source is exhausted, when ``"all"`` are, or ``"never"``, in
            which case exhausted sources restart with another seed and ``.with_epoch()`` must end the epoch.

    Raises:
        EmptySourceError: a source that restarts yields nothing several times in a row.
        RuntimeError: a source that must restart is in another process.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> letters, digits = IterableWrapper("abc"), IterableWrapper("1")
        >>> list(letters.mix_samples(digits)), list(letters.mix_samples(digits, stop="all"))
        (['a', '1', 'b'], ['a', '1', 'b', 'c'])
        >>> mixed = letters.mix_samples(digits, weights=[3, 1], stop="never").with_epoch(1000)
        >>> 650 < sum(map(str.isalpha, mixed)) < 850
        True
    """

    is_stateless = False
    argument_uses: ClassVar = {"weights": "free"}

    #: The rotation of the assignment in the first pass (see `rotate_assignments`).
    _first_rotation = 0

    def __init__(
        self,
        source: IterDataPipe[Any],
        *others: IterDataPipe[Any],
        weights: Sequence[float] | None = None,
        stop: Stop = "first",
    ) -> None:
        for other in others:
            if not isinstance(other, IterDataPipe):
                raise TypeError(f"mix_samples mixes datapipes, not {other!r}")
        if len({id(each) for each in (source, *others)}) < 1 + len(others):
            raise ValueError("mix_samples got the same source twice; build a pipeline for each, or use .fork()")
        check_choice("stop", stop, Stop)
        self.source = source
        self.others = others
        if weights is not None:
            weights = list(weights)
            if len(weights) != 1 + len(others):
                raise ValueError(f"mix_samples needs a weight for each of its {1 + len(others)} sources, not {weights}")
            check_weights({f"source {number}": weight for number, weight in enumerate(weights)})
        self.weights = None if weights is None else tuple(map(float, weights))
        self.stop: Stop = stop
        self._rng = Random()
        self._state = MixState([])
        self._passes: list[NestedPasses] = []
        self._firsts: list[list[int | None] | None] = [None] * (1 + len(others))

    @property
    def can_reshard(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether the rest of an epoch can be assigned to a different number of workers."""
        return self.stop == "all"

    def reshard_states(self, rest: Resharding) -> list[dict[str, Any]]:
        """Return the states from which a different number of instances resumes; each source is resharded separately."""
        resharded = []
        for number, source in enumerate(self.nested_sources()):

            def held(instance: int, number: int = number) -> list[SamplePosition]:
                # The source and pass numbers come first; all instances have the same pass.
                found = rest.waiting(instance)
                return [each._replace(route=each.route[2:]) for each in found if each.route[0] == number]

            parts = [None if state is None else state["sources"][number]["state"] for state in rest.states]
            resharded.append(reshard_states(source, replace(rest, states=parts, waiting=held)))
        return [{"sources": [{"pass": 0, "state": state} for state in each]} for each in zip(*resharded, strict=True)]

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the last item yielded, if all sources have positions."""
        known = all(position_reader_of(source) is not None for source in self.nested_sources())
        return self._position if known else None

    def rotate_assignment(self, turn: int, stages: Sequence[Any]) -> None:  # noqa: ARG002
        """Rotate the assignment of the sources by ``turn`` workers."""
        self._first_rotation = turn

    def _beginning(self) -> dict[str, Any]:
        """Return the state at the start of an epoch."""
        return {"left": None, "next_source": 0, "draws": 0, "sources": [BEGINNING for _ in self.nested_sources()]}

    def _position(self) -> SamplePosition:
        number = self._state.at
        position = position_reader_of(self.nested_sources()[number])
        if position is None:
            raise RuntimeError(f"Source {number} of mix_samples no longer has positions")
        shard, start, end, route = position()
        return SamplePosition(shard, start, end, (number, self._passes[number].number, *route))

    def nested_sources(self) -> Sequence[IterDataPipe[Any]]:
        """Return the sources, which are restarted independently."""
        return (self.source, *self.others)

    def snapshot(self) -> dict[str, Any]:
        """Return the remaining sources, the next turn, the number of draws, and the states of the sources.

        Raises:
            StateError: a stage of a source buffers samples but has no state.
        """
        if self._loaded is not None:
            return dict(self._loaded[0])
        if not self._passes:
            return self._beginning()
        state, passes = self._state, zip(self._passes, self.nested_sources(), strict=True)
        return {
            "left": [*state.left],
            "next_source": state.turn,
            "draws": state.draws,
            "sources": [each.snapshot(source) for each, source in passes],
        }

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state from which the next iteration resumes.

        Args:
            state: the result of `state_dict`, or ``{}`` if only the samples of ``again`` remain. Without ``"left"``,
                the mixture starts from its beginning, but its sources resume from their states.
            again: the samples that later stages have buffered; they are yielded first.
        """
        self._loaded = state, again

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        self._own_seed = self.take_seed()
        self._rng.seed(self._own_seed)

    def __iter__(self) -> Iterator[Any]:
        sources, graph = self.nested_sources(), PipelineGraph(self)
        instance, graphs = instance_of(graph), [graph.at(source) for source in sources]
        (loaded, again), self._loaded = self._loaded or (self._beginning(), NONE_AWAITED), None
        states = loaded.get("sources", [{}] * len(sources))
        self._firsts = [first_seeds(each, before) for each, before in zip(graphs, self._firsts, strict=True)]
        self._passes = passes = [
            NestedPasses(
                each,
                instance,
                derived_seed("mix_samples", self._own_seed, number),
                first=self._firsts[number],
                first_rotation=self._first_rotation,
                loaded=states[number],
            )
            for number, each in enumerate(graphs)
        ]
        left = loaded.get("left") if loaded else []
        if left is None:
            left = [source for source in range(len(sources)) if self.weights is None or self.weights[source] > 0]
        self._state = MixState([*left], loaded.get("next_source", 0), loaded.get("draws", 0))
        items = []
        for number, source in enumerate(sources):
            self._state.at = number
            found = {each._replace(route=each.route[1:]): by for each, by in again.items() if each.route[0] == number}
            begun = yield from passes[number].resume_from(source, Awaited(found))
            items.append(begun if number in left else iter(()))
            del begun  # closes the open shard if the source has ended

        def restart(source: int) -> Iterator[Any]:
            refuse_remote(graphs[source], 'mix_samples(stop="never")')
            return passes[source].begin(sources[source], passes[source].number + 1)

        yield from mix_samples(
            items,
            restart,
            weights=self.weights,
            stop=self.stop,
            rng=self._rng,
            has_no_shards=lambda source: has_no_shards(graphs[source]),
            rotation_period=lambda source: rotation_period(graphs[source]),
            state=self._state,
        )
