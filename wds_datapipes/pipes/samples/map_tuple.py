"""The stage ``.map_tuple()``: apply functions to the elements of tuples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wds_datapipes.arguments import check_callable
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.pipes.stage import FunctionStage
from wds_datapipes.samples.fields import Function, map_tuple


class TupleMapper(FunctionStage[tuple[Any, ...]]):
    """Apply functions to the elements of tuples by position (functional name: ``map_tuple``).

    Yields:
        tuple: a new tuple for each tuple or list.

    Args:
        source: yields tuples or lists.
        by_position: one function for each element, starting with the first; ``None`` leaves the element unchanged.
        on_error: ``"raise"``; or, to skip the tuple, ``"warn"``, ``"skip"``, an `ErrorBudget` or a handler.

    Raises:
        ValueError: there are more functions than elements.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([("a", 1)]).map_tuple(str.upper, None))
        [('A', 1)]
    """

    is_one_to_one = True
    draws_globally = True
    function = staticmethod(map_tuple)

    def __init__(
        self, source: IterDataPipe[Sequence[Any]], *by_position: Function | None, on_error: OnError = "raise"
    ) -> None:
        for function in by_position:
            if function is not None:
                check_callable("map_tuple applies functions, or None to leave an element unchanged", function)
        super().__init__(source, functions=by_position, on_error=on_error)
