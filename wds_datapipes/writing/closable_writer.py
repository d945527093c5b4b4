"""Writers that were not closed: their data is discarded with a warning, also when the program ends."""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from weakref import WeakSet

from wds_datapipes.user_warnings import warn_user


class ClosableWriter(ABC):
    """A writer that loses data unless it is closed. It calls `expect_close` once it is open."""

    #: True until there is something to close, because ``__del__`` also runs if ``__init__`` fails.
    _closed = True
    _owner = -1

    def expect_close(self) -> None:
        """Warn from now on if the writer is not closed."""
        self._owner, self._closed = os.getpid(), False
        OPEN.add(self)

    @abstractmethod
    def discard(self) -> None:
        """Close the writer and remove what is not finished."""

    @abstractmethod
    def describe_loss(self) -> str:
        """Describe what `discard` removes; "" if that is nothing."""

    def abandon(self) -> None:
        """Discard the writer, unless it is closed, and warn about the loss."""
        if self._closed or os.getpid() != self._owner:  # a forked process has a copy of the writer
            return
        loss = self.describe_loss()
        self.discard()  # first, because the warning may be raised as an error
        if loss:
            reason = "because the writer was not closed. Use it in a with statement, or call close()"
            warn_user(f"{loss} discarded, {reason}")

    def __del__(self) -> None:
        self.abandon()


#: The writers of this process that are not closed.
OPEN: WeakSet[ClosableWriter] = WeakSet()


@atexit.register
def abandon_all() -> None:
    """Discard all writers before modules are torn down, since then neither files nor warnings can be relied on."""
    for writer in [*OPEN]:
        writer.abandon()
