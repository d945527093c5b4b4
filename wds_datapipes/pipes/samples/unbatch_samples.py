"""The stage ``.unbatch_samples()``: split batches into samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.roles import Buffer
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.samples.batching import unbatch_samples


class SampleUnbatcher(Buffer, EngineStage[Any]):
    """Split collated batches into samples (functional name: ``unbatch_samples``).

    This is the inverse of torch's ``.collate()``. A batch is a dict, a tuple or a list of columns, or a single column.
    A column is a tensor, an array or a list whose first dimension is the batch, so a list or a tuple inside a batch is
    a single column.

    torch's ``.unbatch()`` splits lists of samples, as from ``.batch()`` or from a function that splits a sample into
    several. A pipeline with either stage resumes by replay.

    After a loader, use it to shuffle the samples of all workers in the main process; see `LoaderBatches`.

    Yields:
        Any: samples of the same type as the batch, such as dicts or tuples. Numbers in a tensor become tensors without
            dimensions. Values are views of the batch, whose memory is released with its last sample.

    Args:
        source: yields batches.

    Raises:
        ValueError: the columns of a batch have different lengths.
        TypeError: a batch contains a value that is not a column.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> batches = IterableWrapper([{"__key__": ["a", "b"], "cls": [3, 4]}])
        >>> list(batches.unbatch_samples())
        [{'__key__': 'a', 'cls': 3}, {'__key__': 'b', 'cls': 4}]
    """

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from unbatch_samples(self.source)
