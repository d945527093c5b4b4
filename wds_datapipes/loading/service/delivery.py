"""Counting the items that the loop received, if a stage of the main process takes items ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import IterDataPipe

from wds_datapipes.pipes.stage import Stage

__all__ = ["AheadOfLoop", "DeliveredCount"]


class AheadOfLoop(Protocol):
    """Where items come from."""

    ahead: deque[Any] | None
    is_over: bool

    def deliver(self, mark: Any) -> None:
        """Take note that the loop gets an item, which was marked when it was taken."""


class DeliveredCount(Stage[Any]):
    """Tells the supplier of the items which of them the loop gets, behind stages that take them ahead, one for one."""

    def __init__(self, source: IterDataPipe[Any], supplier: AheadOfLoop) -> None:
        self.source = source
        self._supplier = supplier
        supplier.ahead = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            if self._supplier.ahead:
                self._supplier.deliver(self._supplier.ahead.popleft())
            yield item
        self._supplier.is_over = True

    def is_replicable(self) -> bool:
        """Return False: there is one, in the main process."""
        return False
