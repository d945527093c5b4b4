"""Faults of a `ShardReadingService`: what happens in a program, and what it must say.

`@fault` adds one to the table, with a pipeline that meets it, the moment at which a worker is killed, or a function.
Each runs in a process of its own, and says how an epoch ended: "11; LookupError: ..." after eleven items. As a script,
this runs those whose names it reads, and prints their results as JSON. Its argument is the limit of each in seconds.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as executors
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar
from unittest import mock

import psutil
from fault_runner import Become, Cause, Main, describe_error, group, has_own_shm, in_another_main, run
from faulty_pipelines import (
    BUSY,
    SHARDS,
    TOPS,
    Act,
    Eager,
    Fragile,
    Large,
    Numb,
    Refusing,
    Sealed,
    acting,
    build_shards,
    busy_of,
    expected,
    fail_aside,
    fail_at_length,
    fail_choosily,
    fail_stubbornly,
    fail_with_two_arguments,
    fork_sleeper,
    init_fails,
    init_leaves,
    init_stops,
    interrupt,
    leave,
    leave_at_once,
    loader,
    lock,
    nap,
    nested_lock,
    ones,
    pids,
    plain,
    read,
    recurse,
    refuse,
    reset_fails,
    reset_naps,
    run_out,
    samples,
    send,
    stop,
    take,
)
from torch.utils.data import IterDataPipe


class Fault(NamedTuple):
    """What happens, and patterns of the result, of standard error, and of each kind of resource that remains."""

    run: Cause
    says: str
    noise: str
    left: str | None


FAULTS: dict[str, Fault] = {}
#: The faults that end a main program, by the same names.
PROGRAMS: dict[str, Fault] = {}
#: The number of workers, the number of items that they prefetch, and the stage in the main process.
Turn = tuple[int, int, str]
BARE: Turn = (2, 10, "bare")
FEW, SOME, MANY = TURNS_OF_KILLS = [(1, 0, "bare"), (2, 10, "pinned"), (3, 10, "prefetched")]
C = TypeVar("C", bound=Callable[[], object])


def fault(
    name: str,
    *,
    says: str,
    pipeline: IterDataPipe[Any] | None = None,
    kill: str | None = None,
    turn: Turn = BARE,
    noise: str = "",
    left: str | None = None,
    table: dict[str, Fault] = FAULTS,
    **options: Any,
) -> Callable[[C], C]:
    """Add a fault to a table: that of a function, which this decorates, or of a pipeline.

    Args:
        name: the name of the test.
        says: a pattern of the result.
        pipeline: what a loader reads.
        kill: the moment at which the last worker is killed, as `killed` knows them.
        turn: the workers, and what else differs between faults, so that each is met in some of them.
        noise: a pattern of standard error.
        left: a pattern of what remains, if CPython leaves something.
        table: the table.
        options: further options of the service.
    """

    def add(cause: C) -> C:
        table[name] = Fault(cause, says, noise, left)
        return cause

    if kill is not None:
        add(partial(killed, kill, pipeline, *turn, **options))  # type: ignore[arg-type]  # it is a function without arguments
    elif pipeline is not None:
        add(partial(read, pipeline, *turn, **options))
    return add


# what it says

NUMBERS = {"SIGABRT": 6, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}
SHARD = r"\S+/b\.tar"
OPENED, NONE_OPENED = r"The last shard that it opened is \S+/\w\.tar\.", r"It has opened no shard yet\."
#: Whether that has happened.
PERHAPS_OPENED = rf"({OPENED}|{NONE_OPENED})"
#: No shard is open yet, in the error of a worker.
EARLY = ""
#: What torch adds if a stage of the user reads the items.
ITER = r"(\nThis exception is thrown by __iter__ of (MemoryPinner|Kept)\(.*\))?"


def raised(kind: str, worker: int, text: str, shard: str = f", whose last shard was {SHARD}") -> str:
    """The expected error of a worker: its class, the worker, the shard, and the traceback to its origin."""
    return rf"{kind} in worker process {worker}{shard}\.\nOriginal Traceback \(most recent call last\):\n.*{text}.*"


def died(name: str, how: str, shard: str = OPENED) -> str:
    return rf"WorkerDiedError: {name} \(pid \d+\) {how} while its data was still needed\. .* {shard}{ITER}"


def signalled_to(name: str, signal: str = "SIGKILL", shard: str = OPENED) -> str:
    return died(name, rf"was killed by signal {NUMBERS[signal]} \({signal}\)", shard)


#: The worker that meets a fault in sample b5, and the number of its items before it, by the number of workers.
PLACES = {0: (0, 15), 1: (0, 15), 2: (1, 11), 3: (1, 16)}
#: Faults of samples meet these in turn.
TURNS = itertools.cycle([(2, 10, "bare"), (1, 0, "pinned"), (3, 10, "prefetched"), (2, 0, "bare"), (3, 10, "pinned")])


# waiting


def await_busy() -> None:
    """Wait until a worker of this program has begun to nap."""
    while not busy_of(os.getpid()).exists():
        time.sleep(0.005)


def await_wait(*, is_main: bool = True) -> None:
    """Wait until a thread and the loop of the main thread both wait for a worker."""

    def functions(frame: Any) -> Iterator[str]:
        while frame is not None:
            yield f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name}"
            frame = frame.f_back

    main = threading.main_thread().ident
    while True:
        stacks = {ident: [*functions(frame)] for ident, frame in sys._current_frames().items()}
        if any(stack[0] == "connection.py _wait" for stack in stacks.values()) and (
            not is_main or "dataloader2.py __next__" in stacks[main or 0]
        ):
            return
        time.sleep(0.005)


def in_thread(*acts: Act) -> None:
    """Call functions one after the other in a thread."""

    def act() -> None:
        for each in acts:
            each()

    threading.Thread(target=act, daemon=True).start()


# errors of a sample

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


# startup

LOOKUP = "LookupError: Caught LookupError"
fault("start: apply_sharding", pipeline=plain(Refusing), says="0; " + raised(LOOKUP, 0, "no shard for worker 0", EARLY))
fault(
    "start: iter raises",
    pipeline=plain(Eager),
    turn=(3, 0, "pinned"),
    says="0; " + raised(LOOKUP, 0, "raised by iter", EARLY),
)
fault(
    "start: iter returns a number",
    pipeline=plain(Numb),
    turn=(1, 10, "bare"),
    says="0; " + raised("TypeError: Caught TypeError", 0, "'int' object is not an", EARLY),
)
fault(
    "start: worker_init_fn",
    pipeline=plain(),
    turn=(3, 0, "bare"),
    worker_init_fn=init_fails,
    says="0; " + raised(LOOKUP, 0, "no such disk in worker 0", EARLY),
)
fault(
    "start: worker_init_fn exits",  # in all workers, and any of them may be noticed first
    pipeline=plain(),
    worker_init_fn=init_leaves,
    says="0; " + died("Worker [01]", "ended with exit code 4", NONE_OPENED),
)
fault(
    "start: worker_init_fn stops",
    pipeline=plain(),
    worker_init_fn=init_stops,
    says="0; " + raised("RuntimeError: Caught StopIteration", 0, "init_stops", EARLY),
)
fault(
    "start: worker_reset_fn",
    pipeline=plain(),
    worker_reset_fn=reset_fails,
    says="0; " + raised(LOOKUP, 0, "no such seed in worker 0", EARLY),
)
fault(
    "spawn: error",
    pipeline=acting(refuse),
    turn=(1, 10, "bare"),
    method="spawn",
    says="15; " + raised(LOOKUP, 0, "in refuse\n"),
)
fault(
    "spawn: unpickling fails",
    pipeline=plain(Fragile),
    turn=(1, 10, "bare"),
    method="spawn",
    says="0; " + raised(LOOKUP, 0, "not in a worker", EARLY),
)


def cannot_fork(after: int, pipe: IterDataPipe[Any]) -> str:
    """Make ``os.fork`` fail after ``after`` calls, as it does at the limit of processes."""
    fork, calls = os.fork, itertools.count()

    def limited() -> int:
        if next(calls) >= after:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    with mock.patch("os.fork", limited):
        return read(pipe)


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Allow this process only ``left`` more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.dup(0)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while fillers[-1] < highest:
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in fillers:
            os.close(each)


def too_many_files(left: int) -> str:
    with few_descriptors(left):
        return read(plain())


#: CPython leaves its pipes to a process open if ``os.fork``, or its second call of ``os.pipe``, fails; and if the
#: system discards the exit status of processes.
LEFT_PIPES = r"descriptors: \[(\"\(\d+, 'pipe:\[\d+\]'\)\"(, )?){2,4}\]"
for after in range(2):
    fault(
        f"start: {after} forks",
        says=rf"0; BlockingIOError: \[Errno 11\] Worker {after} cannot be started: Resource temporarily unavailable",
        left=LEFT_PIPES,
    )(partial(cannot_fork, after, plain()))
for left in (1, 2, 5, 8, 11):
    lost = r"0; OSError: \[Errno 24\] Worker [01] cannot be started: Too many open files|60; end"
    fault(
        f"start: {left} descriptors",
        says=lost if left > 1 else r"0; OSError: \[Errno 24\] Too many open files",
        left=LEFT_PIPES,
    )(partial(too_many_files, left))


@fault(
    "too many files later",
    says=r"OSError: this process has too many open files to receive a segment .* `ulimit -n`" + ITER,
)
def too_many_files_later() -> str:
    """Keep large items until no descriptor is left to receive another one."""
    kept: list[Any] = []
    with loader(plain(Large)) as dl:
        items = iter(dl)
        kept.append(next(items))
        try:
            with few_descriptors(0):
                kept.extend(items)
        except OSError as error:
            assert all((array == array[0]).all() for array in kept)
            return describe_error(error)
    return "no error"


@fault("spawn: killed at import", says="0; " + signalled_to("Worker 0", shard=NONE_OPENED))
def killed_at_import() -> str:
    """Kill a spawned worker while it is still receiving more than a pipe can buffer."""
    pipe = plain()
    vars(pipe)["ballast"] = b"x" * 1_000_000
    with mock.patch.dict(os.environ, FAULTS_WORKER="dies"):
        return read(pipe, 1, method="spawn")


def refuse_memory(*_: Any) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def without_memory(pipe: Any, info: Any) -> Any:
    mock.patch("os.ftruncate", refuse_memory).start()
    return pipe


fault(
    "no memory for an item",
    pipeline=acting(ones),
    worker_init_fn=without_memory,
    says="11; " + raised("OSError: Caught OSError", 1, "Cannot allocate memory"),
)


@fault(
    "start: no memory",
    says="0; " + died("Worker [01]", "ended with exit code 1", NONE_OPENED),
    noise=r"Process \S+:\n.*Traceback .*Cannot allocate memory\n.*",  # the other may be killed during its traceback
)
def no_memory_for_the_page() -> str:
    with mock.patch("os.ftruncate", refuse_memory):
        return read(plain())


# the end of a worker


def killed(moment: str, pipe: IterDataPipe[Any], workers: int, prefetch: int, top: str, **options: Any) -> str:
    """Kill the last worker at some point; return the result of this epoch, or of the next one.

    "At rest", the worker has prefetched up to its limit, or all items.
    """
    last = workers - 1
    with loader(pipe, workers, prefetch, top, **options) as dl:
        items: Any = iter(dl)
        victim = pids(dl)[last]
        if moment == "sending":
            items = itertools.chain([next(items) for _ in range(3)], items)
        elif moment == "waited for":
            begun = [next(items) for _ in range(workers)]  # each worker has opened a shard
            in_thread(await_busy, partial(os.kill, victim, signal.SIGKILL))
            return take(dl, workers, itertools.chain(begun, items))
        elif moment == "between epochs":
            assert take(dl, workers, items) == "60; end"
        elif moment in ("at rest", "in shutdown"):
            for _ in range(workers):  # one item of each worker, so that each worker has opened a shard
                next(items)
            if moment == "in shutdown":
                in_thread(partial(os.kill, victim, signal.SIGKILL))
                return "shut down"
            while psutil.Process(victim).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)
        elif moment == "in reset":
            await_busy()
        os.kill(victim, signal.SIGKILL)
        return take(dl, workers, items if moment in ("at once", "in reset", "sending") else None)


for turn in TURNS_OF_KILLS:
    last = turn[0] - 1
    for moment, pipe, shard in (
        ("at once", plain(), PERHAPS_OPENED),
        ("sending", plain(Large), NONE_OPENED),
        ("waited for", acting(nap, f"{SHARDS[last]}5"), r"The last shard that it opened is \S+/[abc]\.tar\."),
        ("between epochs", plain(), r"The last shard that it opened is \S+/[def]\.tar\."),
        ("at rest", plain(), OPENED),
        ("in reset", plain(), NONE_OPENED),
        ("in shutdown", plain(), None),
    ):
        options: dict[str, Any] = {"worker_reset_fn": reset_naps} if moment == "in reset" else {}
        fault(
            f"killed {moment}, {turn[0]} workers, {turn[1]}, {turn[2]}",
            pipeline=pipe,
            kill=moment,
            turn=turn,
            says="shut down" if shard is None else rf"\d+; {signalled_to(f'Worker {last}', shard=shard)}",
            **options,
        )


@fault("killed with a grandchild", says=r"\d+; " + signalled_to("Worker 1"))
def killed_with_grandchild() -> str:
    try:
        return read(acting(fork_sleeper))
    finally:
        for process in group(os.getpgid(0)):
            if process.pid != os.getpid():
                process.kill()


@fault(
    "another is killed", says="10; " + signalled_to("Worker 1", shard=r"The last shard that it opened is \S+/f\.tar\.")
)
def another_killed() -> str:
    """Kill a worker while the loop waits for another worker, which is slow."""
    with loader(acting(nap, "a5")) as dl:
        items = iter(dl)
        begun = [next(items) for _ in range(10)]
        while not dl.reading_service.report().workers[1].shard.endswith("f.tar"):
            time.sleep(0.01)
        in_thread(await_wait, partial(os.kill, pids(dl)[1], signal.SIGKILL))
        return take(dl, 2, itertools.chain(begun, items))


@fault("killed unseen", says="10; " + died("Worker 1", "ended with an unknown exit code"), left=LEFT_PIPES)
def killed_unseen() -> str:
    """Kill a worker of a program that lets the system discard the exit status of children."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return another_killed()


@fault("killed with broken pipes", says=r"\d; " + signalled_to("Worker 1"))
def killed_with_broken_pipes() -> str:
    """Lose a worker in a program that dies when it writes to a closed pipe, as a program for ``| head`` may."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return killed("between epochs", plain(), *BARE)


# shutdown


def shutdown_by_another_thread(top: str) -> str:
    with loader(acting(nap), top=top) as dl:
        items = iter(dl)
        begun = [next(items) for _ in range(11)]
        in_thread(await_wait, dl.shutdown)
        return take(dl, 2, itertools.chain(begun, items))


SHUT_DOWN = rf"11; RuntimeError: The connection to Worker 1 was shut down .*{ITER}"
for top in TOPS:
    fault(f"shutdown by another thread, {top}", says=SHUT_DOWN)(partial(shutdown_by_another_thread, top))


@fault("shutdown by a signal", says=SHUT_DOWN)
def shutdown_by_a_signal() -> str:
    with loader(acting(nap)) as dl:
        signal.signal(signal.SIGALRM, lambda *_: dl.shutdown())
        items = iter(dl)
        begun = [next(items) for _ in range(11)]
        in_thread(await_wait, partial(os.kill, os.getpid(), signal.SIGALRM))
        return take(dl, 2, itertools.chain(begun, items))


def shutdown_of(act: Act, top: str) -> str:
    """Shut down while a worker is busy."""
    with loader(acting(act), top=top) as dl:
        next(iter(dl))
        await_busy()
    return "shut down"


for (how, act), top in zip(BUSY.items(), TOPS, strict=True):
    fault(f"shutdown, {how}", says="shut down")(partial(shutdown_of, act, top))


@fault("shutdown, stopped", says="shut down")
def shutdown_of_stopped() -> str:
    """Shut down while a worker is stopped, as a debugger stops it."""
    with loader(plain()) as dl:
        next(iter(dl))
        os.kill(pids(dl)[1], signal.SIGSTOP)
    return "shut down"


def forgotten(how: str, top: str) -> str:
    dl = loader(acting(nap), top=top)
    items = iter(dl)
    for _ in range(3):
        next(items)
    if how == "cycle":
        cycle: list[Any] = [dl, items]
        cycle.append(cycle)
        del cycle
    del dl, items
    gc.collect()
    return "gone"


for how, top in zip(("function", "cycle", "cycle"), TOPS, strict=True):
    fault(f"forgotten in a {how}, {top}", says="gone")(partial(forgotten, how, top))


def ended_in_a_fork(how: str) -> str:
    """Shut a loader down in a forked process, or let that exit, and continue to read."""
    with loader(plain()) as dl:
        items: Any = iter(dl)
        next(items)
        pid = os.fork()
        if not pid:
            if how == "shutdown":
                dl.shutdown()
                os._exit(0)
            raise Become(gc.collect)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return f"{code}, {list(items) == expected(2)[1:]}, {list(dl) == expected(2)}"


for how in ("shutdown", "end"):
    fault(f"fork: {how}", says="0, True, True")(partial(ended_in_a_fork, how))


@fault("begun in a thread", says="True")
def begun_in_a_thread() -> str:
    """Start in a thread that exits, and continue in another one."""
    begun: list[Any] = []

    def begin() -> None:
        dl = loader(plain())
        items = iter(dl)
        begun.extend((dl, items, next(items)))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    dl, items, first = begun
    begun.clear()
    with dl:
        return str([first, *items] == expected(2))


def init_loads(pipe: Any, info: Any) -> Any:
    with loader(samples()) as dl:
        list(dl)


def init_loads_in_process(pipe: Any, info: Any) -> Any:
    with loader(plain(), 0) as dl:
        assert list(dl) == expected(1)
    return pipe


fault(
    "in a worker",
    pipeline=samples(),
    worker_init_fn=init_loads,
    says="0; " + raised("RuntimeError: Caught RuntimeError", 0, "use num_workers=0 in it", EARLY),
)
fault("in a worker, without workers", pipeline=plain(), worker_init_fn=init_loads_in_process, says="60; end")


@fault("handled signals", says="True, True")
def handled_signals() -> str:
    """Signal all processes of a program that saves its state on termination."""
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda *_: seen.append(os.getpid()))
    with loader(plain()) as dl:
        items = iter(dl)
        next(items)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            for pid in (os.getpid(), *pids(dl)):
                os.kill(pid, number)
        rest = list(items)
    return f"{rest == expected(2)[1:]}, {seen == [os.getpid()] * 3}"


# timeouts


def timed_out(pipe: IterDataPipe[Any], **options: Any) -> str:
    with loader(pipe, timeout_s=4.0, **options) as dl:
        items = iter(dl)
        names = {f"(pid {pid})": f"(pid of {number})" for number, pid in enumerate(pids(dl))}
        return re.sub(r"\(pid \d+\)", lambda found: names[found[0]], take(dl, 2, items))


for top in ("bare", "prefetched"):
    fault(
        f"timeout, {top}",
        says=r"11; WorkerTimeoutError: Worker 1 \(pid of 1\) has sent nothing for timeout_s=4 s\. "
        rf"The last shard that it opened is {SHARD}\. .*{ITER}",
    )(partial(timed_out, acting(nap), top=top))
fault(
    "timeout in reset",
    says=r"0; WorkerTimeoutError: Worker 0 \(pid of 0\) has sent nothing .*has opened no shard yet\..*",
)(partial(timed_out, plain(), worker_reset_fn=reset_naps))


@fault("timeout, stopped", says=r"\d+; WorkerTimeoutError: Worker 0 \(pid \d+\) has sent nothing .*")
def timed_out_stopped() -> str:
    with loader(plain(Large), timeout_s=4.0) as dl:
        items = iter(dl)
        first = next(items)
        os.kill(pids(dl)[0], signal.SIGSTOP)
        return take(dl, 2, itertools.chain([first], items))


@fault("no room in /dev/shm", says="100 True")
def without_shm() -> str:
    """Keep 160 MB of views when ``/dev/shm`` holds 64 KB, or at least accepts no new files."""
    before = set(os.listdir("/dev/shm"))
    if has_own_shm("64k"):
        assert shutil.disk_usage("/dev/shm").total == 65536
        before = set()
    with loader(plain(Large)) as dl:
        kept = list(dl)
        assert set(os.listdir("/dev/shm")) <= before
    return f"{len(kept)} {all((item == number // 2).all() for number, item in enumerate(kept))}"


# the end of the main process

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
        f"exit {how}, {busy}, {top}",
        says=f"ended with {code}, 0 left",
        noise=FAILS if how == "with an error" else "",
        table=PROGRAMS,
    )(partial(in_another_main, partial(leaving, how, BUSY[busy], top)))
for (number, whom), (busy, top) in zip(SIGNALLED, MAIN_TURNS, strict=False):
    fault(
        f"{number.name} of {whom}, {busy}, {top}",
        says=f"ended with -{number.value}, 0 left",
        noise=INTERRUPTED if number == signal.SIGINT else "",
        table=PROGRAMS,
    )(partial(signalled, number, whom, partial(reading, BUSY[busy], top)))
for (number, whom), top in zip(SIGNALLED[::2], TOPS, strict=True):
    fault(
        f"{number.name} of {whom}, idle, {top}",
        says=f"ended with -{number.value}, 0 left",
        noise=INTERRUPTED if number == signal.SIGINT else "",
        table=PROGRAMS,
    )(partial(signalled, number, whom, partial(idling, top)))


if __name__ == "__main__":
    main_program = None
    try:
        build_shards()
        has_own_shm("1m")  # files of other programs there are no concern of a fault
        chosen = {name: (FAULTS | PROGRAMS)[name].run for name in json.load(sys.stdin)}
        print(json.dumps(run(chosen, float(sys.argv[1]))))
    except Become as become:
        main_program = become.main
    if main_program is not None:
        main_program()
