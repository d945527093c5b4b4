"""Termination of the workers when their main process ends, even by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import IO, Any

#: All watches of this process. Forks inherit the write ends, so a fork hook must find and close them.
_watches: weakref.WeakSet[ParentWatch] = weakref.WeakSet()

#: Signals that a scheduler or a closing terminal sends to a program together with its workers.
FOR_THE_PROGRAM = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ParentWatch:
    """A pipe whose write end stays open only in the process that created it.

    The workers hold the read end. multiprocessing has such a pipe for each worker, too, but every process that the
    program forks later inherits it and may outlive the program; this one is closed in forked processes. Nor does the
    watch depend on a worker's parent process, which is not the main process with ``"forkserver"``.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._reader: IO[bytes] = open(reader, "rb", buffering=0)  # noqa: PTH123, SIM115  `close` closes it
        self._writer: IO[bytes] | None = open(writer, "wb", buffering=0)  # noqa: PTH123, SIM115  the same
        _watches.add(self)

    def close(self) -> None:
        """Close both ends, which ends the remaining workers."""
        self.close_writer()
        self._reader.close()

    def close_writer(self) -> None:
        """Close the write end, which only the main process keeps open."""
        if self._writer is not None:
            self._writer.close()

    def hold(self) -> None:
        """End this worker process when the main process ends."""
        descriptor = self._reader.fileno()
        _die_with(descriptor)
        threading.Thread(target=_end_with, args=(descriptor,), name="main-watch", daemon=True).start()

    def __reduce__(self) -> tuple[Callable[[Any], ParentWatch], tuple[Any]]:
        return _unpickle_watch, (DupFd(self._reader.fileno()),)


def run_watched(watch: ParentWatch, run: Callable[..., None], *args: Any) -> None:
    """Run a worker that leaves Ctrl-C to the main process and ends when the main process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A forked worker must not run the program's signal handlers, such as one that saves its state.
    for number in FOR_THE_PROGRAM:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    watch.hold()
    run(*args)


def _unpickle_watch(descriptor: Any) -> ParentWatch:
    """Return the watch in a process that was not forked from the main process."""
    watch = ParentWatch.__new__(ParentWatch)
    watch._reader, watch._writer = open(descriptor.detach(), "rb", buffering=0), None  # noqa: PTH123, SIM115
    return watch


def _die_with(descriptor: int) -> None:
    """Ask Linux to kill this process when the pipe closes, because no thread can while C code holds the GIL."""
    import fcntl  # missing on Windows

    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):  # without /proc
            # Reopen the pipe, so that only this process is signaled. The descriptor stays open until the process ends.
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
    for watch in list(_watches):
        watch.close_writer()


if hasattr(os, "register_at_fork"):  # the program may call os.fork() directly, so only a hook sees every fork
    os.register_at_fork(after_in_child=_close_writers)
