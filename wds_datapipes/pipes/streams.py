"""Whole streams, handed to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.registration import Hidden, register_stage

__all__ = ["StreamComposer"]

Stream = Callable[[Iterator[Any]], Iterable[Any]]


@register_stage("compose")
class StreamComposer(IterDataPipe[Any]):
    """Hand the whole stream of items to a function (functional name: ``compose``).

    A generator function that takes an iterator is all that a stage of one's own needs: it may yield several items for
    one, leave some out, or look at neighbours. It is called anew in each epoch, and where it is broken off, it is
    closed.

    Yields:
        Any: what the functions yield.

    Args:
        source: yields anything.
        through: functions from an iterator to an iterable, each applied to what the one before yields; with arguments,
            as ``functools.partial``.

    Raises:
        TypeError: one of them is no function, or returns nothing that can be iterated over.

    Examples:
        >>> def pairs(numbers):
        ...     for number in numbers:
        ...         yield number
        ...         yield -number
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper([1, 2]).compose(pairs))
        [1, -1, 2, -2]
    """

    _is_child_datapipe = False

    def __init__(self, source: IterDataPipe[Any], *through: Stream) -> None:
        super().__init__()
        if not through:
            raise TypeError("compose needs a function from an iterator to an iterator, as in compose(patches)")
        for function in through:
            if not callable(function):
                raise TypeError(f"compose takes functions from an iterator to an iterator, not {function!r}")
        self.source = source
        self._through = Hidden(through)

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.source)
        for function in self._through.value:
            items = function(stream)
            try:
                stream = iter(items)
            except TypeError:
                raise TypeError(
                    f"compose: {function!r} has to return an iterable, and has returned {items!r}"
                ) from None
        yield from stream
