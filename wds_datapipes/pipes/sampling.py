"""A part of a stream: drawn at random, or by position; and that there is anything at all."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.sharding import place_of
from wds_datapipes.pipes.stage import CountingStage, register_stage
from wds_datapipes.pipes.state.graph import position_reader_of
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import non_empty, parse_slice, rsample, slice_samples
from wds_datapipes.seeds import derived_seed

__all__ = ["NonEmptyChecker", "SampleRsampler", "SampleSlicer"]


@register_stage("rsample")
class SampleRsampler(SeededStage, CountingStage[Any]):
    """Let each sample through with a probability (functional name: ``rsample``).

    Other samples are drawn in each epoch and worker, by a seed that comes from the loader. What is
    not drawn is still read: put it right after ``group_samples``, or thin out the shards instead.

    Yields:
        Any: some of the items of ``source``, unchanged and in their order.

    Args:
        source: yields samples, or anything else.
        probability: of each sample, from 0 to 1.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> drawn = list(IterableWrapper(range(10000)).rsample(0.1))
        >>> 800 < len(drawn) < 1200 and drawn == sorted(drawn)
        True
    """

    def __init__(self, source: IterDataPipe[Any], probability: float = 0.5) -> None:
        super().__init__()
        if isinstance(probability, bool) or not isinstance(probability, int | float):
            raise TypeError(f"probability is a number from 0 to 1, not {probability!r}")
        if not 0 <= probability <= 1:
            raise ValueError(f"probability is a number from 0 to 1, not {probability!r}")
        self.source = source
        self.probability = probability
        self._rng = Random()

    def reset(self) -> None:
        """Begin an epoch, with the seed that was set for it or one from torch's generator."""
        # torch's DataLoader gives one seed to all workers, which would then draw the same positions.
        place = place_of(self)
        self._rng.seed(derived_seed("rsample", self.take_seed(), place.rank, place.worker))

    def __iter__(self) -> Iterator[Any]:
        passed = self._begin_counting()
        address = position_reader_of(self.source)
        yield from rsample(self.source, self.probability, rng=self._rng, passed=passed, address=address)


@register_stage("slice_samples")
class SampleSlicer(CountingStage[Any]):
    """Let the samples at some positions through (functional name: ``slice_samples``).

    Positions count from 0 in each worker and each rank: two workers behind ``slice_samples(100)`` yield 200 samples.
    Nothing is read beyond the last of the positions, and the shard that is open then is closed before that sample
    leaves.

    Yields:
        Any: some of the items of ``source``, unchanged and in their order.

    Args:
        source: yields samples, or anything else.
        positions: ``stop``, or ``start, stop`` and perhaps ``step``, as for ``itertools.islice``. ``stop`` may be
            ``None``, for no end.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper(range(10)).slice_samples(3)), list(IterableWrapper(range(10)).slice_samples(1, 8, 3))
        ([0, 1, 2], [1, 4, 7])
    """

    def __init__(self, source: IterDataPipe[Any], *positions: int | None) -> None:
        super().__init__()
        self.source = source
        self._start, self._stop, self._step = parse_slice(positions)

    def __iter__(self) -> Iterator[Any]:
        passed, address = self._begin_counting(), position_reader_of(self.source)
        yield from slice_samples(self.source, self._start, self._stop, self._step, passed=passed, address=address)


@register_stage("non_empty")
class NonEmptyChecker(CountingStage[Any]):
    """Raise an error at the end if there was nothing (functional name: ``non_empty``).

    A worker that gets no shard, as there are more workers than shards, ends at once, and that is no error: the others
    have the data. So this stage belongs before ``.sharding_filter()``, where it sees the shards of all, or into a
    pipeline without workers. Behind the split, it makes an error of each worker without a shard.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields anything.

    Raises:
        EmptySourceError: there was nothing.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([3, 4]).non_empty())
        [3, 4]
    """

    def __init__(self, source: IterDataPipe[Any]) -> None:
        super().__init__()
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        passed, address = self._begin_counting(), position_reader_of(self.source)
        yield from non_empty(self.source, upstream=self._upstream, passed=passed, address=address)

    def _upstream(self) -> str:
        """Name the stages before this one, the nearest last."""
        names: list[str] = []
        stage: Any = self.source
        while isinstance(stage, IterDataPipe) and len(names) < 20:
            names.insert(0, type(stage).__name__)
            stage = next((value for value in vars(stage).values() if isinstance(value, IterDataPipe)), None)
        return ", ".join(names) or "its source"
