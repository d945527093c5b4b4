"""The stage ``.rsample()``: keep samples at random."""

from __future__ import annotations

from random import Random
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.instance import instance_of
from wds_datapipes.pipes.stage import CountingStage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import rsample
from wds_datapipes.seeds import derived_seed


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
        instance = instance_of(self)
        self._rng.seed(derived_seed("rsample", self.take_seed(), instance.rank, instance.worker))

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        return {**super().function_options(), "rng": self._rng}
