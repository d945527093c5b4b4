"""Stages that make several items of one, and what they know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.graph import position_reader_of, sources_of
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.pipes.state.stateless import has_state, is_stateless
from wds_datapipes.samples.derived_position import Expansion, origins_of, pack_positions, take_apart, unpack_positions
from wds_datapipes.shards.position import Origin, SamplePosition

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["ExpandingStage"]

Pipe = IterDataPipe[Any]


class ExpandingStage(Stage[Any]):
    """The state of a stage that makes several items of one, such as the samples of a batch.

    It knows which items of the nearest stage with a state the present one was made of, and how many it has made of
    that. To go on, these are read again, and are put together again in the same order by the stages between.
    """

    def __init__(self, source: Pipe) -> None:
        super().__init__()
        self.source = source
        self._parting = Expansion()
        self._loaded: tuple[Mapping[str, Any], list[SamplePosition]] | None = None

    is_expanding = True

    @property
    def rereads_samples(self) -> bool:  # type: ignore[override]  # it depends on an argument of a subclass
        """Whether the samples that the present item was made of are read again to resume."""
        return self.is_expanding

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the item that was yielded last, if its samples have one."""
        if not self.is_expanding or _nearest_known(self.source) is None:
            return None
        return lambda: self._parting.address()

    def state_dict(self) -> dict[str, Any]:
        """Return what the present items are made of, and how many were made of it.

        Raises:
            StateError: a stage before makes several items of one, and does not tell.
        """
        if self._loaded is not None:
            return {"waiting": [], "given": 0, "is_last": False, **self._loaded[0]}
        origin, given = self._clear_origin()
        if origin is None:
            return {"waiting": [], "given": 0, "is_last": False}
        return {"waiting": pack_positions(origin.addresses), "given": given, "is_last": origin.is_last}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns; what the present items are made of is kept."""
        if self._loaded is not None:
            return self.state_dict()
        origin, given = self._clear_origin()
        waiting = recorder.keep(self, origin, lambda: pack_positions(() if origin is None else origin.addresses))
        return {"waiting": waiting, "given": recorder.number(given), "is_last": origin is not None and origin.is_last}

    def _clear_origin(self) -> tuple[Origin | None, int]:
        """Return what the present items are made of, and how many were made of it.

        Raises:
            StateError: a stage before makes several items of one, and does not tell.
        """
        parting = self._parting
        if parting.is_unclear:
            raise StateError(
                f"{type(self).__name__} goes on with what its items were made of, and a stage before it makes several "
                f"items of one. Let that be .unbatch_samples(), or .compose() with each_alone=True"
            )
        origin, given = parting.saved
        return (None, 0) if origin is None else (origin, given)

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only items that come again are left.
            again: items that wait in later stages, and are yielded first.
        """
        self._loaded = state, [*again]

    def positions_before(self, again: Iterable[SamplePosition]) -> list[SamplePosition]:
        """Return the positions of the samples that items are made of again, of those of the items."""
        return origins_of(again)

    def reset_state(self) -> None:
        """Begin anew when it is iterated next."""
        self._loaded = None

    def _taken_apart(self, function: Callable[[Iterator[Any]], Iterable[Any]]) -> Iterator[Any]:
        """Yield what a function makes of the source, of which each item stands for itself."""
        (state, again), self._loaded = self._loaded or ({}, []), None
        known = _nearest_known(self.source)
        if known is None:
            yield from function(iter(self.source))
            return
        stage, address = known
        made_of = unpack_positions(state.get("waiting", ()))
        present = Origin(state["is_last"], tuple(made_of)) if made_of else None
        self._parting = Expansion(present, state.get("given", 0), again)
        units = _reading_from(self.source, stage, _Feed(stage, address, self._parting))
        yield from take_apart(units, function, self._parting)


class _Feed(Stage[Any]):
    """Stands in the place of a stage, and yields what it yields; at first what is needed to go on."""

    def __init__(self, source: Pipe, told: Callable[[], SamplePosition], parting: Expansion) -> None:
        super().__init__()
        self.source = source
        self._told = told
        self._parting = parting

    def position_reader(self) -> Callable[[], SamplePosition]:
        return lambda: self._parting.at

    def __iter__(self) -> Iterator[Any]:
        yield from self._parting.feed(iter(self.source), self._told)

    def __len__(self) -> int:
        return len(self.source)


def _nearest_known(pipe: Any) -> tuple[Pipe, Callable[[], SamplePosition]] | None:
    """Return the nearest stage with a state, from one on, and what tells where its items are; None if there is none."""
    while not has_state(pipe):
        sources = list(sources_of(pipe))
        if len(sources) != 1 or not is_stateless(pipe) or not any(each is sources[0] for each in vars(pipe).values()):
            return None
        pipe = sources[0]
    address = position_reader_of(pipe)
    return None if address is None else (pipe, address)


def _reading_from(pipe: Any, stage: Pipe, feed: _Feed) -> Any:
    """Return a copy of the stages from one behind another that reads from a feed."""
    if pipe is stage:
        return feed
    copied = object.__new__(type(pipe))
    attributes: Sequence[tuple[str, Any]] = list(vars(pipe).items())
    for name, value in attributes:
        copied.__dict__[name] = _reading_from(value, stage, feed) if isinstance(value, IterDataPipe) else value
    if isinstance(pipe, SeededStage):  # a seed is for one epoch, and the copy takes it
        pipe._seed = None
    return copied
