"""Faults of a sample: what a worker does instead of yielding it, and what the loop gets."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from functools import partial
from typing import Any, NoReturn

import numpy as np
from fault_table import ITER, NUMBERS, died, fault, raised, signalled_to
from faulty_pipelines import Act, acting, nap, refuse

#: The worker that meets a fault in sample b5, and the number of its items before it, by the number of workers.
PLACES = {0: (0, 15), 1: (0, 15), 2: (1, 11), 3: (1, 16)}
#: Faults of samples meet these in turn.
TURNS = itertools.cycle([(2, 10, "bare"), (1, 0, "pinned"), (3, 10, "prefetched"), (2, 0, "bare"), (3, 10, "pinned")])


# errors

for turn in [(0, 10, "bare"), (2, 0, "bare"), (3, 10, "pinned"), (2, 10, "prefetched")]:
    worker, before = PLACES[turn[0]]
    error = raised("LookupError: Caught LookupError", worker, "in refuse\n.*LookupError: no such sample")
    fault(
        f"error, {turn[0]} workers, {turn[1]}, {turn[2]}",
        pipeline=acting(refuse),
        turn=turn,
        says=(
            rf"{before}; {error}__iter__ of Acting\(act=.*"
            if turn[0]
            else rf"{before}; LookupError: no such sample\n.*__iter__ of Acting\(.*"
        ),
    )


class TwoArguments(Exception):
    """An error that needs two arguments."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where)


class Stubborn(Exception):
    """An error whose class cannot be pickled."""

    __module__ = "nowhere"


class Choosy(Exception):
    """An error that cannot be constructed from a message."""

    def __init__(self, number: Any) -> None:
        super().__init__(int(number))


def run_out() -> NoReturn:
    raise MemoryError("no room")


def recurse() -> object:
    return recurse()


def stop() -> NoReturn:
    raise StopIteration


def fail_with_two_arguments() -> NoReturn:
    raise TwoArguments("no such", "sample")


def fail_stubbornly() -> NoReturn:
    raise Stubborn("cannot be imported")


def fail_choosily() -> NoReturn:
    raise Choosy(7)


def fail_at_length() -> NoReturn:
    raise LookupError("x" * 1_000_000)


#: What a function raises, the class of the error in the loop, and a part of its text.
ERRORS: dict[str, tuple[Act, str, str]] = {
    "LookupError": (refuse, "LookupError: Caught LookupError", "in refuse\n.*LookupError: no such sample"),
    "MemoryError": (run_out, "MemoryError: Caught MemoryError", "in run_out\n.*MemoryError: no room"),
    "RecursionError": (recurse, "RecursionError: Caught RecursionError", "in recurse\n.*Previous line repeated"),
    "StopIteration": (stop, "RuntimeError: Caught RuntimeError", "in stop\n.*generator raised StopIteration"),
    "two arguments": (fail_with_two_arguments, "RuntimeError: Caught TwoArguments", "in fail_with_two_arguments\n"),
    "unpicklable": (
        fail_stubbornly,
        "RuntimeError: Caught RuntimeError",
        r"in fail_stubbornly\n.*nowhere\.Stubborn: cannot be imported",
    ),
    "choosy": (fail_choosily, "RuntimeError: Caught Choosy", "in fail_choosily\n"),
    "long": (fail_at_length, "LookupError: Caught LookupError", "in fail_at_length\n"),
}
for name, (act, kind, text) in ERRORS.items():
    turn = next(TURNS)
    worker, before = PLACES[turn[0]]
    fault(
        f"error: {name}, {turn[0]} workers",
        pipeline=acting(act),
        turn=turn,
        says=rf"{before}; {raised(kind, worker, text)}__iter__ of Acting\(act=.*",
    )


# the end of the worker


class Aside(BaseException):
    """An error that is not an `Exception`."""


def fail_aside() -> NoReturn:
    raise Aside("no exception")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def leave(code: Any) -> NoReturn:
    sys.exit(code)


def leave_at_once(code: int) -> NoReturn:
    os._exit(code)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    nap()


#: How a worker ends, what is said of it, and its standard error.
ENDS: dict[str, tuple[Act, str, str]] = {
    "BaseException": (fail_aside, "ended with exit code 1", r"Process \S+:\nTraceback .*Aside: no exception\n"),
    "KeyboardInterrupt": (interrupt, "ended with exit code 1", r"Process \S+:\nTraceback .*KeyboardInterrupt\n"),
    "sys.exit(3)": (partial(leave, 3), "ended with exit code 3", ""),
    "sys.exit(text)": (partial(leave, "good bye"), "ended with exit code 1", "good bye\n"),
    "os._exit(5)": (partial(leave_at_once, 5), "ended with exit code 5", ""),
    "SIGABRT": (os.abort, "SIGABRT", ""),
    **{name: (partial(send, getattr(signal, name)), name, "") for name in ("SIGSEGV", "SIGKILL", "SIGTERM")},
}
for name, (act, how, noise) in ENDS.items():
    turn = next(TURNS)
    worker, before = PLACES[turn[0]]
    # Items made before the exit count if Python gets to send them, and if the loop does not notice the exit while it
    # waits for another worker.
    count = str(before) if turn[0] == 1 and how not in NUMBERS and not name.startswith("os._exit") else r"\d+"
    end = signalled_to(f"Worker {worker}", how) if how in NUMBERS else died(f"Worker {worker}", how)
    fault(f"end: {name}, {turn[0]} workers", pipeline=acting(act), turn=turn, says=f"{count}; {end}", noise=noise)


# items that cannot be sent or received


def lock() -> object:
    return threading.Lock()


def nested_lock() -> object:
    return {"jpg": b"", "meta": [1, threading.Lock()]}


class Sealed:
    """Can be pickled, but not unpickled."""

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError("sealed")


for name, act, what in (
    ("lock", lock, r"an object of type _thread\.lock"),
    ("nested lock", nested_lock, r"a dict whose part 'meta' is an object of type builtins\.list"),
):
    turn = next(TURNS)
    worker, before = PLACES[turn[0]]
    text = rf"whose last stage here is Acting, made {what}, which cannot be sent"
    error = raised("PicklingError: Caught PicklingError", worker, text)
    fault(f"unsendable: {name}, {turn[0]} workers", pipeline=acting(act), turn=turn, says=rf"{before}; {error}")

for name, size, top in (("small", 10, "bare"), ("large", 1_000_000, "pinned")):
    fault(
        f"unreceivable: {name}, {top}",
        pipeline=acting(partial(Sealed, size)),
        turn=(2, 10, top),
        says=rf"11; LookupError: sealed{ITER}",
    )
