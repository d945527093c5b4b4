"""Ranks forked by tests never block a test without an explanation."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import on_ranks
from torch.utils.data import DataLoader, IterableDataset


def wait_forever(folder: Path) -> None:
    (folder / f"waiting-{os.getpid()}").touch()
    threading.Event().wait()


class Endless(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Any:
        wait_forever(self.folder)


def test_results_are_in_the_order_of_the_ranks() -> None:
    def gather(rank: int) -> Any:
        found: list[Any] = [None] * 3
        dist.all_gather_object(found, rank)
        return rank, found

    assert on_ranks(3, gather) == [(rank, [0, 1, 2]) for rank in range(3)]


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_failure_shows_where_the_processes_of_the_other_ranks_are(tmp_path: Path, how: str) -> None:
    def program(rank: int) -> None:
        if rank == 0:
            list(DataLoader(Endless(tmp_path), batch_size=None, num_workers=1))
        elif rank == 1:
            wait_forever(tmp_path)
        while len(list(tmp_path.glob("waiting-*"))) < 2:
            time.sleep(0.01)
        if how == "dies":
            os._exit(3)
        raise KeyError("lost")

    text = {"raises": "Rank 2 Traceback .*KeyError: 'lost'", "dies": "Rank 2 ended without a result"}[how]
    with pytest.raises(RuntimeError, match=rf"(?s){text}.*in wait_forever") as caught:
        on_ranks(3, program)
    stacks = str(caught.value)
    assert stacks.count("in wait_forever") == 2
    assert "_worker_loop" in stacks  # of the worker, beside that of its rank
    for process in re.findall(r"Process (\d+) of", stacks):
        assert not Path(f"/proc/{process}/task").exists() or "Z" in Path(f"/proc/{process}/stat").read_text().split()[2]


def test_a_rank_that_does_not_end_is_an_error() -> None:
    def program(rank: int) -> None:
        dist.barrier()  # a rank that ends sooner breaks the connections of the other
        if rank:
            threading.Event().wait()

    with pytest.raises(RuntimeError, match=r"Rank 1 did not end in time"):
        on_ranks(2, program, limit_s=0)
