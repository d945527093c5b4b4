"""The stage ``.non_empty()``: raise an error if there are no samples."""

from __future__ import annotations

from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.stage import CountingStage
from wds_datapipes.samples.sampling import non_empty


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
