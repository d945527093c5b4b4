"""A shared page on which a worker publishes what it is doing, readable when it hangs or has died."""

from __future__ import annotations

import os

from wds_datapipes.loading.transport.shared_memory import map_segment, new_memory

__all__ = ["StatusPage"]

#: Where the text begins, behind the numbers and its length.
_TEXT_AT = 64
SIZE = 4096


class StatusPage:
    """What one process writes and another reads, without either waiting for the other.

    A number is never read half written. The text may be, by a reader who comes in the very moment it changes.

    Args:
        descriptor: the page, if it is another process's; it is used up.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = new_memory(SIZE) if descriptor is None else descriptor
        page = map_segment(self._descriptor, SIZE).data
        # Not `struct.pack_into`, which clears the place first: these are written and read as a whole, one by one.
        self._counts = page[:16].cast("Q")  # items and bytes
        self._seconds = page[16:32].cast("d")  # spent making items, and waiting for the other side to take them
        self._length = page[32:40].cast("Q")
        self._fetched, self._fetching = page[40:48].cast("Q"), page[48:56].cast("d")  # bytes of stores, and the wait
        self._text = page[_TEXT_AT:]
        if descriptor is not None:
            os.close(descriptor)

    def pass_on(self) -> int:
        """Return the descriptor for the other process; whoever gets it closes it."""
        return self._descriptor

    def write(self, items: int, size: int, making_s: float, waiting_s: float) -> None:
        """Publish the numbers."""
        self._counts[0], self._counts[1] = items, size
        self._seconds[0], self._seconds[1] = making_s, waiting_s

    def fetch(self, size: int, waited_s: float) -> None:
        """Publish how much has come from stores, and how many seconds they were waited for."""
        self._fetched[0], self._fetching[0] = size, waited_s

    def fetched(self) -> tuple[int, float]:
        """Return what `fetch` got last."""
        return self._fetched[0], self._fetching[0]

    def read(self) -> tuple[int, int, float, float]:
        """Return the numbers that `write` got last."""
        return self._counts[0], self._counts[1], self._seconds[0], self._seconds[1]

    @property
    def text(self) -> str:
        """What the process is at, such as the shard that it opened last."""
        return bytes(self._text[: self._length[0]]).decode(errors="replace")

    def note(self, text: str) -> None:
        """Publish what the process is at."""
        data = text.encode(errors="replace")[: len(self._text)]
        self._length[0] = 0
        self._text[: len(data)] = data
        self._length[0] = len(data)
