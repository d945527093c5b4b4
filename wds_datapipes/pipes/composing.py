"""Whole streams, handed to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.stage import OpaqueValue, register_stage
from wds_datapipes.pipes.state.derived_items import ExpandingStage

__all__ = ["StreamComposer"]

Stream = Callable[[Iterator[Any]], Iterable[Any]]


@register_stage("compose")
class StreamComposer(ExpandingStage):
    """Hand the whole stream of items to a function (functional name: ``compose``).

    A generator function that takes an iterator is all that a stage of one's own needs: it may yield several items for
    one, leave some out, or look at neighbours. It is called anew in each epoch, and where it is broken off, it is
    closed.

    Nobody can see what a function keeps of earlier items. So a loader can save its place in the stream only where you
    say, by ``each_alone``, that it keeps nothing; `wds_datapipes.testing.check_resume` finds out whether that is so.

    Yields:
        Any: what the functions yield.

    Args:
        source: yields anything.
        through: functions from an iterator to an iterable, each applied to what the one before yields; with arguments,
            as ``functools.partial``.
        each_alone: what is yielded between taking one item and taking the next follows from the first of them alone,
            be it nothing, one item or several. Then the stage has a state.

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

    def __init__(self, source: IterDataPipe[Any], *through: Stream, each_alone: bool = False) -> None:
        super().__init__(source)
        if not through:
            raise TypeError("compose needs a function from an iterator to an iterator, as in compose(patches)")
        for function in through:
            if not callable(function):
                raise TypeError(f"compose takes functions from an iterator to an iterator, not {function!r}")
        self.each_alone = each_alone
        self._through = OpaqueValue(through)

    @property
    def has_state(self) -> bool:
        """Whether the functions keep nothing of earlier items."""
        return self.each_alone

    @property
    def is_expanding(self) -> bool:  # type: ignore[override]  # it depends on an argument
        """Whether the items that the functions yield are made again from the same samples to resume."""
        return self.each_alone

    def __iter__(self) -> Iterator[Any]:
        if self.each_alone:
            yield from self._taken_apart(self._composed)
        else:
            yield from self._composed(iter(self.source))

    def _composed(self, stream: Iterator[Any]) -> Iterator[Any]:
        for function in self._through.value:
            items = function(stream)
            try:
                stream = iter(items)
            except TypeError:
                raise TypeError(
                    f"compose: {function!r} has to return an iterable, and has returned {items!r}"
                ) from None
        return stream
