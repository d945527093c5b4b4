"""From batches back to single samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.core.batches import unbatch_samples
from wds_datapipes.pipes.registration import register_stage

__all__ = ["SampleUnbatcher"]


@register_stage("unbatch_samples")
class SampleUnbatcher(IterDataPipe[Any]):
    """Take collated batches apart into samples (functional name: ``unbatch_samples``).

    It undoes what torch's ``.collate()`` does. A batch is a dict, a tuple or a list of columns, or a column itself. A
    column is a tensor, an array or a list, whose first dimension is that of the samples; or a dict or a tuple of
    columns again. A list inside of a batch is one column; torch makes such lists also of tuples in samples, and then
    ``nested_lists=True`` is needed.

    Behind a loader, it mixes the samples of all workers again, in the main process::

        loader = DataLoader(pipe.batch(64).collate(), batch_size=None, num_workers=8)
        mixed = IterableWrapper(loader, deepcopy=False).unbatch_samples().shuffle_samples(1000).batch(64).collate()

    Yields:
        Any: samples of the batch's kind: a dict for a dict, a tuple for a tuple. Numbers in a tensor are tensors
        without a dimension.

    Args:
        source: yields batches.
        nested_lists: a list inside of a batch is a group of columns, not one column, unless it holds nothing that could
            be a column, such as strings.
        copy: give each sample memory of its own. By default it is a view of its batch, whose memory is free only when
            the last of its samples is. Behind a shuffle, that is several times of what the samples need.

    Raises:
        ValueError: the columns of a batch have different lengths.
        TypeError: a batch holds what is no column.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> batches = IterableWrapper([{"__key__": ["a", "b"], "cls": [3, 4]}])
        >>> list(batches.unbatch_samples())
        [{'__key__': 'a', 'cls': 3}, {'__key__': 'b', 'cls': 4}]
    """

    _is_child_datapipe = False

    def __init__(self, source: IterDataPipe[Any], *, nested_lists: bool = False, copy: bool = False) -> None:
        super().__init__()
        self.source = source
        self.nested_lists = nested_lists
        self.copy = copy

    def __iter__(self) -> Iterator[Any]:
        yield from unbatch_samples(self.source, nested_lists=self.nested_lists, copy=self.copy)
