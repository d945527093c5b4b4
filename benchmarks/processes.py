"""The CPU time and the memory of this process and all processes below it, on Linux."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["TICKS_PER_S", "cpu_seconds", "descendants", "memory"]

PROC = Path("/proc")
#: The resolution of CPU times.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants() -> list[int]:
    """Return the IDs of all processes below this one."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        for path in PROC.glob(f"{pid}/task/*/children"):
            try:
                children = [int(text) for text in path.read_text(encoding="ascii").split()]
            except OSError:  # the thread has ended
                continue
            found += children
            waiting += children
    return found


def cpu_seconds() -> float:
    """Return the CPU time of this process and those below it, including processes that have ended."""
    total = 0
    for pid in (os.getpid(), *descendants()):
        try:
            text = (PROC / str(pid) / "stat").read_text(encoding="utf-8")
        except OSError:
            continue
        # After the name in parentheses; its own time in user and system mode, and that of children that have ended.
        total += sum(int(field) for field in text.rpartition(")")[2].split()[11:15])
    return total / TICKS_PER_S


def memory(pid: int) -> int:
    """Return the memory of a process in bytes; what several processes share is divided between them (PSS)."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return 1024 * int(text.split("Pss:")[1].split()[0])
