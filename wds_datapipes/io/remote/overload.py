"""Overload: how many requests a store serves at the same time, learned from those that it refuses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from wds_datapipes.io.remote.retry import status_of

#: HTTP statuses by which a store refuses a request because it gets too many.
REFUSALS = {429, 503}
#: After this many answers, a reader may have one more request in flight.
ANSWERS = 16


class StoreLimit:
    """How many requests a reader may have in flight: half as many after a refusal, and slowly more after answers."""

    def __init__(self) -> None:
        self._most, self._wanted, self._halved_at = math.inf, 1, -math.inf

    def allow(self, wanted: int) -> int:
        """Return how many requests a reader may have in flight, at most the wanted number and at least one."""
        self._wanted = wanted
        return int(min(wanted, self._most))

    @contextmanager
    def watch(self, sent_at: float) -> Iterator[None]:
        """Learn from the answer to a request, which raises an error in the context if the store refuses it.

        Args:
            sent_at: when the request was sent, by `time.perf_counter`. Those sent before the last halving do not count.
        """
        try:
            yield
        except Exception as error:
            if status_of(error) in REFUSALS and sent_at > self._halved_at:
                self._halved_at = time.perf_counter()
                self._most = max(min(self._most, self._wanted) // 2, 1)
            raise
        self._most += 1 / ANSWERS
