"""Exit message: how a worker process was killed or ended while its data was still needed, and what to do."""

from __future__ import annotations

import signal
from multiprocessing.process import BaseProcess

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
