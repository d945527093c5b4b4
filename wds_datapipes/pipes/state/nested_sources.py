"""The passes over a source that a stage begins by itself: what seeds each has, and where it goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.sharding import Instance, splitters, turn_shares
from wds_datapipes.pipes.state.graph import takes_seed, upstream
from wds_datapipes.pipes.state.pipeline_state import (
    load_state,
    next_epoch_state,
    nothing_else,
    save_state,
    spans_epochs,
)
from wds_datapipes.pipes.state.seeding import later_seed, pending_seed
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.position import SamplePosition, samples_gone_error

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Recorder

__all__ = ["BEGINNING", "NestedPasses", "beginning_of", "first_seeds"]

#: The state of a source that is yet to begin.
BEGINNING: Mapping[str, Any] = {"pass": 0, "state": None}

Pipe = IterDataPipe[Any]


class NestedPasses:
    """Begins the passes over a source, each with seeds of its own, and tells where the present one is.

    The first one has the seeds that the loader has set. A loader sets them once an epoch, and workers come to a later
    pass in different epochs, or to several in one. So its seeds follow from those of the first pass. Before the data is
    split, they are the same in all workers and ranks, as each would else split another order.

    Args:
        source: the source. It is not kept, as the stage that has this object has it as well.
        place: of this instance.
        seed: of this instance, or None if there is no loader, which would have set one.
        first: the seeds of the stages in the first pass, if it was begun elsewhere.
        first_turn: by how many numbers the shares of the first pass have moved on (see `turn_shares`).
        loaded: where it goes on. That stays its state until `go_on` has come to what is new, as whoever waits for
            samples that come again may stop at the last of them.

    Attributes:
        number: of the present pass, from 0.
        first: the seeds of the stages in the first pass; None where no loader has set one.
    """

    def __init__(
        self,
        source: Pipe,
        place: Instance,
        seed: int | None,
        first: Sequence[int | None] | None = None,
        loaded: Mapping[str, Any] | None = None,
        first_turn: int = 0,
    ) -> None:
        self.number = 0
        self.first_turn = first_turn
        self.seed = seed
        self.first = first_seeds(source) if first is None else [*first]
        self._place = place
        self._state: Any = None  # where the present pass goes on, if it is yet to begin
        self._is_begun = False
        self._loaded = loaded
        if loaded and spans_epochs(source):  # it may never begin, and the next epoch resumes from here
            load_state(source, loaded["state"])

    def begin(
        self, source: Pipe, number: int, state: Any = None, again: Iterable[SamplePosition] = ()
    ) -> Iterator[Any]:
        """Return an iterator over a pass, which begins when it is asked for the first item.

        Args:
            source: the source.
            number: of the pass.
            state: where it goes on, or None at the beginning.
            again: samples that come before.
        """
        self.number, self._state, self._is_begun = number, state, False
        return self._items(source, again)

    def go_on(self, source: Pipe, again: Iterable[SamplePosition]) -> Generator[Any, None, Iterator[Any]]:
        """Yield what stages behind wait for, and return an iterator over the present pass behind that.

        It goes on from ``loaded``: what `state_dict` has returned; or ``{}``, where nothing else is left. With -1 as
        ``"pass"``, nothing else is left, and ``"state"`` tells what lasts.

        Args:
            source: the source.
            again: what stages behind wait for, with the number of the pass at the front of its `Address.way`.

        Returns:
            Iterator: over what comes next.
        """
        of_pass = defaultdict[int, list[SamplePosition]](list)
        for address in again:
            number, *way = address.way
            of_pass[number].append(address._replace(way=tuple(way)))
        state = self._loaded or {}
        number = state.get("pass", -1)
        for earlier in sorted(of_pass.keys() - {number}):
            items = self.begin(source, earlier, nothing_else(source, state.get("state")), of_pass[earlier])
            yield from _exactly(len(of_pass[earlier]), items)
            del items  # closes the shard that it reads
        items = self.begin(source, number, state.get("state"), of_pass[number])
        self._loaded = None
        yield from _exactly(len(of_pass[number]), items)
        return items

    def state_dict(self, source: Pipe, recorder: Recorder | None = None) -> dict[str, Any]:
        """Return which pass this is, and where it is; None is its beginning.

        Args:
            source: the source.
            recorder: of the record that is to have it, if it is one. What is returned is the form of the state then.
        """
        if self._loaded is not None:
            return {"pass": self._loaded["pass"], "state": self._loaded["state"]}
        if self._is_begun:
            state: Any = save_state(source, recorder)
        else:
            state = beginning_of(source) if self._state is None else self._state
        return {"pass": self.number if recorder is None else recorder.number(self.number), "state": state}

    def _items(self, source: Pipe, again: Iterable[SamplePosition]) -> Iterator[Any]:
        self._set_seeds(source)
        turn_shares(source, self.first_turn + self.number)
        load_state(source, self._state, again)
        self._state, self._is_begun = None, True
        yield from source

    def _set_seeds(self, source: Pipe) -> None:
        before = {id(stage) for splitter in splitters(source) for stage in upstream(splitter)}
        stages = list(zip(_seeded_stages(source), self.first, strict=True))
        shared = [first for stage, first in stages if id(stage) in before and first is not None]
        for position, (stage, first) in enumerate(stages):
            if self.number == 0:
                if first is not None:
                    stage.set_seed(first)
            elif id(stage) in before:
                if shared:
                    stage.set_seed(derived_seed("shared", *shared, self.number, position))
            elif self.seed is not None:
                stage.set_seed(derived_seed("own", self.seed, *self._place, self.number, position))


def first_seeds(source: Pipe, before: Sequence[int | None] | None = None) -> list[int | None]:
    """Return the seeds of a source's stages in the first pass of an epoch, or of what repeats a part of one.

    Args:
        source: the source.
        before: those that this has returned before. They decide where no loader has set any since: how many passes
            there were meanwhile may differ between workers.
    """
    seeds = [pending_seed(stage) for stage in _seeded_stages(source)]
    if before is None or any(seed is not None for seed in seeds):
        return seeds
    return [None if seed is None else later_seed(seed) for seed in before]


def beginning_of(source: Pipe) -> list[dict[str, Any] | None] | None:
    """Return the state of a source that is yet to begin: what lasts of the passes before, if anything does."""
    return next_epoch_state(save_state(source)) if spans_epochs(source) else None


def _seeded_stages(source: Pipe) -> Iterator[Any]:
    """Yield the stages that take a seed."""
    return filter(takes_seed, upstream(source))


def _exactly(count: int, items: Iterator[Any]) -> Iterator[Any]:
    end = object()
    for number in range(count):
        if (item := next(items, end)) is end:
            raise samples_gone_error(count - number)
        yield item
