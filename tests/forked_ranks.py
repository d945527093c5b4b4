"""Ranks of a process group, as forks of this process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import destroy_process_group, init_process_group


def be_rank(rank: int, ranks: int, port: int, program: Callable[[int], Any], results: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        results.put((rank, program(rank)))
    except BaseException as error:
        results.put((rank, repr(error)))
        raise
    finally:
        destroy_process_group()


def on_ranks(ranks: int, program: Callable[[int], Any]) -> list[Any]:
    """Return the results of a program, called with the number of its rank, on each of some ranks."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
    processes = [context.Process(target=be_rank, args=(n, ranks, store.port, program, results)) for n in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0, found
        process.close()
    results.close()
    return [found[rank] for rank in range(ranks)]
