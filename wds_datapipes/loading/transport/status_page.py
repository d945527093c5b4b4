"""The status of a process, on a page of shared memory that others read while it is busy."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from wds_datapipes.loading.transport.shared_memory import map_segment, new_memory


class Work(NamedTuple):
    """What a process has done since it started.

    Attributes:
        items: the number of items that it has produced.
        bytes: the size of the items that it has sent, in bytes.
        making_s: the time that producing them took, in seconds.
        waiting_s: the time that it has waited for the process that receives them, in seconds.
    """

    items: float = 0
    bytes: float = 0
    making_s: float = 0.0
    waiting_s: float = 0.0


#: A status page: the numbers of `Work`, figures with names of up to 96 bytes, and a text.
PAGE = np.dtype(
    [("work", "f8", len(Work._fields)), ("figures", [("name", "S96"), ("amount", "f8")], 64), ("text", "S4000")]
)


class StatusPage:
    """The status of a process, which it writes and another process reads without any synchronization.

    A number is always read whole, but the text may be torn if it is read while it changes. Figures are numbers with
    names; a page has room for 64 of them, and further ones are not published.

    Args:
        descriptor: the page of another process; it is closed here. By default, a new page is created.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        #: The descriptor to pass to the other process, which closes it.
        self.descriptor = new_memory(PAGE.itemsize) if descriptor is None else descriptor
        self._page = map_segment(self.descriptor, PAGE.itemsize).view(PAGE)[0]
        self._work, self._figures = self._page["work"], self._page["figures"]
        if descriptor is not None:
            os.close(descriptor)

    def write(self, work: Work, figures: Mapping[str, float]) -> None:
        """Publish what the process has done, and figures, which keep their order."""
        self._work[:] = work
        for place, (name, amount) in enumerate(itertools.islice(figures.items(), len(self._figures))):
            self._figures[place] = name.encode(errors="replace"), amount

    def read(self) -> tuple[Work, Counter[str]]:
        """Return what the process has done, and the figures, as written last."""
        figures = {name.decode(errors="replace"): amount for name, amount in self._figures.tolist() if name}
        return Work(*self._work.tolist()), Counter(figures)

    @property
    def text(self) -> str:
        """A text, such as the name of the last opened shard."""
        return bytes(self._page["text"]).decode(errors="replace")

    def note(self, text: str) -> None:
        """Publish a text."""
        self._page["text"] = text.encode(errors="replace")
