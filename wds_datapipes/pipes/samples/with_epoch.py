"""The stage ``.with_epoch()``: set the number of items in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.instance import instance_of
from wds_datapipes.pipes.roles import Transform
from wds_datapipes.pipes.sharding import has_no_shards, number_instances, refuse_remote, rotation_period
from wds_datapipes.pipes.stage import SnapshotStage, position_reader_of
from wds_datapipes.pipes.state.nested_sources import NestedPasses, first_seeds
from wds_datapipes.samples.epochs import Stream
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Instance


class EpochSetter(Transform, SnapshotStage[Any]):
    """End each epoch after ``n`` items and continue from there in the next (functional name: ``with_epoch``).

    The next epoch starts with the next item, even after an abandoned epoch, and the source restarts whenever it is
    exhausted. If ``.sharding_filter()`` or ``.resample_wds_shards()`` precedes this stage, the workers of a rank share
    the ``n`` items; otherwise, each worker yields ``n``. Put it after ``.batch()`` to count batches.

    With `ShardReadingService`, and in a loop over `StatefulShards.tracked`, this holds for the items that the loop has
    received. In a plain ``DataLoader``, the position in the stream is stored in the worker: it is lost if workers end
    with each epoch, as they do without ``persistent_workers=True``, and if an epoch is abandoned, the items that
    workers have prefetched are lost, too.

    The seed of the first epoch determines the order of every pass. Each pass has a different order, which is the same
    on all ranks and workers. Seeds that loaders set for later epochs have no effect. In each pass, the assignment of a
    ``.sharding_filter()`` rotates by one worker, so that a worker without shards, or with empty ones, continues with
    the next pass, and every rank yields ``n`` items.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.
        n: the number of items in an epoch, over all workers of a rank. ``len()`` returns it, too.

    Raises:
        EmptySourceError: ten consecutive passes of ``source`` yielded no items.
        RuntimeError: ``source`` is in another process, so only a loader can restart it.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> pipe = IterableWrapper(range(5)).with_epoch(3)
        >>> list(pipe), list(pipe), list(pipe)
        ([0, 1, 2], [3, 4, 0], [1, 2, 3])
    """

    is_stateless = False
    spans_epochs = True
    _share: int | None = None

    def __init__(self, source: IterDataPipe[Any], n: int) -> None:
        self.source = source
        self.n = check_integer("n, the number of items in an epoch,", n, 1)
        self._loaded: tuple[Mapping[str, Any], Awaited] | None = None
        self._stream: Stream[Any] = Stream()
        graph = PipelineGraph(source)
        self._passes = NestedPasses(graph, instance_of(graph), None)
        self._seed: int | None = None

    def set_seed(self, seed: int) -> EpochSetter:
        """Set the seed of all passes before the first pass; loaders call this."""
        self._seed = seed
        return self

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the item that was yielded last, if the source has one."""
        known = position_reader_of(self.source)
        if known is None:
            return None
        return lambda: (at := known())._replace(route=(self._passes.number, *at.route))

    def nested_sources(self) -> Sequence[IterDataPipe[Any]]:
        """Return the source, which restarts after each pass."""
        return (self.source,)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of items yielded in this epoch, and the position in the stream, which spans epochs.

        Raises:
            StateError: a stage before this one buffers samples but has no state.
        """
        if self._loaded is not None and self._loaded[0]["stream"] is not None:
            return {"yielded": self._loaded[0].get("yielded", 0), "stream": self._loaded[0]["stream"]}
        stream, passes = self._stream, self._passes
        if self._loaded is not None or not stream.is_begun:
            return {"yielded": 0, "stream": self._beginning()}
        position = {"pass": stream.passes, "state": None}
        if stream.is_open:
            position = passes.snapshot(self.source)
        lasting = {"seed": passes.seed, "first": passes.first, "is_open": stream.is_open, **position}
        return {"yielded": stream.given, "stream": lasting}

    def _beginning(self) -> dict[str, Any] | None:
        """Return the beginning of the stream, whose seeds are those of this epoch; None if no loader has set them."""
        if self._seed is None:
            return None
        first = first_seeds(PipelineGraph(self.source))
        return {"seed": self._seed, "first": first, "is_open": True, "pass": 0, "state": None}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`. Without ``"yielded"``, a new epoch starts.
            again: the samples that later stages have buffered; they are yielded first.
        """
        self._loaded = state, again

    def reset_state(self) -> None:
        """Make the next iteration start an epoch at the loaded position in the stream."""
        if self._loaded is not None:
            self._loaded = {"yielded": 0, "stream": self._loaded[0]["stream"]}, NONE_AWAITED

    def __iter__(self) -> Iterator[Any]:
        graph = PipelineGraph(self.source)
        instance = instance_of(graph)
        refuse_remote(graph, "with_epoch")
        number_instances(graph)  # a loader may have split the source again
        state, again = self._loaded or ({}, NONE_AWAITED)
        self._stream.given = 0
        if state and state["stream"] is None:
            self._stream = Stream()
        elif state:
            lasting = state["stream"]
            self._passes = NestedPasses(graph, instance, lasting["seed"], lasting["first"], lasting)
            items = yield from self._passes.resume_from(self.source, again)
            is_open = lasting["is_open"]
            self._stream.resume_from(items if is_open else None, lasting["pass"] + is_open, state.get("yielded", 0))
            del items
        self._loaded = None  # not earlier: a reader of repeated samples may stop at the last of them
        yield from self._stream.take(
            instance.share_of(self.n),
            begin=partial(self._begin, graph, instance),
            has_no_shards=lambda: has_no_shards(graph),
            rotation_period=lambda: rotation_period(graph),
        )

    def share_length(self, instance: Instance) -> None:  # noqa: ARG002 - without a split, each worker yields all
        """Make ``len()`` return one worker's part."""
        self._share = instance_of(self.source).share_of(self.n)

    def __len__(self) -> int:
        return self.n if self._share is None else self._share

    def _begin(self, graph: PipelineGraph, instance: Instance, number: int) -> Iterator[Any]:
        if number == 0:
            self._passes = NestedPasses(graph, instance, self._seed)
        return self._passes.begin(self.source, number)
