"""Ranks of a process group, as forks of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import psutil
import torch
from process_stacks import stacks_of
from torch._C._distributed_c10d import TCPStore
from torch.distributed import destroy_process_group, init_process_group, is_initialized

#: The time limit of ranks, in seconds. It is shorter than pytest's limit, whose error would not describe them.
LIMIT_S = 300.0

#: The time limit of the other ranks after one has failed, in seconds.
GRACE_S = 2.0

#: How long processes may outlive their rank, in seconds.
LEFT_S = 60.0

#: The interval for checking whether a rank has died, in seconds: its forks may keep its sentinel open.
PAUSE_S = 0.5


class Failure(str):
    """Why a rank has no result."""

    __slots__ = ()


class Rank(NamedTuple):
    """The process of a rank, which leads a process group, and a connection to receive its result."""

    process: BaseProcess
    results: Connection


def be_rank(rank: int, ranks: int, port: int, program: Callable[[int], Any], results: Connection, gate: Event) -> None:
    os.setpgid(0, 0)
    try:
        # The store's thread looks up its clients, and a process forked in the meantime would inherit the held lock.
        gate.wait()
        torch.set_num_threads(1)
        if ranks > 1:
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        results.send(program(rank))
    except BaseException:
        results.send(Failure(traceback.format_exc()))
        raise
    finally:
        if is_initialized():
            destroy_process_group()


def on_ranks(ranks: int, program: Callable[[int], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """Return the results of a program, called with the number of its rank, on each of some ranks.

    Raises:
        RuntimeError: a rank raised an error, died, did not end in time, or left a process behind. The message contains
            the stacks of all processes that were still running.
    """
    deadline, found = time.monotonic() + limit_s, dict[int, Any]()
    stacks: str | None = None
    with running_ranks(ranks, program) as running:
        while len(found) < ranks:
            missing = {number: running[number] for number in range(ranks) if number not in found}
            wait([each.results for each in missing.values()], min(PAUSE_S, max(0, deadline - time.monotonic())))
            is_late = time.monotonic() > deadline
            for number, (process, results) in missing.items():
                is_alive = process.is_alive()
                if results.poll():
                    found[number] = received(results)
                elif not is_alive:
                    found[number] = Failure(f"ended without a result, with exit code {process.exitcode}")
            if stacks is None and (is_late or failures_in(found)):
                stacks = stacks_of(processes_of(running))
                deadline = min(deadline, time.monotonic() + GRACE_S)
            elif is_late:
                found |= {number: Failure("did not end in time") for number in missing if number not in found}
        for number, rank in enumerate([] if failures_in(found) else running):
            rank.process.join(LEFT_S)
            if rank.process.exitcode != 0 or remains(rank):
                found[number] = Failure(f"had exit code {rank.process.exitcode}, or has left a process behind")
                stacks = stacks_of(processes_of(running))
    if failures := failures_in(found):
        raise RuntimeError("\n".join([*failures, stacks or ""]))
    return [found[number] for number in range(ranks)]


@contextmanager
def running_ranks(ranks: int, program: Callable[[int], Any]) -> Iterator[list[Rank]]:
    """Start ranks; finally, kill all that remain, and the processes that they started."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
    context, running = multiprocessing.get_context("fork"), list[Rank]()
    gate = context.Event()
    try:
        for number in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=be_rank, args=(number, ranks, store.port, program, theirs, gate))
            process.start()
            running.append(Rank(process, ours))
            theirs.close()
        gate.set()
        yield running
    finally:
        for rank in running:
            rank.process.kill()
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid or 0, signal.SIGKILL)
            rank.process.join()
            rank.process.close()
            rank.results.close()


def received(results: Connection) -> Any:
    try:
        return results.recv()
    except EOFError:
        return Failure("ended without a result")


def failures_in(found: dict[int, Any]) -> list[str]:
    return [f"Rank {number} {value}" for number, value in sorted(found.items()) if isinstance(value, Failure)]


def remains(rank: Rank) -> bool:
    """Whether processes of a rank keep running."""
    deadline = time.monotonic() + LEFT_S
    while processes_of([rank]):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def processes_of(ranks: Sequence[Rank]) -> list[psutil.Process]:
    """Return the processes in the groups of ranks."""
    groups, found = {rank.process.pid for rank in ranks}, list[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
