"""The message about a worker process that ended unexpectedly."""

from __future__ import annotations

import signal
from multiprocessing.process import BaseProcess

__all__ = ["obituary"]

#: What the signals that end workers in practice mean for the person who reads the message.
_ADVICE = {
    "SIGKILL": "The kernel does this when memory runs out: see `dmesg`, and use fewer workers or smaller buffers.",
    "SIGBUS": "A full /dev/shm does this: enlarge it (docker: --shm-size), or use fewer workers or smaller batches.",
    **dict.fromkeys(
        ("SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV"),
        "Native code crashed: run with PYTHONFAULTHANDLER=1, or without workers, to see where.",
    ),
}


def obituary(name: str, process: BaseProcess) -> str:
    """Say how a process ended that was still needed, and what to do about it."""
    code = process.exitcode
    if code is not None and code < 0:
        try:
            cause = signal.Signals(-code).name
        except ValueError:
            cause = "unknown"
        how = f"was killed by signal {-code} ({cause})"
        advice = _ADVICE.get(cause, "Something outside this program sent it.")
    elif code is None:
        how = "ended in a way that nobody knows"
        advice = "Something else in this program waits for its child processes, or ignores SIGCHLD."
    else:
        how = f"ended with exit code {code}"
        advice = "Its own traceback, if there is one, is on standard error; code that it runs must not call exit()."
    return f"{name} (pid {process.pid}) {how} while its data was still needed. {advice}"
