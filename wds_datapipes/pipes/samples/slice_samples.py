"""The stage ``.slice_samples()``: keep a slice of the samples."""

from __future__ import annotations

from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.stage import CountingStage
from wds_datapipes.samples.sampling import parse_slice, slice_samples


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
