"""The end of worker processes: with their main process, even by SIGKILL, or when it asks, terminates and kills them."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import IO, Any

from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.system import POLLIN, new_poll

#: How long a process may take to exit on its own, in seconds. The item that it is producing is discarded.
GRACE_S = 0.4

#: How long SIGTERM may take to end a process, in seconds.
TERMINATE_S = 1.0

#: How long SIGKILL may take, in seconds, because a busy machine takes a while to free the memory of a process.
KILL_S = 60.0

#: Replaces an unknown exit code.
UNKNOWN = 255


def end_processes(processes: Iterable[BaseProcess]) -> None:
    """Wait for processes that were asked to end; after `GRACE_S`, terminate the others, and finally kill them."""
    running = [process for process in processes if is_running(process)]
    deadline = time.monotonic() + GRACE_S
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running], left)
        running = [process for process in running if is_running(process)]
    for end, limit_s in ((BaseProcess.terminate, TERMINATE_S), (BaseProcess.kill, KILL_S)):
        for process in running:
            end(process)
        deadline = time.monotonic() + limit_s
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [process for process in running if is_running(process)]


def is_running(process: BaseProcess) -> bool:
    """Whether a process has not ended yet."""
    if process.is_alive() and wait([process.sentinel], 0):
        # It is about to end; or it has ended, but cannot be waited for because the program ignores SIGCHLD.
        try:
            os.kill(process.pid or 0, 0)
        except ProcessLookupError:
            return False
    return process.is_alive()


def disown_process(process: BaseProcess) -> None:
    """Keep multiprocessing from terminating a process that the caller manages.

    After ``os.fork``, multiprocessing treats the parent's processes as children of the fork, and terminates them when
    the fork exits.
    """
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # not public


def close_process(process: BaseProcess) -> None:
    """Free the descriptors of a process that has ended, even if its exit code is unknown."""
    with suppress(ValueError):  # it is already closed, or not even SIGKILL has ended it yet
        if not is_running(process) and (popen := process._popen) is not None:  # type: ignore[attr-defined]  # not public
            # Another thread has received its exit code but not stored it yet; or the program ignores SIGCHLD.
            popen.returncode = UNKNOWN if popen.returncode is None else popen.returncode
        process.close()


#: All watches of this process. Forks inherit the write ends, so a fork hook must find and close them.
_watches: weakref.WeakSet[ParentWatch] = weakref.WeakSet()

#: Signals that a scheduler or a closing terminal sends to a program together with its workers.
FOR_THE_PROGRAM: list[signal.Signals] = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]


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
    poll = new_poll()
    poll.register(descriptor, POLLIN)
    poll.poll()
    os._exit(1)


def _close_writers() -> None:
    for watch in list(_watches):
        watch.close_writer()


# The program may call os.fork() directly, so only a hook sees every fork.
at_fork("workers", after_in_child=_close_writers)
