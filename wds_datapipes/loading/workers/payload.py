"""Objects of the user's, passed to a process when it is started."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

from wds_datapipes.loading.transport.shared_memory import new_memory

__all__ = ["Payload"]


class Payload:
    """Carries an object to a process, which opens it where it can tell of an error.

    A forked process simply has the object. To a spawned one, it goes through shared memory: ``Process.start`` writes
    what it passes on to a pipe, which holds 64 KiB and has both of its ends open here. If the process ended before it
    has read all of it, as one does whose main module cannot be imported, that would wait for ever.

    Args:
        contents: the object.
    """

    def __init__(self, contents: Any) -> None:
        self._contents = contents
        self._descriptor: int | None = None

    def open(self) -> Any:
        """Return the object.

        Raises:
            Exception: whatever unpickling raises.
        """
        return self._contents

    def close(self) -> None:
        """Give back the descriptor, once the process has its own."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __reduce__(self) -> tuple[Callable[..., Payload], tuple[Any]]:
        data = ForkingPickler.dumps(self._contents)
        self.close()
        self._descriptor = new_memory(len(data))
        with os.fdopen(self._descriptor, "r+b", closefd=False) as file:
            file.write(data)
        return _Arrived, (DupFd(self._descriptor),)


class _Arrived(Payload):
    """A parcel in the process that it was sent to."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(None)
        with os.fdopen(descriptor.detach(), "rb") as file:
            file.seek(0)  # the sender has moved on
            self._data = file.read()

    def open(self) -> Any:
        return pickle.loads(self._data)  # noqa: S301  the sender is a part of this program
