"""Runs faults of `fault_table` in a process each, and reports the result of each, and what it leaves behind.

One that does not return in time is a "hang".
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

#: The number of faults that run at a time; most of them wait.
TOGETHER = 5

#: The time limit for a main program to exit, and for its workers after it, in seconds.
END_S = 120.0

Cause = Callable[[], object]
#: A main program. It calls its argument when the test may act on it.
Main = Callable[[Callable[[], object]], object]


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def run(faults: Mapping[str, Cause], limit_s: float) -> dict[str, dict[str, Any]]:
    """Run the causes of faults, several at a time.

    Returns:
        For each fault, its ``outcome``, what is ``left`` of it, its standard error (``noise``), and its duration in
        seconds.
    """
    selector = selectors.DefaultSelector()
    waiting = list(faults.items())
    gc.freeze()  # skip collecting imported modules at the end of each process, which takes a second
    results: dict[str, dict[str, Any]] = {}
    while waiting or selector.get_map():
        while waiting and len(selector.get_map()) < TOGETHER:
            name, cause = waiting.pop(0)
            pid, reader, errors = start(cause)
            selector.register(reader, selectors.EVENT_READ, (name, pid, errors, time.monotonic(), bytearray()))
        selector.select(0.5)
        for key in list(selector.get_map().values()):
            name, pid, errors, begin, answer = key.data
            is_over = time.monotonic() - begin > limit_s
            if not is_over:
                if not select.select([key.fd], [], [], 0)[0]:
                    continue
                if data := os.read(key.fd, 1 << 20):
                    answer += data
                    continue
            selector.unregister(key.fd)
            os.close(key.fd)
            results[name] = {
                **({"outcome": "hang", "left": []} if is_over or not answer else json.loads(answer)),
                "noise": ending(pid, errors),
                "took_s": round(time.monotonic() - begin, 2),
            }
    return results


def start(cause: Cause) -> tuple[int, int, Any]:
    """Run a fault in its own process and group; return its pid, the pipe for its result, and its standard error."""
    reader, writer = os.pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the cause has ended
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.close(reader)
        os.dup2(errors.fileno(), 2)
        answer = json.dumps(result_of(cause)).encode()
        while answer:
            answer = answer[os.write(writer, answer) :]
        os._exit(0)
    os.close(writer)
    return pid, reader, errors


def ending(pid: int, errors: Any) -> str:
    """End all remaining processes of a fault, and return its standard error."""
    # A main program has its own group, and would keep the runner's output open, so its reader would wait.
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with errors:
        errors.seek(0)
        noise: bytes = errors.read(100_000)
    return noise.decode(errors="replace")


def result_of(cause: Cause) -> dict[str, Any]:
    """Run a fault; return its result or error, and the resources that it leaves behind."""
    before = surroundings()
    try:
        outcome = str(cause())
    except Exception as error:
        outcome = describe_error(error)
    if len(outcome) > 20_000:
        outcome = f"{outcome[:10_000]} ... {outcome[-10_000:]}"
    after = surroundings()
    deadline = time.monotonic() + END_S
    while after["files"] - before["files"] and time.monotonic() < deadline:
        time.sleep(0.1)  # other processes also create and remove files there
        after["files"] = set(os.listdir("/dev/shm"))
    left = [f"{kind}: {sorted(map(str, after[kind] - before[kind]))}" for kind in after if after[kind] - before[kind]]
    return {"outcome": outcome, "left": left}


def surroundings() -> dict[str, set[Any]]:
    """Return the resources of this process except this thread: children, threads, descriptors and shared memory."""
    # A thread without pending work is not joined, so it may still be exiting.
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in others:
        thread.join(60)
    # multiprocessing's own processes, started once per program.
    tracker, server = vars(resource_tracker._resource_tracker), vars(forkserver._forkserver)
    own_pids = {tracker["_pid"], server["_forkserver_pid"]}
    own_descriptors = {tracker["_fd"], server["_forkserver_alive_fd"]}
    descriptors = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in own_descriptors:
            with suppress(OSError):  # the descriptor of the listing itself
                descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    return {
        "processes": {child.pid for child in psutil.Process().children()} - own_pids,
        "threads": {thread for thread in others if thread.is_alive()},
        "descriptors": set(descriptors.items()),
        "files": set(os.listdir("/dev/shm")),
    }


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
