"""Functions that draw, and draw the same again for the same sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.on_error.policy import OnError, check_on_error
from wds_datapipes.pipes.sharding import place_of
from wds_datapipes.pipes.stage import OpaqueValue, Stage, register_stage
from wds_datapipes.pipes.state.graph import as_stage, position_reader_of, upstream
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import map_samples_with_rng

__all__ = ["RngSampleMapper"]

#: Stages of torch and torchdata that may yield one shard more than once.
REPEATING = ("CyclerIterDataPipe", "RepeaterIterDataPipe", "SamplerIterDataPipe")


@register_stage("map_samples_with_rng")
class RngSampleMapper(SeededStage, Stage[Any]):
    """Apply a function that draws to each sample (functional name: ``map_samples_with_rng``).

    The function gets a sample and a ``random.Random``, whose numbers follow from the seed of the loader, the epoch, and
    the sample's ``__url__`` and ``__key__``. So what is drawn for a sample is the same whichever process makes it, in
    whatever order, and also when a state is loaded. Where shards may come more than once, as from
    ``.resample_wds_shards()``, and for what is no sample, they follow from rank, worker and the place in the stream
    instead, so that each copy draws for itself.

    The generator is used again for the next sample: do not keep it. Seed another one from it where a library needs its
    own::

        def augment(sample, rng):
            noise = np.random.default_rng(rng.getrandbits(64)).normal(size=3)
            generator = torch.Generator().manual_seed(rng.getrandbits(63))
            torch.manual_seed(rng.getrandbits(63))  # for what draws from torch's own, such as torchvision's transforms
            ...

    Place it before ``.with_epoch()``: within one epoch behind it, a sample that comes again draws the same.

    Yields:
        Any: what the function returns; nothing for ``None``. A dict keeps ``__key__``, ``__url__`` and
        ``__local_path__`` of its sample, unless it has its own.

    Args:
        source: yields samples, or anything else.
        function: gets an item and a ``random.Random``.
        on_error: ``"raise"``; or, to pass over the sample, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

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
    #: All workers and ranks get one seed, though the data is split before.
    shares_seed = True

    def __init__(
        self, source: IterDataPipe[Any], function: Callable[[Any, Random], Any], *, on_error: OnError = "raise"
    ) -> None:
        super().__init__()
        check_on_error(on_error)
        if not callable(function):
            raise TypeError(
                f"map_samples_with_rng applies a function of a sample and a generator, and {function!r} is none"
            )
        self.source = source
        self.on_error = on_error
        self._function = OpaqueValue(function)
        self._own_seed = 0

    def reset(self) -> None:
        """Begin an epoch, with the seed that was set for it or one from torch's generator."""
        self._own_seed = self.take_seed()

    def __iter__(self) -> Iterator[Any]:
        place = place_of(self)
        yield from map_samples_with_rng(
            self.source,
            self._function.value,
            seed=self._own_seed,
            place=(place.rank, place.worker),
            repeats=any(map(_repeats, upstream(self.source))),
            address=position_reader_of(self.source),
            on_error=self.on_error,
        )


def _repeats(stage: Any) -> bool:
    return as_stage(stage).repeats_shards or type(stage).__name__ in REPEATING
