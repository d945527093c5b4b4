"""The epochs of a run as its loop received them: in full, or up to the step at which it left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from typing import NamedTuple, TypeAlias

Left: TypeAlias = "tuple[int, int] | None"
"""The number of steps that a loop received of an epoch, and of those whose samples are known; None for all."""
Rows: TypeAlias = "Sequence[Sequence[int]]"
"""Consecutive epochs that were left alike: the first epoch, the number of epochs, and, unless whole, a `Left`."""

#: The loop left an epoch after an unknown number of steps.
UNKNOWN: Left = (-1, 0)


class ReceivedEpochs(NamedTuple):
    """The epochs that a loop has begun, in this order; the last one may still continue.

    A state contains the rows, one for a run that received all epochs in full, and at most two more for each epoch that
    was left early.

    Args:
        rows: the rows.

    Examples:
        >>> epochs = ReceivedEpochs().begin(0).begin(1).leave((3, 3)).begin(2).leave((3, 3)).begin(3)
        >>> epochs.rows
        ((0, 1), (1, 2, 3, 3), (3, 1))
        >>> [next(each) for each in [epochs.visits()] * 5]
        [(0, None), (1, (3, 3)), (2, (3, 3)), (3, None), (4, None)]
    """

    rows: Rows = ()

    @classmethod
    def of(cls, rows: Rows) -> ReceivedEpochs:
        """Return the record with some rows of a state."""
        return cls(tuple(map(tuple, rows)))

    def begin(self, epoch: int) -> ReceivedEpochs:
        """Return the record after the loop has begun an epoch."""
        return self._with(epoch, ())

    def leave(self, left: Left) -> ReceivedEpochs:
        """Return the record after the loop has left the last epoch, again or for the first time."""
        if left is None or not self.rows:
            return self
        *before, (first, epochs, *known) = self.rows
        rest = [(first, epochs - 1, *known)] if epochs > 1 else []
        return ReceivedEpochs((*before, *rest))._with(first + epochs - 1, left)

    def _with(self, epoch: int, left: tuple[int, ...]) -> ReceivedEpochs:
        *before, (first, epochs, *known) = self.rows or [(-1, 0)]
        if tuple(known) == left and first + epochs == epoch and epochs:
            return ReceivedEpochs((*before, (first, epochs + 1, *left)))
        return ReceivedEpochs((*self.rows, (epoch, 1, *left)))

    @property
    def follows(self) -> bool:
        """Whether the epochs follow each other, apart from those without a received step."""
        rows = [row for row in self.rows if row[2:3] != (0,)]
        return all(first + epochs == following for (first, epochs, *_), (following, *_) in pairwise(rows))

    @property
    def rises(self) -> bool:
        """Whether no epoch has begun twice."""
        return all(first + epochs <= following for (first, epochs, *_), (following, *_) in pairwise(self.rows))

    def stretches(self) -> Iterator[tuple[int, int | None, Left]]:
        """Yield the rows of a whole run: epochs before the first one count as received in full, and so do later ones.

        Yields:
            The first epoch, the number of epochs, None for the last stretch, and how each was left.
        """
        rows = [*self.rows] or [(0, 1)]
        if rows[0][0]:
            rows = [(0, rows[0][0]), *rows]
        for first, epochs, *left in rows[:-1]:
            yield first, epochs, (left[0], left[1]) if left else None
        first, epochs, *left = rows[-1]
        if left:
            yield first, epochs, (left[0], left[1])
            first += epochs
        yield first, None, None

    def visits(self) -> Iterator[tuple[int, Left]]:
        """Yield each epoch of a whole run, without end, and how it was left."""
        return chain.from_iterable(
            ((epoch, left) for epoch in (count(first) if epochs is None else range(first, first + epochs)))
            for first, epochs, left in self.stretches()
        )


def received_by_all(records: Sequence[ReceivedEpochs]) -> ReceivedEpochs:
    """Return the record of several loops; if they differ, it says that the steps are unknown."""
    first, *others = records
    if all(each == first for each in others):
        return first
    return ReceivedEpochs().begin(first.rows[0][0]).leave(UNKNOWN).begin(first.rows[-1][0] + first.rows[-1][1] - 1)


#: The record of a run that has not begun.
NONE_RECEIVED = ReceivedEpochs()
