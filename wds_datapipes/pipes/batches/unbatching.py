"""The stage that splits batches into samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.stage import EngineStage, register_stage
from wds_datapipes.samples.batching import split_lists, unbatch_samples


@register_stage("unbatch_samples")
class SampleUnbatcher(EngineStage[Any]):
    """Split collated batches into samples (functional name: ``unbatch_samples``).

    It is the inverse of torch's ``.collate()``. A batch is a dict, a tuple or a list of columns, or a single column. A
    column is a tensor, an array or a list whose first dimension is the batch; or a nested dict or tuple of columns. A
    list inside a batch is one column; torch also collates tuples in samples to such lists, which needs
    ``nested_lists=True``.

    With ``collated=False``, a batch is a list of samples, as from ``.batch()``, or from a function that splits a sample
    into several::

        pipe = pipe.map(patches).unbatch_samples(collated=False).shuffle_samples(1000)

    A pipeline with this stage resumes by replay.

    After a loader, use it to shuffle the samples of all workers in the main process::

        loader = DataLoader(pipe.batch(64).collate(), batch_size=None, num_workers=8)
        mixed = IterableWrapper(loader, deepcopy=False).unbatch_samples().shuffle_samples(1000).batch(64).collate()

    Yields:
        Any: samples of the same type as the batch: a dict for a dict, a tuple for a tuple. Numbers in a tensor become
        tensors without dimensions.

    Args:
        source: yields batches.
        nested_lists: treat a list inside a batch as a group of columns instead of one column, unless its elements
            cannot be columns, such as strings.
        copy: copy the values of each sample. By default they are views of the batch, whose memory is released with its
            last sample. With a shuffle after it, that takes several times the memory of the samples.
        collated: the batch consists of columns; otherwise it is a list, a tuple or another iterable of samples, which
            are yielded unchanged.

    Raises:
        ValueError: the columns of a batch have different lengths.
        TypeError: a batch contains a value that is not a column; or, with ``collated=False``, is not iterable.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> batches = IterableWrapper([{"__key__": ["a", "b"], "cls": [3, 4]}])
        >>> list(batches.unbatch_samples())
        [{'__key__': 'a', 'cls': 3}, {'__key__': 'b', 'cls': 4}]
    """

    holds_items = True

    def __init__(
        self, source: IterDataPipe[Any], *, nested_lists: bool = False, copy: bool = False, collated: bool = True
    ) -> None:
        if not collated and (nested_lists or copy):
            raise ValueError(
                "unbatch_samples accepts nested_lists and copy only for collated batches, not with collated=False"
            )
        self.source = source
        self.nested_lists = nested_lists
        self.copy = copy
        self.collated = collated

    def __iter__(self) -> Iterator[Any]:
        if self.collated:
            yield from unbatch_samples(self.source, nested_lists=self.nested_lists, copy=self.copy)
        else:
            yield from split_lists(self.source)
