"""The stage ``.compose()``: apply a function to the whole stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wds_datapipes.arguments import check_callable
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.roles import Buffer
from wds_datapipes.pipes.stage import EngineStage, OpaqueValue


class StreamComposer(Buffer, EngineStage[Any]):
    """Apply a function to the whole stream of items (functional name: ``compose``).

    This turns a generator function of an iterator into a stage: it may yield several items for one, skip items, or
    combine adjacent ones. It is called once per epoch, and closed if the epoch is abandoned.

    A pipeline with this stage resumes by replay, because the function may store earlier items.

    Yields:
        Any: the items of the last function.

    Args:
        source: yields anything.
        through: functions from an iterator to an iterable, each applied to the items of the previous one; use
            ``functools.partial`` to pass arguments.

    Raises:
        TypeError: an argument is not a function, or does not return an iterable.

    Examples:
        >>> def pairs(numbers):
        ...     for number in numbers:
        ...         yield number
        ...         yield -number
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([1, 2]).compose(pairs))
        [1, -1, 2, -2]
    """

    draws_globally = True

    def __init__(self, source: IterDataPipe[Any], *through: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        if not through:
            raise TypeError("compose needs a function from an iterator to an iterator, as in compose(patches)")
        for function in through:
            check_callable("compose takes functions from an iterator to an iterator", function)
        self.source = source
        self._through = OpaqueValue(through)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.source)
        for function in self._through.value:
            items = function(stream)
            try:
                stream = iter(items)
            except TypeError:
                raise TypeError(f"compose: {function!r} must return an iterable, but returned {items!r}") from None
        yield from stream
