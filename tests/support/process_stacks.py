"""The stacks of the processes that a test has started, which show what it is waiting for."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import psutil

#: The time limit for a process to write its stacks, in seconds.
DUMP_S = 5.0

_file = TemporaryFile(buffering=0)  # noqa: SIM115  open as long as this process and its forks run


def record_stacks() -> None:
    """Make this process and its forks write their stacks on SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, _file)


def children_since(since_s: float) -> list[psutil.Process]:
    """Return the descendants of this process that started after a time, given in seconds since boot."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with suppress(FileNotFoundError):
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
            if (int(ticks) + 1) / os.sysconf("SC_CLK_TCK") >= since_s:
                found.append(process)
    return found


def runs(process: psutil.Process) -> bool:
    """Whether a process is running; an orphan may remain as a zombie until init reaps it."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def stacks_of(processes: Iterable[psutil.Process]) -> str:
    """Return the command line of each process, and the stacks of its threads if it is a fork of this one."""
    start = _size()
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            what = f"{process.pid}, child of {process.ppid()}, {process.status()}: {process.cmdline()}"
            _file.write(f"\nProcess {what}\n".encode())
            before, last, deadline = _size(), 0, time.monotonic() + DUMP_S
            if _writes_stacks(process):
                process.send_signal(signal.SIGUSR2)
                while not before < last == _size() and time.monotonic() < deadline and _writes_stacks(process):
                    last = _size()
                    time.sleep(0.1)
    return os.pread(_file.fileno(), _size() - start, start).decode(errors="replace")


def _writes_stacks(process: psutil.Process) -> bool:
    """Whether a process handles the signal, which would otherwise kill it."""
    handled = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return process.status() != psutil.STATUS_ZOMBIE and bool(
        handled and int(handled[1], 16) >> (signal.SIGUSR2 - 1) & 1
    )


def _size() -> int:
    return os.fstat(_file.fileno()).st_size
