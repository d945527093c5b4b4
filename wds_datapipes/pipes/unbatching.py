"""From batches back to single samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.stage import register_stage
from wds_datapipes.pipes.state.derived_items import ExpandingStage
from wds_datapipes.samples.batching import take_lists_apart, unbatch_samples

__all__ = ["SampleUnbatcher"]


@register_stage("unbatch_samples")
class SampleUnbatcher(ExpandingStage):
    """Take collated batches apart into samples (functional name: ``unbatch_samples``).

    It undoes what torch's ``.collate()`` does. A batch is a dict, a tuple or a list of columns, or a column itself. A
    column is a tensor, an array or a list, whose first dimension is that of the samples; or a dict or a tuple of
    columns again. A list inside of a batch is one column; torch makes such lists also of tuples in samples, and then
    ``nested_lists=True`` is needed.

    With ``collated=False``, a batch is a list of samples, as ``.batch()`` makes it, or as a function has made it that
    cuts one sample into several::

        pipe = pipe.map(patches).unbatch_samples(collated=False).shuffle_samples(1000)

    A state of the pipeline has where the samples of the batch are, and how many of it were yielded; behind a shuffle,
    where those of all batches are of which a sample waits.

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
        collated: the batch is made of columns. If not, it is a list, a tuple or another iterable of samples, and these
            are yielded as they are.

    Raises:
        ValueError: the columns of a batch have different lengths.
        TypeError: a batch holds what is no column; or, with ``collated=False``, it is no list.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> batches = IterableWrapper([{"__key__": ["a", "b"], "cls": [3, 4]}])
        >>> list(batches.unbatch_samples())
        [{'__key__': 'a', 'cls': 3}, {'__key__': 'b', 'cls': 4}]
    """

    def __init__(
        self, source: IterDataPipe[Any], *, nested_lists: bool = False, copy: bool = False, collated: bool = True
    ) -> None:
        super().__init__(source)
        if not collated and (nested_lists or copy):
            raise ValueError(
                "unbatch_samples takes nested_lists and copy for batches that are made of columns, and not with "
                "collated=False"
            )
        self.nested_lists = nested_lists
        self.copy = copy
        self.collated = collated

    def __iter__(self) -> Iterator[Any]:
        columns = partial(unbatch_samples, nested_lists=self.nested_lists, copy=self.copy)
        yield from self._taken_apart(columns if self.collated else take_lists_apart)
