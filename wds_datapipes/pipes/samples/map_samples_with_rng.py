"""The stage ``.map_samples_with_rng()``: apply a function that draws random numbers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from wds_datapipes.arguments import check_callable
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.samples.seeded_samples import SeedingStage
from wds_datapipes.samples.sampling import map_samples_with_rng


class RngSampleMapper(SeedingStage[Any]):
    """Apply a function with a seeded random generator to each sample (functional name: ``map_samples_with_rng``).

    The function receives a sample and a ``random.Random`` whose seed derives from the loader's seed, the epoch, and the
    sample's ``__url__`` and ``__key__``. The random numbers of a sample therefore do not depend on the process, the
    order, or whether the run was resumed. If shards may occur more than once, as with ``.resample_wds_shards()``, or if
    items are not samples, the seed derives from rank, worker and position instead, so that each copy gets its own
    numbers.

    The generator is reused for the next sample: do not store it. Seed the generators of other libraries from it::

        def augment(sample, rng):
            noise = np.random.default_rng(rng.getrandbits(64)).normal(size=3)
            generator = torch.Generator().manual_seed(rng.getrandbits(63))
            torch.manual_seed(rng.getrandbits(63))  # torch's global generator, for torchvision's transforms
            ...

    Put this stage before ``.with_epoch()``, because after it, a sample that is repeated within an epoch gets the same
    numbers.

    Yields:
        Any: the results of the function, except ``None``. A dict keeps the ``__key__``, ``__url__``, ``__local_path__``
            and ``__padding__`` of its sample, unless it has its own.

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

    draws_globally = True
    function = staticmethod(map_samples_with_rng)
    seeded_by = "map_samples_with_rng"

    def __init__(
        self, source: IterDataPipe[Any], function: Callable[[Any, Random], Any], *, on_error: OnError = "raise"
    ) -> None:
        check_callable("map_samples_with_rng applies a function of a sample and a generator", function)
        super().__init__(source, function=function, on_error=on_error)
