"""Runs faults in a process each, and reports the result of each, and what it leaves behind.

This is a script, which runs the faults whose names it reads, and prints their results as JSON. Its argument is the
limit of each in seconds: one that does not return in time is a "hang".
"""

from __future__ import annotations

import gc
import json
import os
import select
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil
from fault_table import Cause, all_faults
from faulty_pipelines import build_shards, describe_error
from main_programs import END_S, Become, has_own_shm

#: The number of faults that run at a time; most of them wait.
TOGETHER = 5


def run(causes: Mapping[str, Cause], limit_s: float) -> dict[str, dict[str, Any]]:
    """Run the causes of faults, several at a time.

    Returns:
        For each fault, its ``outcome``, what is ``left`` of it, its standard error (``noise``), and its duration in
        seconds.
    """
    selector = selectors.DefaultSelector()
    waiting = list(causes.items())
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


if __name__ == "__main__":
    main_program = None
    try:
        build_shards()
        has_own_shm("1m")  # files of other programs there are no concern of a fault
        faults = all_faults()
        print(json.dumps(run({name: faults[name].cause for name in json.load(sys.stdin)}, float(sys.argv[1]))))
    except Become as become:
        main_program = become.main
    if main_program is not None:
        main_program()
