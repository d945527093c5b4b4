"""Epochs of real ranks: the order of shards, equal epochs, and every sample once."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("epochs_scenarios.py")
RANKS = 2
EPOCHS = 3
#: How many samples each shard has. Some ranks have many more than others, and some of three workers have no shard.
SIZES = (5, 1, 9, 30, 3)
KEYS = sorted(f"{shard}/{number}" for shard, size in enumerate(SIZES) for number in range(size))

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each rank."""
    folder = tmp_path_factory.mktemp("epochs")
    for shard, size in enumerate(SIZES):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}/{number}", "cls": "1"} for number in range(size)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would otherwise print a notice about it
    done = subprocess.run([*command, SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def items_of_epochs(results: Results, name: str) -> list[list[Any]]:
    """For each epoch, the items of all ranks."""
    return [list(itertools.chain(*ranks)) for ranks in zip(*(rank[name] for rank in results), strict=True)]


@pytest.mark.parametrize("workers", [0, 3])
def test_torchs_loader_yields_every_sample_once_per_epoch(results: Results, workers: int) -> None:
    """Also with three workers, which are more than the shards of a rank."""
    epochs = items_of_epochs(results, f"keys by torch {workers}")
    assert len(epochs) == EPOCHS
    assert [sorted(key for (key,) in epoch) for epoch in epochs] == [KEYS] * EPOCHS


@pytest.mark.parametrize("workers", [0, 1])
def test_the_passes_of_a_stream_have_one_order_on_all_ranks(results: Results, workers: int) -> None:
    """A rank has three shards in one pass and two in the next, so ranks reach a pass in different epochs."""
    assert [[len(epoch) for epoch in rank[f"passes {workers}"]] for rank in results] == [[6] * 7] * RANKS
    passes: list[dict[int, str]] = [{} for _ in range(17)]
    for rank, own in enumerate(results):
        items = itertools.chain(*own[f"passes {workers}"])
        for number, each in enumerate(passes):
            places = [place for place in range(5) if place % RANKS == (rank + number) % RANKS]
            found = dict(itertools.islice(items, len(places)))
            assert places[: len(found)] == [*found]
            each.update(found)
    whole = [each for each in passes if len(each) == 5]
    assert len(whole) >= 16
    assert all(len(set(each.values())) == 5 for each in whole)
    assert len({tuple(sorted(each.items())) for each in whole}) > 10


def test_workers_without_a_shard_have_one_in_another_pass(results: Results) -> None:
    """Of five shards, worker 2 of rank 1 has none in the first pass."""
    assert [[len(epoch) for epoch in rank["passes 3"]] for rank in results] == [[6] * 7] * RANKS


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resampled_epoch_has_equal_numbers_of_full_batches_on_all_ranks(results: Results, workers: int) -> None:
    epochs = [rank[f"resampled {workers}"]["epochs"] for rank in results]
    assert [[list(map(len, epoch)) for epoch in rank] for rank in epochs] == [[[4] * 13] * EPOCHS] * RANKS
    assert len({str(epoch) for rank in epochs for epoch in rank}) == RANKS * EPOCHS
    assert results[0][f"resampled {workers}"]["weights"] == results[1][f"resampled {workers}"]["weights"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_split_epoch_yields_every_sample_once_and_unequal_numbers_of_batches(results: Results, workers: int) -> None:
    ranks = [rank[f"split {workers}"]["epochs"] for rank in results]
    for both in zip(*ranks, strict=True):
        assert sorted(key for rank in both for batch in rank for key in batch) == KEYS
        assert len(both[0]) != len(both[1])
    assert results[0][f"split {workers}"]["weights"] == results[1][f"split {workers}"]["weights"]


@pytest.mark.parametrize("name", ["drawn", "drawn by torch"])
def test_every_worker_of_every_rank_draws_different_numbers(results: Results, name: str) -> None:
    streams = [tuple(epoch[worker::2]) for rank in results for epoch in rank[name] for worker in range(2)]
    assert [len(stream) for stream in streams] == [12] * (RANKS * EPOCHS * 2)
    assert len(set(streams)) == len(streams)
    assert len(Counter(itertools.chain(*streams))) == len(SIZES)
