"""Part share: what one of several readers holds of the parts that a process may fetch ahead for all of them."""

from __future__ import annotations

from contextlib import suppress


class CommonParts:
    """The parts that the readers of a process hold together, besides one for each.

    Args:
        count: the maximum number of parts.

    Attributes:
        free: an item for each part that is left; the operations of lists need no lock, which a fork might leave held.
        unused: the memory of blocks that were read, for reuse by all of them.
    """

    def __init__(self, count: int) -> None:
        self.free = [True] * count
        self.unused: list[bytearray] = []


class PartShare:
    """The parts that a reader holds: one of its own, and some of the common ones.

    Args:
        common: the common ones.
    """

    def __init__(self, common: CommonParts) -> None:
        self.common = common
        self._held: list[bool] = []

    def hold(self, count: int) -> bool:
        """Try to hold ``count`` parts, and release any beyond that; return whether it holds ``count`` parts.

        >>> common = CommonParts(2)
        >>> one, other = PartShare(common), PartShare(common)
        >>> one.hold(3), other.hold(1), other.hold(2), one.hold(2), other.hold(2)
        (True, True, False, True, True)
        """
        with suppress(IndexError):  # other readers hold the rest
            while len(self._held) < count - 1:
                self._held.append(self.common.free.pop())
        while len(self._held) > max(count - 1, 0):
            self.common.free.append(self._held.pop())
        return len(self._held) >= count - 1

    def end(self) -> None:
        """Give all parts back, and free the unused memory."""
        self.hold(0)
        self.common.unused.clear()
