"""The stage ``.map_samples()``: apply a function to each sample."""

from __future__ import annotations

from typing import Any

from wds_datapipes.arguments import check_callable
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Function, map_samples


class SampleMapper(FunctionStage[Any]):
    """Apply a function to whole samples (functional name: ``map_samples``).

    It differs from torch's ``.map()`` in three ways: a sample is skipped if the function returns None; an error names
    the sample's key and shard, and ``on_error`` can skip it; and if the function takes a sample and returns a dict, the
    dict keeps the sample's ``__key__``, ``__url__``, ``__local_path__`` and ``__padding__``, unless it has its own.

    Yields:
        Any: the results of the function.

    Args:
        source: yields samples, or anything else.
        function: called with each item.
        on_error: ``"raise"``, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler; all but the first skip the
            item.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": 3}, {"__key__": "b", "cls": 4}])
        >>> list(samples.map_samples(lambda sample: {"odd": True} if sample["cls"] % 2 else None))
        [{'__key__': 'a', 'odd': True}]
    """

    draws_globally = True
    function = staticmethod(map_samples)

    def __init__(self, source: IterDataPipe[Any], function: Function, *, on_error: OnError = "raise") -> None:
        check_callable("map_samples applies a function to each sample", function)
        super().__init__(source, function=function, on_error=on_error)
