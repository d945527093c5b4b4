"""Shutting down worker processes: ask, wait, terminate, kill."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

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


#: The usual causes of the signals that end workers, and remedies.
_ADVICE = {
    "SIGKILL": "The kernel does this when memory runs out: see `dmesg`, and use fewer workers or smaller buffers.",
    "SIGBUS": "A full /dev/shm does this: enlarge it (docker: --shm-size), or use fewer workers or smaller batches.",
    **dict.fromkeys(
        ("SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV"),
        "Native code crashed: run with PYTHONFAULTHANDLER=1, or without workers, to see where.",
    ),
}


def describe_exit(name: str, process: BaseProcess) -> str:
    """Describe how a process that was still needed has ended, and suggest a remedy."""
    code = process.exitcode
    if code is not None and code < 0:
        try:
            cause = signal.Signals(-code).name
        except ValueError:
            cause = "unknown"
        how = f"was killed by signal {-code} ({cause})"
        advice = _ADVICE.get(cause, "Something outside this program sent it.")
    elif code is None:
        how = "ended with an unknown exit code"
        advice = "Other code in this program waits for child processes, or ignores SIGCHLD."
    else:
        how = f"ended with exit code {code}"
        advice = "Its own traceback, if any, is on standard error; code that it runs must not call exit()."
    return f"{name} (pid {process.pid}) {how} while its data was still needed. {advice}"
