"""Stages that count the samples they read: subsets, logs, lengths of epochs, and a check for empty sources."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from wds_datapipes.arguments import check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.sharding import (
    find_process,
    find_rank_and_worker,
    has_no_shards,
    number_instances,
    refuse_remote,
    rotation_period,
    share,
)
from wds_datapipes.pipes.stage import CountingStage, EngineStage, SnapshotStage, position_reader_of, register_stage
from wds_datapipes.pipes.state.nested_sources import NestedPasses
from wds_datapipes.pipes.state.seeding import PlaceOfStage, SeededStage
from wds_datapipes.samples.epochs import Stream
from wds_datapipes.samples.sample_log import LogTarget, log_samples
from wds_datapipes.samples.sampling import non_empty, parse_slice, rsample, slice_samples
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Instance


@register_stage("rsample")
class SampleRsampler(SeededStage, CountingStage[Any]):
    """Keep each sample with a given probability (functional name: ``rsample``).

    The seed comes from the loader and differs in each epoch and worker. All samples are read, so put this stage
    directly after ``group_samples``, or subsample the shards instead.

    Yields:
        Any: some of the items of ``source``, unchanged and in their order.

    Args:
        source: yields samples, or anything else.
        probability: the probability of keeping a sample, from 0 to 1.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> drawn = list(IterableWrapper(range(10000)).rsample(0.1))
        >>> 800 < len(drawn) < 1200 and drawn == sorted(drawn)
        True
    """

    function = staticmethod(rsample)

    def __init__(self, source: IterDataPipe[Any], probability: float = 0.5) -> None:
        if isinstance(probability, bool) or not isinstance(probability, int | float):
            raise TypeError(f"probability must be a number from 0 to 1, not {probability!r}")
        if not 0 <= probability <= 1:
            raise ValueError(f"probability must be a number from 0 to 1, not {probability!r}")
        super().__init__(source, probability=probability)
        self._rng = Random()

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        # torch's DataLoader sets the same seed in all workers, so they would keep the same positions.
        instance = find_rank_and_worker(self)
        self._rng.seed(derived_seed("rsample", self.take_seed(), instance.rank, instance.worker))

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        return {**super().function_options(), "rng": self._rng}


@register_stage("slice_samples")
class SampleSlicer(CountingStage[Any]):
    """Keep the samples at some positions (functional name: ``slice_samples``).

    Positions count from 0 in each worker and rank: two workers with ``slice_samples(100)`` yield 200 samples. Nothing
    is read after the last position, and the open shard is closed before that sample is yielded.

    Yields:
        Any: some of the items of ``source``, unchanged and in their order.

    Args:
        source: yields samples, or anything else.
        positions: ``stop``, or ``start, stop`` with an optional ``step``, as in ``itertools.islice``. ``None`` as
            ``stop`` means no end.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper(range(10)).slice_samples(3)), list(IterableWrapper(range(10)).slice_samples(1, 8, 3))
        ([0, 1, 2], [1, 4, 7])
    """

    function = staticmethod(slice_samples)

    def __init__(self, source: IterDataPipe[Any], *positions: int | None) -> None:
        start, stop, step = parse_slice(positions)
        super().__init__(source, start=start, stop=stop, step=step)


@register_stage("non_empty")
class NonEmptyChecker(CountingStage[Any]):
    """Raise an error if a source yields nothing (functional name: ``non_empty``).

    Put it before ``.sharding_filter()``, or in a pipeline without workers. After the split, it also raises an error in
    workers without a shard, although these are normal if there are more workers than shards.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.

    Raises:
        EmptySourceError: ``source`` yields nothing.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([3, 4]).non_empty())
        [3, 4]
    """

    function = staticmethod(non_empty)

    def __init__(self, source: IterDataPipe[Any]) -> None:
        super().__init__(source, upstream=name_of(source))


@register_stage("log_samples")
class SampleLogger(CountingStage[Any]):
    """Log a summary of some samples, and the positions of all (functional name: ``log_samples``).

    The summary shows the type, the shape or length, and the start of each value. Samples are counted per worker and
    epoch.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields samples, or anything else.
        first: the number of samples to log at the start.
        every: after that, log each sample whose number, from 1, is a multiple of this.
        logger: a ``logging.Logger``, which gets records of the level INFO; or ``"stderr"`` or ``"stdout"``. The default
            is the logger ``wds_datapipes``, which shows nothing until the program configures logging, for example by
            ``logging.basicConfig(level="INFO")``.
        positions: a folder for a log of the positions of all samples, from which `explain` and ``wds-datapipes steps``
            determine the samples of each step of a stream. A file for each epoch and worker has 8 bytes per sample;
            the ranks may share the folder. It requires a loader that counts epochs; put it right before ``.batch()``.

    Raises:
        MissingSidecarError: ``positions`` cannot be written, or lacks samples from before a resume.
        RuntimeError: no loader counts the epochs, or the samples have no positions.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "jpg": b"..."}, {"__key__": "b", "jpg": b"..."}])
        >>> _ = list(samples.log_samples(first=1, logger="stdout"))
        log_samples: item 0 of worker 0, rank 0
            __key__: str of 1: 'a'
            jpg: bytes of 3: b'...'
    """

    function = staticmethod(log_samples)
    place_in_run: PlaceOfStage | None = None

    def __init__(
        self,
        source: IterDataPipe[Any],
        *,
        first: int = 3,
        every: int | None = None,
        logger: LogTarget | None = None,
        positions: str | os.PathLike[str] | None = None,
    ) -> None:
        check_integer("first", first, 0)
        check_optional_integer("every", every, 1)
        target: Any = logging.getLogger("wds_datapipes") if logger is None else logger
        if not isinstance(target, logging.Logger) and not (isinstance(target, str) and target in ("stdout", "stderr")):
            raise TypeError(f'logger must be a logging.Logger, "stderr" or "stdout", not {logger!r}')
        super().__init__(source, target=target, first=first, every=every)
        self.position_log = None if positions is None else Path(positions)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function, with the rank and worker from torch or from stages that split.

        Raises:
            RuntimeError: there is no log without the number of the epoch and the positions of samples.
        """
        rank, workers, worker, ranks = find_process(self)
        options, path = super().function_options(), self.position_log
        place, self.place_in_run = self.place_in_run, None
        if path is not None:
            if place is None or options["position"] is None:
                raise RuntimeError(
                    "log_samples(positions=) needs samples from shards, and StatefulShards or a ShardReadingService "
                    "that counts epochs. Put it after .mix_samples() and .with_epoch(), which restart their sources"
                )
            path = path / f"{place.first:016x}" / f"{place.epoch:06}-{rank}of{ranks}-{worker}of{workers}.positions"
        return {**options, "rank": rank, "worker": worker, "positions": path}


@register_stage("with_epoch")
class EpochSetter(SnapshotStage[Any]):
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

    spans_epochs = True
    _share: int | None = None

    def __init__(self, source: IterDataPipe[Any], n: int) -> None:
        self.source = source
        self.n = check_integer("n, the number of items in an epoch,", n, 1)
        self._loaded: tuple[Mapping[str, Any], Awaited] | None = None
        self._stream: Stream[Any] = Stream()
        self._passes = NestedPasses(source, find_rank_and_worker(source), None)
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
        if self._loaded is not None:
            return {"given": self._loaded[0].get("given", 0), "lasting": self._loaded[0]["lasting"]}
        stream, passes = self._stream, self._passes
        if not stream.is_begun:
            return {"given": 0, "lasting": None}
        position = {"pass": stream.passes, "state": None}
        if stream.is_open:
            position = passes.snapshot(self.source)
        lasting = {"seed": passes.seed, "first": passes.first, "is_open": stream.is_open, **position}
        return {"given": stream.given, "lasting": lasting}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`. Without ``"given"``, a new epoch starts.
            again: the samples that later stages have buffered; they are yielded first.
        """
        self._loaded = state, again

    def reset_state(self) -> None:
        """Make the next iteration start an epoch at the loaded position in the stream."""
        if self._loaded is not None:
            self._loaded = {"given": 0, "lasting": self._loaded[0]["lasting"]}, NONE_AWAITED

    def __iter__(self) -> Iterator[Any]:
        refuse_remote(self.source, "with_epoch")
        number_instances(self.source)  # a loader may have split the source again
        state, again = self._loaded or ({}, NONE_AWAITED)
        self._stream.given = 0
        if state and state["lasting"] is None:
            self._stream = Stream()
        elif state:
            lasting = state["lasting"]
            self._passes = NestedPasses(
                self.source, find_rank_and_worker(self.source), lasting["seed"], lasting["first"], lasting
            )
            items = yield from self._passes.resume_from(self.source, again)
            is_open = lasting["is_open"]
            self._stream.resume_from(items if is_open else None, lasting["pass"] + is_open, state.get("given", 0))
            del items
        self._loaded = None  # not earlier: a reader of repeated samples may stop at the last of them
        yield from self._stream.take(
            share(self.n, find_rank_and_worker(self.source)),
            begin=self._begin,
            has_no_shards=lambda: has_no_shards(self.source),
            rotation_period=lambda: rotation_period(self.source),
        )

    def share_length(self, instance: Instance) -> None:  # noqa: ARG002 - without a split, each worker yields all
        """Make ``len()`` return one worker's part."""
        self._share = share(self.n, find_rank_and_worker(self.source))

    def __len__(self) -> int:
        return self.n if self._share is None else self._share

    def _begin(self, number: int) -> Iterator[Any]:
        if number == 0:
            self._passes = NestedPasses(self.source, find_rank_and_worker(self.source), self._seed)
        return self._passes.begin(self.source, number)


@register_stage("with_length")
class LengthSetter(EngineStage[Any]):
    """Declare the number of items, without changing them (functional name: ``with_length``).

    ``len()`` returns ``n``; stages that derive their length, such as ``.batch()``, and loaders use it, too. It is not
    compared with the actual number of items. Use ``.with_epoch()`` to set the length of an epoch.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.
        n: the number of items in an epoch, over all workers of a rank.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"n": n} for n in range(10)]).filter(bool).with_length(10)
        >>> len(samples), len(samples.batch(4))
        (10, 3)
    """

    is_stateless = True
    declares_length = True
    _share: int | None = None

    def __init__(self, source: IterDataPipe[Any], n: int) -> None:
        self.source = source
        self.n = check_integer("n, the number of items,", n, 0)

    def __iter__(self) -> Iterator[Any]:
        yield from self.source

    def share_length(self, instance: Instance) -> None:
        """Make ``len()`` return one worker's part."""
        self._share = share(self.n, instance)

    def __len__(self) -> int:
        return self.n if self._share is None else self._share
