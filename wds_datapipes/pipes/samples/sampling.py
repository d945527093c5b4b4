"""Stages that select samples at random or by position, check that there are any, and map them with random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import upstream
from wds_datapipes.pipes.sharding import find_rank_and_worker
from wds_datapipes.pipes.stage import CountingStage, EngineStage, OpaqueValue, position_reader_of, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import (
    SampleSeeds,
    map_samples_with_rng,
    non_empty,
    parse_slice,
    rsample,
    slice_samples,
)
from wds_datapipes.seeds import derived_seed


@register_stage("map_samples_with_rng")
class RngSampleMapper(SeededStage, EngineStage[Any]):
    """Apply a function with a seeded random generator to each sample (functional name: ``map_samples_with_rng``).

    The function receives a sample and a ``random.Random``, seeded by the loader's seed, the epoch, and the sample's
    ``__url__`` and ``__key__``. So the random numbers of a sample do not depend on the process, the order, or whether
    the run was resumed. If shards may occur more than once, as with ``.resample_wds_shards()``, and for items that are
    not samples, the seed derives from rank, worker and position instead, so that each copy gets its own numbers.

    The generator is reused for the next sample: do not store it. Seed the generators of other libraries from it::

        def augment(sample, rng):
            noise = np.random.default_rng(rng.getrandbits(64)).normal(size=3)
            generator = torch.Generator().manual_seed(rng.getrandbits(63))
            torch.manual_seed(rng.getrandbits(63))  # torch's global generator, for torchvision's transforms
            ...

    Put it before ``.with_epoch()``: after it, a sample that is repeated within an epoch gets the same numbers.

    Yields:
        Any: the results of the function, except ``None``. A dict keeps ``__key__``, ``__url__``, ``__local_path__`` and
        ``__padding__`` of its sample, unless it sets its own.

    Args:
        source: yields samples, or anything else.
        function: a function of an item and a ``random.Random``.
        on_error: ``"raise"``; or, to skip the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> def flip(sample, rng):
        ...     return {"image": sample["image"][::-1] if rng.random() < 0.5 else sample["image"]}
        >>> samples = [{"__key__": str(n), "__url__": "a.tar", "image": "ab"} for n in range(100)]
        >>> flipped = [sample["image"] for sample in IterableWrapper(samples).map_samples_with_rng(flip)]
        >>> 30 < flipped.count("ba") < 70
        True
    """

    is_stateless = True
    shares_seed = True
    draws_globally = True

    def __init__(
        self, source: IterDataPipe[Any], function: Callable[[Any, Random], Any], *, on_error: OnError = "raise"
    ) -> None:
        check_on_error(on_error)
        if not callable(function):
            raise TypeError(f"map_samples_with_rng applies a function of a sample and a generator, not {function!r}")
        self.source = source
        self.on_error = on_error
        self._function = OpaqueValue(function)
        self._own_seed = 0

    def reset(self) -> None:
        """Start an epoch, with the seed that was set for it or one from torch's generator."""
        self._own_seed = self.take_seed()

    def __iter__(self) -> Iterator[Any]:
        seeds = seeds_of_samples(self, self._own_seed, "map_samples_with_rng")
        yield from map_samples_with_rng(self.source, self._function.value, seeds, on_error=self.counted_errors)


def seeds_of_samples(stage: Any, seed: int, name: str) -> SampleSeeds:
    """Return the seeds of the samples that a stage reads in a pass.

    Args:
        stage: the stage, whose attribute ``source`` is the one before it.
        seed: its seed, the same on all ranks and workers.
        name: the name of the stage.
    """
    instance = find_rank_and_worker(stage)
    return SampleSeeds(
        name,
        seed,
        rank_and_worker=(instance.rank, instance.worker),
        repeats=any(declared(each).repeats_shards for each in upstream(stage.source)),
        position=position_reader_of(stage.source),
    )


@register_stage("rsample")
class SampleRsampler(SeededStage, CountingStage[Any]):
    """Keep each sample with a given probability (functional name: ``rsample``).

    The seed comes from the loader, and differs in each epoch and worker. All samples are read: put it right after
    ``group_samples``, or subsample the shards instead.

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

    def __init__(self, source: IterDataPipe[Any], probability: float = 0.5) -> None:
        if isinstance(probability, bool) or not isinstance(probability, int | float):
            raise TypeError(f"probability must be a number from 0 to 1, not {probability!r}")
        if not 0 <= probability <= 1:
            raise ValueError(f"probability must be a number from 0 to 1, not {probability!r}")
        self.source = source
        self.probability = probability
        self._rng = Random()

    def reset(self) -> None:
        """Start an epoch, with the seed that was set for it or one from torch's generator."""
        # torch's DataLoader sets the same seed in all workers, which would then keep the same positions.
        instance = find_rank_and_worker(self)
        self._rng.seed(derived_seed("rsample", self.take_seed(), instance.rank, instance.worker))

    def __iter__(self) -> Iterator[Any]:
        counter = self._begin_counting()
        position = position_reader_of(self.source)
        yield from rsample(self.source, self.probability, rng=self._rng, counter=counter, position=position)


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

    def __init__(self, source: IterDataPipe[Any], *positions: int | None) -> None:
        self.source = source
        self._start, self._stop, self._step = parse_slice(positions)

    def __iter__(self) -> Iterator[Any]:
        counter, position = self._begin_counting(), position_reader_of(self.source)
        yield from slice_samples(self.source, self._start, self._stop, self._step, counter=counter, position=position)


@register_stage("non_empty")
class NonEmptyChecker(CountingStage[Any]):
    """Raise an error if a source yields nothing (functional name: ``non_empty``).

    Put it before ``.sharding_filter()``, or in a pipeline without workers. After the split, it also raises in workers
    without a shard, which is normal with more workers than shards.

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

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        counter, position = self._begin_counting(), position_reader_of(self.source)
        yield from non_empty(self.source, upstream=self._upstream, counter=counter, position=position)

    def _upstream(self) -> str:
        """Return the names of the stages before this one, the nearest last."""
        names: list[str] = []
        stage: Any = self.source
        while isinstance(stage, IterDataPipe) and len(names) < 20:
            names.insert(0, type(stage).__name__)
            stage = next((value for value in vars(stage).values() if isinstance(value, IterDataPipe)), None)
        return ", ".join(names) or "its source"
