"""The stage that maps samples with reproducible random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.graph import upstream
from wds_datapipes.pipes.sharding import find_rank_and_worker
from wds_datapipes.pipes.stage import OpaqueValue, Stage, as_stage, position_reader_of, register_stage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import SampleSeeds, map_samples_with_rng

__all__ = ["RngSampleMapper", "seeds_of_samples"]

#: Stages of torch and torchdata that may yield one shard more than once.
REPEATING = ("CyclerIterDataPipe", "RepeaterIterDataPipe", "SamplerIterDataPipe")


@register_stage("map_samples_with_rng")
class RngSampleMapper(SeededStage, Stage[Any]):
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

    def __init__(
        self, source: IterDataPipe[Any], function: Callable[[Any, Random], Any], *, on_error: OnError = "raise"
    ) -> None:
        super().__init__()
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
        repeats=any(map(_repeats, upstream(stage.source))),
        position=position_reader_of(stage.source),
    )


def _repeats(stage: Any) -> bool:
    return as_stage(stage).repeats_shards or type(stage).__name__ in REPEATING
