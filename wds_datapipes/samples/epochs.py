"""Split a stream into epochs, each of which continues where the previous one ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from wds_datapipes.errors import EmptySourceError, plural

T = TypeVar("T")

#: The number of consecutive passes without an item after which an error is raised. A single such pass may be chance,
#: because a stage may keep only a few random samples.
EMPTY_PASSES = 10

logger = logging.getLogger("wds_datapipes")

#: Streams inherited from the parent process of a fork. They are neither read nor closed here, because the parent still
#: uses their files and commands.
_INHERITED: list[Iterator[Any]] = []


class Stream(Generic[T]):
    """A source that is read repeatedly and kept open between epochs.

    A copy, such as one in another process, starts from the beginning.

    Attributes:
        given: the number of items yielded in this epoch.
        passes: the number of passes started.
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
        """Whether a pass was started in this process."""
        return self._owner_pid == os.getpid() and self.passes > 0

    @property
    def is_open(self) -> bool:
        """Whether a pass has started and is not known to have ended."""
        return self.is_begun and self._items is not None

    def resume_from(self, items: Iterator[T] | None, passes: int, given: int) -> None:
        """Resume in or after a pass, and within an epoch."""
        self._items, self._owner_pid, self.passes, self.given = items, os.getpid(), passes, given

    def take(
        self,
        count: int,
        *,
        begin: Callable[[int], Iterator[T]],
        has_no_shards: Callable[[], bool],
        rotation_period: Callable[[], int],
    ) -> Iterator[T]:
        """Yield items until this epoch has yielded ``count``.

        Args:
            count: the number of items, over as many passes as necessary.
            begin: starts a pass; called with its number, from 0.
            has_no_shards: called after a pass without an item; if it returns True, this instance never gets a shard,
                and iteration ends.
            rotation_period: returns the number of passes in which this instance reads all of the source.

        Raises:
            EmptySourceError: the whole source was read `EMPTY_PASSES` times without an item.
        """
        if self._owner_pid != os.getpid():
            if self._items is not None:
                _INHERITED.append(self._items)
            self._items, self._owner_pid, self.passes = None, os.getpid(), 0
        is_new, empty = False, 0
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
                if has_no_shards():
                    return
                empty += 1
                if empty == rotation_period():
                    logger.warning(
                        "with_epoch has read its whole source, which yielded no items. Reading it up to %d more times",
                        EMPTY_PASSES - 1,
                    )
                if empty >= EMPTY_PASSES * rotation_period():
                    raise EmptySourceError(
                        f"with_epoch needs {plural(count - self.given, 'more item')}, but its source yielded "
                        f"none in {empty} consecutive passes. Are its shards empty, or are all samples dropped?"
                    ) from None
                continue
            except BaseException:
                self._items = None  # the pass has ended; the next epoch starts another one
                raise
            is_new, empty = False, 0
            self.given += 1
            yield item
            del item  # free it between two epochs
