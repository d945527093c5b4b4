"""Stages that count the samples they read: subsets, logs, and a check for empty sources."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from random import Random
from typing import Any

from wds_datapipes.arguments import check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.sharding import find_process, find_rank_and_worker
from wds_datapipes.pipes.stage import CountingStage, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sample_log import LogTarget, log_samples
from wds_datapipes.samples.sampling import non_empty, parse_slice, rsample, slice_samples
from wds_datapipes.seeds import derived_seed


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
        """Return the arguments of the function for the iteration that begins."""
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
        logger: a ``logging.Logger``, which gets records of the level INFO; or ``"stderr"`` or ``"stdout"``. By default
            the logger ``wds_datapipes``, which shows nothing until the program configures logging, for example by
            ``logging.basicConfig(level="INFO")``.
        positions: a folder for a log of the positions of all samples, from which `explain` and ``wds-datapipes steps``
            know those of each step of a stream. It has 8 bytes for each sample, in a file for each epoch and worker;
            the ranks may share it. Needs a loader that counts epochs, and belongs right before ``.batch()``.
        name: the prefix of the records.
        width: the maximum number of characters to show of a value.

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
    place_in_run: tuple[int, int, int] | None = None

    def __init__(
        self,
        source: IterDataPipe[Any],
        *,
        first: int = 3,
        every: int | None = None,
        logger: LogTarget | None = None,
        positions: str | os.PathLike[str] | None = None,
        name: str = "log_samples",
        width: int = 60,
    ) -> None:
        check_integer("first", first, 0)
        check_optional_integer("every", every, 1)
        check_integer("width", width, 1)
        target = logging.getLogger("wds_datapipes") if logger is None else logger
        if not isinstance(target, logging.Logger) and target not in ("stdout", "stderr"):
            raise TypeError(f'logger must be a logging.Logger, "stderr" or "stdout", not {logger!r}')
        super().__init__(source, target=target, first=first, every=every, name=name, width=width)
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
            path = path / f"{place[2]:016x}" / f"{place[1]:06}-{rank}of{ranks}-{worker}of{workers}.positions"
        return {**options, "rank": rank, "worker": worker, "positions": path}
