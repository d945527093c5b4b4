"""Where a pipeline was behind each of its items, and which of them the loop has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.recording import Record, state_behind, unpack_records
from wds_datapipes.reading.resuming import Resumed

__all__ = ["Trail"]

#: So many pieces may be kept beyond those that the next state needs: to look for them takes time.
SPARE = 32


class _Piece(NamedTuple):
    """Some records in a row.

    Attributes:
        first: behind how many items of the epoch the first of them is.
        is_whole: whether the first one stands for itself.
        records: the records, or the pickle of them.
    """

    first: int
    is_whole: bool
    records: Sequence[Record] | bytes


class Trail:
    """Keeps the records of one worker's epoch, from the last one that stands for itself before what the loop has.

    Attributes:
        delivered: how many items the loop has.
    """

    def __init__(self) -> None:
        self.begin(Resumed(None))

    def begin(self, base: Resumed) -> None:
        """Begin an epoch.

        Args:
            base: where the pipeline begins.
        """
        self.delivered = 0
        self._base = base
        self._recorded = 0
        self._pieces: deque[_Piece] = deque()

    @property
    def is_begun(self) -> bool:
        """Whether there are records."""
        return bool(self._pieces)

    def add(self, records: Sequence[Record] | bytes, count: int, *, is_whole: bool) -> None:
        """Add the records of the items that come next.

        Args:
            records: one for each item; or the pickle of them.
            count: how many items; with 0, the one record says where the pipeline is behind the items before.
            is_whole: whether the first record stands for itself.
        """
        self._pieces.append(_Piece(self._recorded + min(count, 1), is_whole, records))
        self._recorded += count

    def deliver(self) -> None:
        """Take note that the loop has the next item."""
        self.delivered += 1
        if len(self._pieces) > SPARE and self.delivered % SPARE == 0:
            self._forget()

    def state(self) -> Resumed:
        """Return where the pipeline was behind the last item that the loop has.

        Raises:
            StateError: the pipeline has no state.
        """
        records: list[Record] = []
        for piece in [*self._pieces]:  # another thread may add some
            if piece.first > self.delivered:
                break
            if piece.is_whole:
                records.clear()
            found = unpack_records(piece.records) if isinstance(piece.records, bytes) else piece.records
            records += found[: self.delivered - piece.first + 1]
        if not records:
            return self._base
        if records[-1].refusal:
            raise StateError(records[-1].refusal)
        whole = max(number for number, record in enumerate(records) if record.is_whole)
        return Resumed(state_behind(records[whole:]))

    def _forget(self) -> None:
        """Forget the records that no state will need."""
        pieces = [*self._pieces]
        needed = max(
            (n for n, piece in enumerate(pieces) if piece.is_whole and piece.first <= self.delivered), default=0
        )
        for _ in range(needed):
            self._pieces.popleft()
