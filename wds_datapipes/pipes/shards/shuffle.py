"""``.shuffle()`` of a list of shards, which shuffles the whole list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wds_datapipes.datapipes import Shuffler
from wds_datapipes.pipes.foreign_stages import TORCH_BUFFER_SIZE, declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import library_of, sources_of
from wds_datapipes.pipes.shards.sharding_filter import ShardingFilterIterDataPipe
from wds_datapipes.pipes.state.shard_order import UrlList

T_co = TypeVar("T_co", covariant=True)


class ShufflerIterDataPipe(Shuffler[T_co]):
    """The ``.shuffle()`` of a list of shards, which shuffles the whole list in a buffer of references.

    torch's stage chooses from 10,000 items, so a shard of a longer list would stay near its place in the list.
    Lists of at most 10,000 shards have the same order as with torch. The class has the name of torch's because states
    and caches record the name.

    Yields:
        T_co: the items of ``datapipe``, in a different order in each epoch.

    Args:
        datapipe: yields URLs of shards.

    Attributes:
        lanes: the number of lanes. Lane i consists of every ``lanes``-th item, starting with item i, and is shuffled
            separately.
    """

    lanes = 1

    @classmethod
    def like(cls, shuffler: Shuffler[T_co]) -> ShufflerIterDataPipe[T_co]:
        """Return a shuffle of the whole list in place of torch's, with the same settings."""
        own = cls(shuffler.datapipe)
        own._enabled, own._seed = shuffler._enabled, shuffler._seed
        return own

    def __iter__(self) -> Iterator[T_co]:
        if not self._enabled:
            yield from self.datapipe
            return
        held: list[Any] = list(declared(self.datapipe).known_list() or self.datapipe)
        if len(held) > TORCH_BUFFER_SIZE or self.lanes > 1:
            for number in self._permute(np.arange(len(held), dtype=np.int32)).tolist():
                yield held[number]
            return
        while held:
            yield held.pop(self._rng.randint(0, len(held) - 1))

    def draw_list(self) -> UrlList | None:
        """Return a long list in the order of the next pass; see `Role.draw_list`."""
        drawn: UrlList | None = declared(self.datapipe).draw_list()
        if drawn is not None and self._enabled:
            self.reset()  # takes the seed, as a pass does
            return drawn.in_order(self._permute(drawn.order))
        return drawn

    def sharding_filter(self, sharding_group_filter: Any = None) -> ShardingFilterIterDataPipe:
        """Split the list between ranks and workers."""
        return ShardingFilterIterDataPipe(self, sharding_group_filter)

    def _permute(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        # NumPy guarantees the sequence of this generator, and draws a million numbers in the time of 10,000 above.
        draw = np.random.RandomState(self._rng.getrandbits(32))
        return draw.permutation(numbers) if self.lanes == 1 else numbers[_permute_lanes(len(numbers), self.lanes, draw)]

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.lanes  # type: ignore[no-untyped-call]  # torch's

    def __setstate__(self, state: Any) -> None:
        own, lanes = state
        super().__setstate__(own)  # type: ignore[no-untyped-call]  # torch's
        if lanes > 1:  # states record attributes
            self.lanes = lanes


def _permute_lanes(count: int, lanes: int, draw: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Return a permutation that moves numbers only by multiples of ``lanes``."""
    keys = draw.random_sample((-(-count // lanes), lanes))
    keys.ravel()[count:] = 1  # more than all others
    order: npt.NDArray[np.int64] = keys.argsort(axis=0, kind="stable") * lanes + np.arange(lanes)
    return order.ravel()[:count]


def with_whole_lists(source: Any) -> Any:
    """Return a pipeline in which torch's ``.shuffle()`` with its default buffer shuffles the whole list, if it ends.

    The stages after such a shuffle read from ours instead.

    Args:
        source: yields URLs of shards.
    """
    ours = dict[int, Any]()
    for stage in reversed(graph_of(source).stages):
        for name, value in [*vars(stage).items()]:
            if id(value) in ours:
                setattr(stage, name, ours[id(value)])
        shuffled = declared(stage).shuffled_source()
        # A source of shards has a method of its own, which makes torch's stage only if this size was passed explicitly.
        if shuffled is not None and not hasattr(type(shuffled), "shuffle") and _ends(shuffled):
            ours[id(stage)] = ShufflerIterDataPipe.like(stage)
    return ours.get(id(source), source)


def _ends(pipe: Any) -> bool:
    """Whether a stage is known to yield a finite number of items."""
    if not declared(pipe).declares_length():  # the stream may be endless
        with suppress(Exception):  # of a user's stage
            len(pipe)
            return True
    sources = list(sources_of(pipe))
    is_known = declared(pipe).is_transparent or library_of(type(pipe)) in ("torch", "torchdata")
    return is_known and declared(pipe).restarts_once() and bool(sources) and all(map(_ends, sources))
