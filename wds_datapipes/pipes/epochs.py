"""How long an epoch is, and how long a pipeline says that it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.sharding import has_no_share, number_instances, place_of, refuse_remote, share, turns_of
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.pipes.state.graph import position_reader_of
from wds_datapipes.pipes.state.nested_sources import NestedPasses, beginning_of
from wds_datapipes.samples.epochs import Stream
from wds_datapipes.shards.position import SamplePosition

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["EpochSetter", "LengthSetter"]


@register_stage("with_epoch")
class EpochSetter(Stage[Any]):
    """End an epoch after ``n`` items, and go on from there in the next (functional name: ``with_epoch``).

    The stream continues: the next epoch begins with the item after the last one, also where an epoch was broken off,
    and the source begins again whenever it has ended. Workers share the ``n`` items of their rank, as
    ``.sharding_filter()`` or ``.resample_wds_shards()`` before this stage tells them; without either, each worker
    yields ``n``. Place it behind ``.batch()`` to count batches.

    The place in the stream is kept in the process. It is lost where workers end with each epoch, as those of torch's
    ``DataLoader`` do without ``persistent_workers=True``, unless the loop is over `StatefulShards.tracked`. Of an epoch
    that is broken off, items that workers have made ahead are lost, but for such a loop.

    The passes over the source follow from the seed of the first epoch, each with another order, the same on all ranks
    and workers. The seeds that loaders set for later epochs change nothing here. With each pass, the shares of a
    ``.sharding_filter()`` move on by one worker. So a worker whose shards hold nothing, or that has none as there are
    more workers than shards, goes on with the next pass, and every rank has its ``n`` items.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.
        n: how many items an epoch has, for the workers of a rank together. It is also the ``len()``.

    Raises:
        EmptySourceError: ``source`` has nothing to yield: all of it was read ten times without an item.
        RuntimeError: ``source`` is what other processes send, which only a loader can begin again.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> pipe = IterableWrapper(range(5)).with_epoch(3)
        >>> list(pipe), list(pipe), list(pipe)
        ([0, 1, 2], [3, 4, 0], [1, 2, 3])
    """

    spans_epochs = True

    def __init__(self, source: IterDataPipe[Any], n: int) -> None:
        super().__init__()
        self.source = source
        self.n = _number("n is the number of items in an epoch, from 1", n, 1)
        self._loaded: tuple[Mapping[str, Any], list[SamplePosition]] | None = None
        self._stream: Stream[Any] = Stream()
        self._passes = NestedPasses(source, place_of(source), None)
        self._seed: int | None = None

    def set_seed(self, seed: int) -> EpochSetter:
        """Give the seed that all passes follow from, if none has begun; loaders call this."""
        self._seed = seed
        return self

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the item that was yielded last, if the source has one."""
        known = position_reader_of(self.source)
        if known is None:
            return None

        def position() -> SamplePosition:
            shard, start, end, way = known()
            return SamplePosition(shard, start, end, (self._passes.number, *way))

        return position

    def nested_sources(self) -> Sequence[IterDataPipe[Any]]:
        """Return the source, which begins when the last pass has ended."""
        return (self.source,)

    def state_dict(self) -> dict[str, Any]:
        """Return how many items there were in this epoch, and where the stream is, which lasts beyond it.

        Raises:
            StateError: a stage before holds samples back, and has no state.
        """
        return self._saved(None)

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns, with those of the stages before."""
        return self._saved(recorder)

    def _saved(self, recorder: Recorder | None) -> dict[str, Any]:
        if self._loaded is not None:
            return {"given": self._loaded[0].get("given", 0), "lasting": self._loaded[0]["lasting"]}
        stream, passes = self._stream, self._passes
        lasting = None
        if stream.is_begun:
            if stream.is_open:
                place = passes.state_dict(self.source, recorder)
            else:
                place = {"pass": stream.passes, "state": beginning_of(self.source)}
            lasting = {"seed": passes.seed, "first": passes.first, "is_open": stream.is_open, **place}
        given = stream.given if stream.is_begun else 0
        return {"given": given if recorder is None else recorder.number(given), "lasting": lasting}

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned. Without ``"given"``, an epoch begins; with ``"ends"``, only samples
                that come again are left.
            again: samples that wait in later stages, and are yielded first.
        """
        self._loaded = state, [*again]

    def reset_state(self) -> None:
        """Begin an epoch when it is iterated next; the stream goes on as it would have."""
        if self._loaded is not None:
            self._loaded = {"given": 0, "lasting": self._loaded[0]["lasting"]}, []

    def __iter__(self) -> Iterator[Any]:
        refuse_remote(self.source, "with_epoch")
        number_instances(self.source)  # a loader may have split the source again meanwhile
        state, again = self._loaded or ({}, [])
        self._stream.given = 0
        if state.get("ends", False):
            yield from self._made_again(state["lasting"], again)
            return
        if state and state["lasting"] is None:
            self._stream = Stream()
        elif state:
            lasting = state["lasting"]
            self._passes = NestedPasses(self.source, place_of(self.source), lasting["seed"], lasting["first"], lasting)
            items = yield from self._passes.go_on(self.source, again)
            is_open = lasting["is_open"]
            self._stream.go_on(items if is_open else None, lasting["pass"] + is_open, state.get("given", 0))
            del items
        self._loaded = None  # not before: whoever waits for samples that come again may stop at the last of them
        yield from self._stream.take(
            share(self.n, place_of(self.source)),
            begin=self._begin,
            has_no_share=lambda: has_no_share(self.source),
            turns=lambda: turns_of(self.source),
        )

    def __len__(self) -> int:
        return self.n

    def _made_again(self, lasting: Mapping[str, Any], again: list[SamplePosition]) -> Iterator[Any]:
        """Yield samples of earlier passes that later stages wait for."""
        nothing_else = {"pass": -1, "state": lasting["state"]}
        self._passes = NestedPasses(self.source, place_of(self.source), lasting["seed"], lasting["first"], nothing_else)
        yield from self._passes.go_on(self.source, again)

    def _begin(self, number: int) -> Iterator[Any]:
        if number == 0:
            self._passes = NestedPasses(self.source, place_of(self.source), self._seed)
        return self._passes.begin(self.source, number)


@register_stage("with_length")
class LengthSetter(Stage[Any]):
    """Declare how many items there are, and change nothing else (functional name: ``with_length``).

    ``len()`` is ``n``, also behind stages that compute theirs, such as ``.batch()``, and for torch's ``DataLoader``,
    which warns when more items come than it has told. To make an epoch as long, use ``.with_epoch()``.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.
        n: how many items an epoch has, of all workers of a rank together.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"n": n} for n in range(10)]).filter(bool).with_length(10)
        >>> len(samples), len(samples.batch(4))
        (10, 3)
    """

    is_stateless = True

    def __init__(self, source: IterDataPipe[Any], n: int) -> None:
        super().__init__()
        self.source = source
        self.n = _number("n is the number of items, from 0", n, 0)

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def __len__(self) -> int:
        return self.n


def _number(what: str, value: Any, least: int) -> int:
    """Return the number that an argument is, if it makes sense."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}, not {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{what}, not {value!r}")
    return number
