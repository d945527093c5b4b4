"""Faults of a `ShardReadingService`; run as a script, it prints the results of those whose names match, as JSON.

The arguments are the time limit of each, in seconds, and a pattern for the names.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as executors
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil
from faulty_pipelines import (
    BUSY,
    ENDS,
    ERRORS,
    SHARDS,
    TOPS,
    UNRECEIVABLE,
    UNSENDABLE,
    Act,
    Eager,
    Fragile,
    Large,
    Numb,
    Refusing,
    acting,
    build_shards,
    busy_of,
    expected,
    fork_sleeper,
    init_fails,
    init_leaves,
    init_stops,
    loader,
    nap,
    ones,
    pids,
    plain,
    read,
    refuse,
    reset_fails,
    reset_naps,
    samples,
    take,
)
from scenario_runner import Become, Main, Scenario, describe_error, group, has_own_shm, in_another_main, run
from torch.utils.data import IterDataPipe

# events


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


# startup


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


def killed_at_import() -> str:
    """Kill a spawned worker while it is still receiving more than a pipe can buffer."""
    pipe = plain()
    vars(pipe)["ballast"] = b"x" * 1_000_000
    with mock.patch.dict(os.environ, SCENARIOS_WORKER="dies"):
        return read(pipe, 1, method="spawn")


def refuse_memory(*_: Any) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def without_memory(pipe: Any, info: Any) -> Any:
    mock.patch("os.ftruncate", refuse_memory).start()
    return pipe


def no_memory_for_the_page() -> str:
    with mock.patch("os.ftruncate", refuse_memory):
        return read(plain())


# the end of a worker


def killed(moment: str, workers: int = 2, prefetch: int = 10, top: str = "bare", method: str | None = None) -> str:
    """Kill the last worker at some point; return the result of this epoch, or of the next one."""
    last = workers - 1
    pipe = {"sending": plain(Large), "waited for": acting(nap, f"{SHARDS[last]}5")}.get(moment, plain())
    options: dict[str, Any] = {"worker_reset_fn": reset_naps} if moment == "in reset" else {}
    with loader(pipe, workers, prefetch, top, method, **options) as dl:
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


#: "At rest", the worker has prefetched up to its limit, or all items.
MOMENTS = ["at once", "sending", "waited for", "between epochs", "at rest", "in reset", "in shutdown"]


def killed_with_grandchild() -> str:
    try:
        return read(acting(fork_sleeper))
    finally:
        for process in group(os.getpgid(0)):
            if process.pid != os.getpid():
                process.kill()


def another_killed() -> str:
    """Kill a worker while the loop waits for another worker, which is slow."""
    with loader(acting(nap, "a5")) as dl:
        items = iter(dl)
        begun = [next(items) for _ in range(10)]
        while not dl.reading_service.report().workers[1].shard.endswith("f.tar"):
            time.sleep(0.01)
        in_thread(await_wait, partial(os.kill, pids(dl)[1], signal.SIGKILL))
        return take(dl, 2, itertools.chain(begun, items))


def killed_unseen() -> str:
    """Kill a worker of a program that lets the system discard the exit status of children."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return another_killed()


def killed_with_broken_pipes() -> str:
    """Lose a worker in a program that dies when it writes to a closed pipe, as a program for ``| head`` may."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return killed("between epochs")


# shutdown


def shutdown_by_another_thread(top: str) -> str:
    with loader(acting(nap), top=top) as dl:
        items = iter(dl)
        begun = [next(items) for _ in range(11)]
        in_thread(await_wait, dl.shutdown)
        return take(dl, 2, itertools.chain(begun, items))


def shutdown_by_a_signal() -> str:
    with loader(acting(nap)) as dl:
        signal.signal(signal.SIGALRM, lambda *_: dl.shutdown())
        items = iter(dl)
        begun = [next(items) for _ in range(11)]
        in_thread(await_wait, partial(os.kill, os.getpid(), signal.SIGALRM))
        return take(dl, 2, itertools.chain(begun, items))


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


def shutdown_of_stopped() -> str:
    """Shut down while a worker is stopped, as a debugger stops it."""
    with loader(plain()) as dl:
        next(iter(dl))
        os.kill(pids(dl)[1], signal.SIGSTOP)
    return "shut down"


def shutdown_of(act: Act, top: str) -> str:
    """Shut down while a worker is busy."""
    with loader(acting(act), top=top) as dl:
        next(iter(dl))
        await_busy()
    return "shut down"


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


def timed_out_stopped() -> str:
    with loader(plain(Large), timeout_s=4.0) as dl:
        items = iter(dl)
        first = next(items)
        os.kill(pids(dl)[0], signal.SIGSTOP)
        return take(dl, 2, itertools.chain([first], items))


# rest


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


HOWS = [
    "with a loader in a module",
    "with a local loader",
    "in a loop",
    "with an error",
    "with sys.exit",
    "with a thread that reads",
    "after multiprocessing",
]


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


def outlived(ready: Any) -> None:
    """Run a main program whose main thread exits before a thread that reads."""
    ready()

    def read_all() -> None:
        while not executors._shutdown:  # until the main thread has ended
            time.sleep(0.01)
        print(read(plain()), file=sys.stderr)

    ThreadPoolExecutor(1).submit(read_all)


def signalled(number: int, whom: str, main: Main) -> str:
    act = {"main": os.kill, "group": os.killpg}[whom]
    return in_another_main(main, lambda pid: act(pid, number))


# all scenarios

#: The parameters of a scenario (workers, prefetch, top), and those of the exits of main programs.
TURNS = itertools.cycle([(2, 10, "bare"), (1, 0, "pinned"), (3, 10, "prefetched"), (2, 0, "bare"), (3, 10, "pinned")])
MAIN_TURNS = itertools.cycle(itertools.product(BUSY, TOPS))
SIGNALLED = [*itertools.product((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), ("main", "group"))]


def in_turn(names: Iterable[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    return zip(names, TURNS, strict=False)


SCENARIOS: dict[str, Scenario] = {
    **{
        f"error, {turn[0]} workers, {turn[1]}, {turn[2]}": partial(read, acting(refuse), *turn)
        for turn in [(0, 10, "bare"), (2, 0, "bare"), (3, 10, "pinned"), (2, 10, "prefetched")]
    },
    **{
        f"error: {name}, {turn[0]} workers": partial(read, acting(ERRORS[name]), *turn)
        for name, turn in in_turn(ERRORS)
    },
    **{f"end: {name}, {turn[0]} workers": partial(read, acting(ENDS[name]), *turn) for name, turn in in_turn(ENDS)},
    **{
        f"unsendable: {name}, {turn[0]} workers": partial(read, acting(UNSENDABLE[name]), *turn)
        for name, turn in in_turn(UNSENDABLE)
    },
    **{
        f"unreceivable: {name}, {top}": partial(read, acting(UNRECEIVABLE[name]), 2, 10, top)
        for name, top in zip(UNRECEIVABLE, TOPS, strict=False)
    },
    "start: apply_sharding": partial(read, plain(Refusing)),
    "start: iter raises": partial(read, plain(Eager), 3, 0, "pinned"),
    "start: iter returns a number": partial(read, plain(Numb), 1),
    "start: worker_init_fn": partial(read, plain(), 3, 0, worker_init_fn=init_fails),
    "start: worker_init_fn exits": partial(read, plain(), worker_init_fn=init_leaves),
    "start: worker_init_fn stops": partial(read, plain(), worker_init_fn=init_stops),
    "start: worker_reset_fn": partial(read, plain(), worker_reset_fn=reset_fails),
    **{f"start: {after} forks": partial(cannot_fork, after, plain()) for after in range(2)},
    **{f"start: {left} descriptors": partial(too_many_files, left) for left in (1, 2, 5, 8, 11)},
    "start: no memory": no_memory_for_the_page,
    "spawn: error": partial(read, acting(refuse), 1, method="spawn"),
    "spawn: unpickling fails": partial(read, plain(Fragile), 1, method="spawn"),
    "spawn: killed at import": killed_at_import,
    "too many files later": too_many_files_later,
    "no memory for an item": partial(read, acting(ones), worker_init_fn=without_memory),
    **{
        f"killed {moment}, {turn[0]} workers, {turn[1]}, {turn[2]}": partial(killed, moment, *turn)
        for moment in MOMENTS
        for turn in [(1, 0, "bare"), (2, 10, "pinned"), (3, 10, "prefetched")]
    },
    "killed with a grandchild": killed_with_grandchild,
    "another is killed": another_killed,
    "killed unseen": killed_unseen,
    "killed with broken pipes": killed_with_broken_pipes,
    **{f"shutdown by another thread, {top}": partial(shutdown_by_another_thread, top) for top in TOPS},
    "shutdown by a signal": shutdown_by_a_signal,
    **{
        f"shutdown, {name}": partial(shutdown_of, act, top) for (name, act), top in zip(BUSY.items(), TOPS, strict=True)
    },
    "shutdown, stopped": shutdown_of_stopped,
    **{
        f"forgotten in a {how}, {top}": partial(forgotten, how, top)
        for how, top in zip(("function", "cycle", "cycle"), TOPS, strict=True)
    },
    **{f"fork: {how}": partial(ended_in_a_fork, how) for how in ("shutdown", "end")},
    "begun in a thread": begun_in_a_thread,
    "in a worker": partial(read, samples(), worker_init_fn=init_loads),
    "in a worker, without workers": partial(read, plain(), worker_init_fn=init_loads_in_process),
    "handled signals": handled_signals,
    **{f"timeout, {top}": partial(timed_out, acting(nap), top=top) for top in ("bare", "prefetched")},
    "timeout in reset": partial(timed_out, plain(), worker_reset_fn=reset_naps),
    "timeout, stopped": timed_out_stopped,
    "no room in /dev/shm": without_shm,
    **{
        f"exit {how}, {name}, {top}": partial(in_another_main, partial(leaving, how, BUSY[name], top))
        for how, (name, top) in zip(HOWS, MAIN_TURNS, strict=False)
    },
    "outlived by an executor": partial(in_another_main, outlived),
    **{
        f"{number.name} of {whom}, {name}, {top}": partial(signalled, number, whom, partial(reading, BUSY[name], top))
        for (number, whom), (name, top) in zip(SIGNALLED, MAIN_TURNS, strict=False)
    },
    **{
        f"{number.name} of {whom}, idle, {top}": partial(signalled, number, whom, partial(idling, top))
        for (number, whom), top in zip(SIGNALLED[::2], TOPS, strict=True)
    },
}


if __name__ == "__main__":
    main_program = None
    try:
        build_shards()
        has_own_shm("1m")  # files of other programs there are no concern of a scenario
        chosen = {name: scenario for name, scenario in SCENARIOS.items() if re.search(sys.argv[2], name)}
        print(json.dumps(run(chosen, float(sys.argv[1]))))
    except Become as become:
        main_program = become.main
    if main_program is not None:
        main_program()
