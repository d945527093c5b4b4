"""Starts, interrupts and shuts down many loaders, or reads many epochs; run as a script, it prints its observations.

The arguments are "cycles" or "epochs", their number, and the seed.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from faulty_pipelines import TOPS, Acting, Large, acting, build_shards, expected, loader, nap, pids, plain
from torchdata.dataloader2 import DataLoader2

#: A cycle or an epoch that takes this long, in seconds, hangs: the script prints the stacks of all threads, and ends.
HANG_S = 300.0

#: The probability that a worker is stuck in an item. It is killed rather than joined, which takes half a second.
STUCK = 0.03


class Few(Large):
    """Yields a few large arrays."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            yield np.full(5000, number)


def cycles(count: int, generator: random.Random) -> dict[str, Any]:
    """Start, interrupt and shut down loaders, and look for leaks of each."""
    descriptors = len(os.listdir("/proc/self/fd"))
    hows: set[str] = set()
    early = 0
    gc.freeze()  # skip collecting existing objects each time
    for number in range(count):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        hows.add(cycle(generator))
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(60)  # a thread that is about to end is not joined
        assert threading.active_count() == 1, threading.enumerate()
        assert not has_children()
        assert len(os.listdir("/proc/self/fd")) == descriptors, os.listdir("/proc/self/fd")
        if number == count // 3:
            early = own_bytes([os.getpid()])
    faulthandler.cancel_dump_traceback_later()
    return {"cycles": count, "hows": sorted(hows), "growth": own_bytes([os.getpid()]) - early}


def cycle(generator: random.Random) -> str:
    """Use a loader briefly, and end it in some way; return the way."""
    workers = generator.randint(1, 2)
    is_stuck = generator.random() < STUCK
    is_large = not is_stuck and generator.random() < 0.3
    pipe = acting(nap, "a3") if is_stuck else plain(Few if is_large else Acting)
    dl = loader(pipe, workers, generator.choice((0, 10)), generator.choice(("bare", "bare", *TOPS)))
    items = iter(dl)
    # A second epoch would wait for the stuck worker.
    for epoch in range(1 if is_stuck else generator.randint(1, 3)):
        items = iter(dl) if epoch else items
        length = generator.choice((0, 1, 3) if is_stuck else (0, 1, 3, 10, None))
        taken = list(itertools.islice(items, length))
        if is_large:
            assert all((item == turn // workers).all() for turn, item in enumerate(taken))
        else:
            assert taken == expected(workers)[:length]
    return end(dl, items, "shutdown" if is_stuck else generator.choice(HOWS))


HOWS = ["shutdown", "two shutdowns", "with", "error", "another thread", "pause", "limit", "forget", "cycle"]


def end(dl: DataLoader2[Any], items: Any, how: str) -> str:
    """End a loader in one of the ways that users do. The caller still references it, and drops it next."""
    if how == "with":
        with dl:
            next(iter(dl))
    elif how == "error":
        with suppress(LookupError), dl:
            raise LookupError
    elif how == "another thread":
        thread = threading.Thread(target=dl.shutdown)
        thread.start()
        thread.join()
    elif how == "cycle":
        things = [dl, items]
        things.append(things)
    elif how != "forget":
        if how == "pause":
            items._pause()
        elif how == "limit":
            items.limit(2)
        dl.shutdown()
        if how == "two shutdowns":
            dl.shutdown()
    return how


def epochs(count: int, generator: random.Random) -> dict[str, Any]:
    """Read and interrupt many epochs of small and of large items; return how much the processes grow."""
    growth = {}
    for stage in (Acting, Large):
        with loader(plain(stage)) as dl:
            early = 0
            for epoch in range(count):
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                items: Any = iter(dl)
                kept = list(itertools.islice(items, generator.choice((0, 1, 5, 30, None))))
                if generator.random() < 0.2:
                    items._pause()
                    items.resume()
                del kept, items
                if epoch == count // 3:
                    early = own_bytes([os.getpid(), *pids(dl)])
            growth[stage.__name__] = own_bytes([os.getpid(), *pids(dl)]) - early
    faulthandler.cancel_dump_traceback_later()
    return {"epochs": count, "growth": max(growth.values())}


def own_bytes(processes: list[int]) -> int:
    """Return the private memory of processes, with their shares of shared memory.

    Files such as libraries are not counted, because a process's share grows when another process that maps them exits.
    """
    gc.collect()
    return sum(
        1024 * int(line.split()[1])
        for pid in processes
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


def has_children() -> bool:
    """Whether this process has children, including zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    build_shards()
    soak = {"cycles": cycles, "epochs": epochs}[sys.argv[1]]
    print(json.dumps(soak(int(sys.argv[2]), random.Random(sys.argv[3]))))
