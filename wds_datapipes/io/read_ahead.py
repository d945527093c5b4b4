"""Read-ahead: what is begun before it is due, in order and within a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """A queue of items whose reading has begun, with a limit of their total size.

    >>> ahead = ReadAhead[str](10, least=2)
    >>> for name, size in (("a", 7), ("b", 30), ("c", 1)):
    ...     while not ahead.has_room(size):
    ...         print(ahead.take())
    ...     ahead.add(name, size)
    a
    >>> [*ahead], ahead.size
    (['b', 'c'], 31)

    Args:
        most: the maximum total size: of bytes, or of items if each has the size 1.
        least: the number of items that may be begun, whatever their sizes.

    Attributes:
        size: the total size.
    """

    def __init__(self, most: int, *, least: int = 0) -> None:
        self._most, self._least, self.size = most, least, 0
        self._begun = deque[tuple[T, int]]()

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._begun)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._begun)

    def has_room(self, size: int = 1) -> bool:
        """Whether an item of some size may be begun now; otherwise, take one first."""
        return len(self._begun) < self._least or not self._begun or self.size + size <= self._most

    def add(self, item: T, size: int = 1) -> None:
        """Append an item that has begun."""
        self._begun.append((item, size))
        self.size += size

    def take(self) -> T:
        """Remove the first item, which is due, and return it."""
        item, size = self._begun.popleft()
        self.size -= size
        return item
