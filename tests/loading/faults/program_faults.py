"""Faults of the main program: however it ends, its workers end with it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as executors
from functools import partial
from typing import Any

from fault_table import fault
from faulty_pipelines import BUSY, TOPS, Act, acting, await_busy, await_wait, in_thread, loader, plain, read, take
from main_programs import Main, in_another_main

KEPT: list[Any] = []


def leaving(how: str, act: Act, top: str, ready: Any) -> None:
    """Run a main program that exits while a worker is busy."""
    dl = loader(acting(act), top=top)
    items = iter(dl)
    next(items)
    await_busy()
    ready()
    if how == "with a loader in a module":
        KEPT.extend((dl, items))
    elif how == "in a loop":
        for _ in items:
            sys.exit(6)
    elif how == "with an error":
        KEPT.extend((dl, items))
        raise LookupError("the loop fails")
    elif how == "with sys.exit":
        KEPT.extend((dl, items))
        sys.exit(6)
    elif how == "with a thread that reads":
        KEPT.append(dl)
        threading.Thread(target=take, args=(dl, 2, items), daemon=True).start()
        await_wait(is_main=False)
    elif how == "after multiprocessing":
        KEPT.extend((dl, items))
        # A program that creates a temporary folder before it imports multiprocessing calls this function first.
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # typeshed has left it out


def reading(act: Act, top: str, ready: Any) -> None:
    """Run a main program that waits for a worker."""
    with loader(acting(act), top=top) as dl:
        items = iter(dl)
        next(items)
        in_thread(await_wait, ready)
        list(items)


def idling(top: str, ready: Any) -> None:
    """Run a main program that does something else."""
    with loader(plain(), top=top) as dl:
        next(iter(dl))
        ready()
        time.sleep(600)


@fault("outlived by an executor", says="ended with 0, 0 left", noise="60; end\n")
def outlived_by_an_executor() -> str:
    """Run a main program whose main thread exits before a thread that reads."""
    return in_another_main(outlived)


def outlived(ready: Any) -> None:
    ready()

    def read_all() -> None:
        while not executors._shutdown:  # until the main thread has ended
            time.sleep(0.01)
        print(read(plain()), file=sys.stderr)

    ThreadPoolExecutor(1).submit(read_all)


def signalled(number: int, whom: str, main: Main) -> str:
    act = {"main": os.kill, "group": os.killpg}[whom]
    return in_another_main(main, lambda pid: act(pid, number))


#: What the program prints when it ends, by the way in which it does; and nothing else.
FAILS = r"Traceback (?:(?!Traceback).)*\nLookupError: the loop fails\n"
INTERRUPTED = r"Traceback (?:(?!Traceback).)*\nKeyboardInterrupt\n"
#: How a program ends, and its exit code.
HOWS = {
    "with a loader in a module": 0,
    "with a local loader": 0,
    "in a loop": 6,
    "with an error": 1,
    "with sys.exit": 6,
    "with a thread that reads": 0,
    "after multiprocessing": 0,
}
SIGNALLED = [*itertools.product((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), ("main", "group"))]
MAIN_TURNS = itertools.cycle(itertools.product(BUSY, TOPS))

for (how, code), (busy, top) in zip(HOWS.items(), MAIN_TURNS, strict=False):
    fault(
        f"exit {how}, {busy}, {top}", says=f"ended with {code}, 0 left", noise=FAILS if how == "with an error" else ""
    )(partial(in_another_main, partial(leaving, how, BUSY[busy], top)))
for (number, whom), (busy, top) in zip(SIGNALLED, MAIN_TURNS, strict=False):
    fault(
        f"{number.name} of {whom}, {busy}, {top}",
        says=f"ended with -{number.value}, 0 left",
        noise=INTERRUPTED if number == signal.SIGINT else "",
    )(partial(signalled, number, whom, partial(reading, BUSY[busy], top)))
for (number, whom), top in zip(SIGNALLED[::2], TOPS, strict=True):
    fault(
        f"{number.name} of {whom}, idle, {top}",
        says=f"ended with -{number.value}, 0 left",
        noise=INTERRUPTED if number == signal.SIGINT else "",
    )(partial(signalled, number, whom, partial(idling, top)))
