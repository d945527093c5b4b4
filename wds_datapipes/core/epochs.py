"""A stream that is cut into epochs, and goes on where the last one ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from wds_datapipes.errors import EmptySource

__all__ = ["Stream"]

T = TypeVar("T")

#: Streams of the process that this one is a fork of. Their files and commands are still in use there, so they are
#: neither read nor closed here.
_INHERITED: list[Iterator[Any]] = []


class Stream(Generic[T]):
    """A source that is read pass after pass, and kept open between the epochs.

    A copy of it, as in another process, begins at the beginning.

    Attributes:
        given: how many items it has yielded in this epoch.
        passes: how many passes have begun.
    """

    def __init__(self) -> None:
        self._items: Iterator[T] | None = None
        self._owner_pid = 0
        self.passes = 0
        self.given = 0

    def __reduce__(self) -> tuple[type[Stream[T]], tuple[()]]:
        return type(self), ()

    @property
    def is_begun(self) -> bool:
        """Whether a pass has begun in this process."""
        return self._owner_pid == os.getpid() and self.passes > 0

    @property
    def is_open(self) -> bool:
        """Whether a pass is not known to have ended."""
        return self.is_begun and self._items is not None

    def go_on(self, items: Iterator[T] | None, passes: int, given: int) -> None:
        """Go on with a pass, or behind it, and in the middle of an epoch."""
        self._items, self._owner_pid, self.passes, self.given = items, os.getpid(), passes, given

    def take(self, count: int, *, begin: Callable[[int], Iterator[T]], has_no_share: Callable[[], bool]) -> Iterator[T]:
        """Yield items until it were ``count`` in this epoch.

        Args:
            count: how many, over as many passes as it takes.
            begin: begins a pass, of which it is given the number, from 0.
            has_no_share: whether nothing was dealt to this instance. It is asked after a pass without an item, and if
                so, there are no items at all.

        Raises:
            EmptySource: a pass had no item, though there was something for this instance.
        """
        if self._owner_pid != os.getpid():
            if self._items is not None:
                _INHERITED.append(self._items)
            self._items, self._owner_pid, self.passes = None, os.getpid(), 0
        is_new = False
        while self.given < count:
            if self._items is None:
                self._items = begin(self.passes)
                self.passes += 1
                is_new = True
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None
                if not is_new:
                    continue
                if has_no_share():
                    return
                raise EmptySource(
                    f"with_epoch has to yield {count - self.given} more items, and its source has ended without any. "
                    "Are its shards empty, or does a stage before it drop all that they hold?"
                ) from None
            except BaseException:
                self._items = None  # it has ended; the next epoch begins another pass
                raise
            is_new = False
            self.given += 1
            yield item
            del item  # so that it is not kept alive between two epochs
