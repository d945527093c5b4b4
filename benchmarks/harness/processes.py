"""Processes of their own for measurements, and the CPU time and memory of processes, as Linux reports them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = ["TICKS_PER_S", "Cost", "cost_of", "cpu_seconds", "descendants", "in_child", "in_use", "memory"]

T = TypeVar("T")

PROC = Path("/proc")
#: The resolution of CPU times.
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """What an action takes.

    Attributes:
        seconds: the time by the clock.
        cpu_s: the CPU time of this process, in seconds.
        bytes: the most memory that this process gains meanwhile.
    """

    seconds: float
    cpu_s: float
    bytes: int


def cost_of(action: Callable[[], Any]) -> Cost:
    """Return the cost of an action; what it returns is kept until all is measured."""
    PROC.joinpath("self/clear_refs").write_text("5", encoding="ascii")  # the peak is from now on
    before, begin, cpu = in_use(), time.perf_counter(), time.process_time()
    kept = action()
    elapsed, spent = time.perf_counter() - begin, time.process_time() - cpu
    gained = _status("VmHWM") - before
    del kept
    return Cost(elapsed, spent, gained)


def in_use() -> int:
    """Return the memory of this process in bytes."""
    return _status("VmRSS")


def _status(name: str) -> int:
    status = PROC.joinpath("self/status").read_text(encoding="ascii")
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


def in_child(function: Callable[..., T], *arguments: Any, timeout_s: float | None = None) -> T:
    """Call a function in a forked process, which inherits all imports and may start others, and return its result.

    At the end, the process is killed with all that it has started.

    Raises:
        TimeoutError: the function has not returned in time.
        RuntimeError: the process ended without a result.
    """
    answers, answering = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(answering, function, arguments))
    process.start()
    answering.close()
    try:
        if not answers.poll(timeout_s):
            raise TimeoutError(f"{function.__name__} has not returned within {timeout_s} s")
        result, error = answers.recv()
    except EOFError:
        raise RuntimeError(f"the process of {function.__name__}{arguments} ended without a result") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        answers.close()
    if error is not None:
        raise error
    found: T = result
    return found


def _answer(answering: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    try:
        answering.send((function(*arguments), None))
    except Exception as error:  # noqa: BLE001 - it is raised in the process that asked
        traceback.print_exc()
        answering.send((None, error))
    signal.pause()  # until it is killed with what it has started


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


def memory(*pids: int, kind: str = "Pss") -> int:
    """Return the memory of processes in bytes; what several processes share is divided between them (PSS)."""
    total = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            text = (PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii")
            total += 1024 * int(text.split(f"{kind}:")[1].split()[0])
    return total
