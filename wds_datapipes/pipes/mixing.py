"""Several sources as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.sharding import has_no_share, place_of, refuse_remote, turns_of
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.pipes.state.graph import position_reader_of
from wds_datapipes.pipes.state.nested_sources import BEGINNING, NestedPasses, first_seeds
from wds_datapipes.pipes.state.pipeline_state import next_epoch_state
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.mixing import MixState, Stop, mix_samples
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.position import SamplePosition

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["SampleMixer"]


@register_stage("mix_samples")
class SampleMixer(SeededStage, Stage[Any]):
    """Mix this source with others (functional name: ``mix_samples``).

    The sources have to be pipelines of their own, up to their lists of shards: torch lets a stage be read by one other
    only. Where two of them share a stage, use ``.fork()`` behind it. What is drawn follows from the seed of the loader.

    A worker that was dealt no shard of a source has an end of that source at once. So with more workers than a source
    has shards, do not stop at the first. With ``stop="never"``, the shares of the workers move on by one whenever a
    source begins again, so that each worker gets to the data of all.

    Yields:
        Any: the items of the sources, unchanged.

    Args:
        source: yields samples, or anything else.
        others: the other sources.
        weights: numbers in the proportions in which the sources are drawn, with that of ``source`` first; or
            ``"sizes"``, to draw them in proportion to their ``len()``. By default one item comes from each in turn.
            A source of weight 0 is not read.
        stop: an epoch ends when the ``"first"`` source that is asked has no more, or when ``"all"`` have ended, or
            ``"never"``: a source that has ended begins again, with another seed. End it with ``.with_epoch()``.

    Raises:
        EmptySourceError: a source that has to begin again yields nothing, several times in a row.
        RuntimeError: a source has to begin again, and is what other processes send.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> letters, digits = IterableWrapper("abc"), IterableWrapper("1")
        >>> list(letters.mix_samples(digits)), list(letters.mix_samples(digits, stop="all"))
        (['a', '1', 'b'], ['a', '1', 'b', 'c'])
        >>> mixed = letters.mix_samples(digits, weights=[3, 1], stop="never").with_epoch(1000)
        >>> 650 < sum(map(str.isalpha, mixed)) < 850
        True
    """

    #: By how many numbers the shares of its sources have moved on before it begins (see `turn_shares`).
    _first_turn = 0

    def __init__(
        self,
        source: IterDataPipe[Any],
        *others: IterDataPipe[Any],
        weights: Sequence[float] | Literal["sizes"] | None = None,
        stop: Stop = "first",
    ) -> None:
        super().__init__()
        for other in others:
            if not isinstance(other, IterDataPipe):
                raise TypeError(f"mix_samples mixes datapipes, and {other!r} is none")
        if len({id(each) for each in (source, *others)}) < 1 + len(others):
            raise ValueError("mix_samples was given one source twice; make a pipeline for each, or use .fork()")
        if stop not in ("first", "all", "never"):
            raise ValueError(f'stop is "first", "all" or "never", not {stop!r}')
        self.source = source
        self.others = others
        self.weights: tuple[float, ...] | Literal["sizes"] | None
        if weights is None or isinstance(weights, str):
            if weights not in (None, "sizes"):
                raise ValueError(f'weights are numbers, "sizes" or None, not {weights!r}')
            self.weights = weights
        else:
            self.weights = _check_arguments(weights, 1 + len(others))
        self.stop: Stop = stop
        self._weights()  # raises where a source has no size
        self._rng = Random()
        self._state = MixState([])
        self._passes: list[NestedPasses] = []
        self._firsts: list[list[int | None] | None] = [None] * (1 + len(others))
        self._loaded: tuple[Mapping[str, Any], list[SamplePosition]] | None = None

    @property
    def can_reshard(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether what is left of an epoch follows from what is left of the sources."""
        return self.stop == "all"

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the item that was yielded last, if all sources have one."""
        known = all(position_reader_of(source) is not None for source in self.nested_sources())
        return self._position if known else None

    def move_share(self, turn: int) -> None:
        """Have the shares of the sources begin where those of the worker that is ``turn`` numbers further do."""
        self._first_turn = turn

    def _beginning(self, lasting: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state at the beginning of an epoch, where something may last of the one before."""
        sources = [BEGINNING for _ in self.nested_sources()]
        if lasting is not None:
            sources = [{"pass": 0, "state": state} for state in lasting["sources"]]
        return {"left": None, "turn": 0, "draws": 0, "sources": sources, "lasting": lasting}

    def _lasting(self, states: Sequence[Any]) -> dict[str, Any] | None:
        """Return what lasts beyond the epoch of the sources, if anything does."""
        kept = [next_epoch_state(state) for state in states]
        return {"sources": kept} if any(kept) else None

    def _position(self) -> SamplePosition:
        number = self._state.at
        position = position_reader_of(self.nested_sources()[number])
        if position is None:
            raise RuntimeError(f"Source {number} of mix_samples no longer has positions")
        shard, start, end, way = position()
        return SamplePosition(shard, start, end, (number, self._passes[number].number, *way))

    def nested_sources(self) -> Sequence[IterDataPipe[Any]]:
        """Return the sources, which begin one by one."""
        return (self.source, *self.others)

    def state_dict(self) -> dict[str, Any]:
        """Return which sources are left, whose turn is next, how many numbers were drawn, and where the sources are.

        What lasts of the sources beyond the epoch is told once more.

        Raises:
            StateError: a stage of a source holds samples back, and has no state.
        """
        return self._saved(None)

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns, with those of the sources."""
        return self._saved(recorder)

    def _saved(self, recorder: Recorder | None) -> dict[str, Any]:
        if self._loaded is not None:
            return dict(self._loaded[0])
        if not self._passes:
            return self._beginning()
        state = self._state
        sources = [
            each.state_dict(source, recorder) for each, source in zip(self._passes, self.nested_sources(), strict=True)
        ]
        lasting = self._lasting([source["state"] for source in sources])
        number: Any = int if recorder is None else recorder.number
        turn, draws = number(state.turn), number(state.draws)
        return {"left": [*state.left], "turn": turn, "draws": draws, "sources": sources, "lasting": lasting}

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only samples that come again are left, and so with
                ``"ends"``. Without ``"left"``, the mixture begins anew, and its sources where their states say, or
                what lasts of them.
            again: samples that wait in later stages, and are yielded first.
        """
        if state and "sources" not in state:
            begun = self._beginning(state["lasting"])
            if state.get("ends", False):
                begun = {**begun, "left": [], "sources": [{**each, "pass": -1} for each in begun["sources"]]}
            state = begun
        self._loaded = state, [*again]

    def reset_state(self) -> None:
        """Begin anew when it is iterated next; what lasts of the sources goes on as it would have."""
        lasting = self._loaded and self._loaded[0].get("lasting")
        self._loaded = (self._beginning(lasting), []) if lasting else None

    def reset(self) -> None:
        """Begin an epoch, with the seed that was set for it or one from torch's generator."""
        self._own_seed = self.take_seed()
        self._rng.seed(self._own_seed)

    def __iter__(self) -> Iterator[Any]:
        sources = self.nested_sources()
        weights = self._weights()
        place = place_of(self)
        (loaded, again), self._loaded = self._loaded or (self._beginning(), []), None
        states = loaded.get("sources", [{}] * len(sources))
        self._firsts = [first_seeds(source, before) for source, before in zip(sources, self._firsts, strict=True)]
        self._passes = passes = [
            NestedPasses(
                source,
                place,
                derived_seed("mix_samples", self._own_seed, number),
                first=self._firsts[number],
                first_turn=self._first_turn,
                loaded=states[number],
            )
            for number, source in enumerate(sources)
        ]
        left = loaded.get("left", None if "sources" in loaded else [])
        if left is None:
            left = [source for source in range(len(sources)) if weights is None or weights[source] > 0]
        self._state = MixState([*left], loaded.get("turn", 0), loaded.get("draws", 0))
        items = []
        for number, source in enumerate(sources):
            self._state.at = number
            own = [each._replace(way=each.way[1:]) for each in again if each.way[0] == number]
            begun = yield from passes[number].go_on(source, own)
            items.append(begun if number in left else iter(()))
            del begun  # closes the shard that it reads, if the source has ended

        def begin_again(source: int) -> Iterator[Any]:
            refuse_remote(sources[source], 'mix_samples(stop="never")')
            return passes[source].begin(sources[source], passes[source].number + 1)

        yield from mix_samples(
            items,
            begin_again,
            weights=weights,
            stop=self.stop,
            rng=self._rng,
            has_no_share=lambda source: has_no_share(sources[source]),
            turns=lambda source: turns_of(sources[source]),
            state=self._state,
        )

    def _weights(self) -> tuple[float, ...] | None:
        """Return the weight of each source."""
        if self.weights != "sizes":
            return self.weights
        sizes = [_size(source, number) for number, source in enumerate((self.source, *self.others))]
        return _check_arguments(sizes, len(sizes))


def _size(source: IterDataPipe[Any], number: int) -> int:
    try:
        return len(source)
    except TypeError:
        raise TypeError(
            f'mix_samples(weights="sizes") needs a len() of each source, and source {number} '
            f"({type(source).__name__}) has none: declare it with .with_length(n)"
        ) from None


def _check_arguments(weights: Sequence[float], sources: int) -> tuple[float, ...]:
    weights = tuple(weights)
    if len(weights) != sources:
        raise ValueError(f"mix_samples needs a weight for each of its {sources} sources, not {len(weights)}: {weights}")
    if not all(isinstance(weight, Real) and not isinstance(weight, bool) for weight in weights):
        raise TypeError(f"weights are numbers, not {weights}")
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(f"weights are numbers from 0, of which one at least is above 0, not {weights}")
    return tuple(map(float, weights))
