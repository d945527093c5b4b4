"""Ranks of a process group, as forks of this process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import destroy_process_group, init_process_group


def be_rank(rank: int, folder: Path, program: Callable[[int], Any], results: Any) -> None:
    init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        results.put((rank, program(rank)))
    except BaseException as error:
        results.put((rank, repr(error)))
        raise
    finally:
        destroy_process_group()


def on_two_ranks(folder: Path, program: Callable[[int], Any]) -> list[Any]:
    """Return the results of a program, called with the number of its rank, on each of two ranks."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=be_rank, args=(rank, folder, program, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get() for _ in ranks)
    for process in ranks:
        process.join()
        assert process.exitcode == 0, found
        process.close()
    results.close()
    return [found[rank] for rank in range(2)]
