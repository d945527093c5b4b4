"""Faults of worker processes: they are killed, stopped, forgotten, forked or late."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import threading
import time
from functools import partial
from typing import Any

from fault_table import (
    BARE,
    EARLY,
    ITER,
    LEFT_PIPES,
    NONE_OPENED,
    OPENED,
    PERHAPS_OPENED,
    SHARD,
    died,
    fault,
    raised,
    signalled_to,
)
from faulty_pipelines import (
    BUSY,
    SHARDS,
    TOPS,
    Act,
    Large,
    acting,
    await_busy,
    await_wait,
    expected,
    in_thread,
    killed,
    loader,
    nap,
    pids,
    plain,
    read,
    samples,
    take,
)
from main_programs import Become, group, has_own_shm
from torch.utils.data import IterDataPipe


def fork_sleeper() -> None:
    """Die and leave a process behind that inherits all open descriptors."""
    if not os.fork():
        nap()
    os.kill(os.getpid(), signal.SIGKILL)


def reset_naps(pipe: Any, info: Any, seeds: Any) -> Any:
    nap()


for turn in ((1, 0, "bare"), (2, 10, "pinned"), (3, 10, "prefetched")):
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


def signalled_unprepared(method: str, *, is_late: bool) -> str:
    """Signal all processes of a program whose workers do not know its handler."""
    seen: list[int] = []
    handle = partial(signal.signal, signal.SIGUSR1, lambda *_: seen.append(os.getpid()))
    if not is_late:
        handle()
    with loader(plain(Large), prefetch=1, method=method) as dl:  # more than may be on its way
        items = iter(dl)
        first = next(items)
        if is_late:
            handle()
        for pid in (os.getpid(), *pids(dl)):
            os.kill(pid, signal.SIGUSR1)
        return f"{take(dl, 2, itertools.chain([first], items))}, {len(seen)}"


for method, is_late in (("fork", True), ("spawn", False), ("forkserver", False)):
    fault(
        f"signals that workers do not handle, {method}",
        says=r"\d+; WorkerDiedError: Worker \d \(pid \d+\) was killed by signal 10 \(SIGUSR1\) .*, 1",
    )(partial(signalled_unprepared, method, is_late=is_late))


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
