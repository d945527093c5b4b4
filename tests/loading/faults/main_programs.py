"""Runs functions as main programs of their own."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil

#: The time limit for a main program to exit, and for its workers after it, in seconds.
END_S = 120.0

#: A main program. It calls its argument when the test may act on it.
Main = Callable[[Callable[[], object]], object]


class Become(BaseException):
    """Raised in a forked process that must run a function as a main program, and end as one.

    The script catches it at its top level, because an interpreter ends with its script.
    """

    def __init__(self, main: Callable[[], object]) -> None:
        self.main = main


def in_another_main(main: Main, act: Callable[[int], object] | None = None) -> str:
    """Run a main program in its own group; act on it when it is ready; return how it exits and what it leaves."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.close(reader)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        raise Become(partial(main, partial(os.write, writer, b"!")))
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    if act is not None:
        act(pid)
    if has_ended(pid, END_S):
        outcome = f"ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"
        deadline = time.monotonic() + END_S
        while (left := group(pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        outcome, left = "does not end", group(pid)
    for process in left:
        process.kill()
    return f"{outcome}, {len(left)} left"


def has_ended(pid: int, limit_s: float) -> bool:
    """Wait for a process."""
    descriptor = os.pidfd_open(pid)
    has_ended = bool(select.select([descriptor], [], [], limit_s)[0])
    os.close(descriptor)
    return has_ended


def group(number: int) -> list[psutil.Process]:
    """Return the running processes of a group."""
    running = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def has_own_shm(size: str) -> bool:
    """Mount a private ``/dev/shm`` for this process and its children; return whether that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private = 0x20000, 0x10000000, (1 << 18) | (1 << 14)
    if libc.unshare(new_mounts) and libc.unshare(new_user | new_mounts):
        return False
    libc.mount(b"none", b"/", None, private, None)
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode())
