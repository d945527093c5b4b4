"""Ending the workers when their main process ends, even by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import IO, Any

__all__ = ["ParentWatch"]

_lifelines: weakref.WeakSet[ParentWatch] = weakref.WeakSet()
_current = threading.local()


class ParentWatch:
    """A pipe that only the process which makes it keeps open for writing.

    The workers hold its other end. multiprocessing has such a pipe for each worker, too, but every process that the
    program forks later inherits that, and may outlive the program. This one is closed in forked processes. Neither does
    it matter which process is the parent of a worker: with ``"forkserver"``, it is not the main process.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._reader: IO[bytes] = open(reader, "rb", buffering=0)  # noqa: PTH123, SIM115  `close` closes it
        self._writer: IO[bytes] | None = open(writer, "wb", buffering=0)  # noqa: PTH123, SIM115  the same
        _lifelines.add(self)

    def close(self) -> None:
        """Close both ends, which ends the workers that have not ended yet."""
        self.close_writer()
        self._reader.close()

    def close_writer(self) -> None:
        """Close the end that only the main process keeps."""
        if self._writer is not None:
            self._writer.close()

    def hold(self) -> None:
        """Have this process, which is a worker, end when the main process does."""
        descriptor = self._reader.fileno()
        _die_with(descriptor)
        threading.Thread(target=_end_with, args=(descriptor,), name="main-watch", daemon=True).start()

    def __reduce__(self) -> tuple[Callable[[Any], ParentWatch], tuple[Any]]:
        return _unpickle_watch, (DupFd(self._reader.fileno()),)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Let `current` return this lifeline, in this thread and in processes that it forks."""
        _current.lifeline = self
        try:
            yield
        finally:
            del _current.lifeline

    @staticmethod
    def current() -> ParentWatch:
        """Return the lifeline of the workers that this thread starts; by default, one that lasts as long as it does."""
        lifeline: ParentWatch | None = getattr(_current, "lifeline", None)
        if lifeline is None:
            lifeline = _current.lifeline = ParentWatch()
        return lifeline


def _unpickle_watch(descriptor: Any) -> ParentWatch:
    """Return the lifeline in a process that was not forked from the main process."""
    lifeline = ParentWatch.__new__(ParentWatch)
    lifeline._reader, lifeline._writer = open(descriptor.detach(), "rb", buffering=0), None  # noqa: PTH123, SIM115
    return lifeline


def _die_with(descriptor: int) -> None:
    """Have Linux kill this process when the pipe is closed, for no thread sees that while C code holds the GIL."""
    import fcntl  # there is none on Windows

    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):  # without /proc
            # Of a pipe that is opened again, this process alone is told. The descriptor stays open until its end.
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)


def _end_with(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os._exit(1)


def _close_writers() -> None:
    for lifeline in list(_lifelines):
        lifeline.close_writer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_writers)
