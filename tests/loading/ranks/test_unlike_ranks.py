"""Ranks that differ in their number of workers, or in the list of shards, are refused before they lose data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("unlike_ranks.py")
RANKS = 2
KEYS = sorted(f"{shard}/{number}" for shard in range(6) for number in range(3))

Results = dict[str, list[list[str] | str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each scenario, on each rank."""
    folder = tmp_path_factory.mktemp("unlike")
    for shard in range(6):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}/{number}", "cls": "1"} for number in range(3)])
    for rank in range(RANKS):
        (folder / str(rank)).mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would otherwise print a notice about it
    done = subprocess.run([*command, SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", ["service", "service, own folders", "service, own split", "torch", "torch, own split"])
def test_ranks_that_agree_read_each_sample_once(results: Results, name: str) -> None:
    assert sorted(key for read in results[name] for key in read) == KEYS


@pytest.mark.parametrize("name", ["service, workers", "torch, workers", "torch, workers, not tracked"])
def test_other_numbers_of_workers_are_refused(results: Results, name: str) -> None:
    text = "\n".join(read for read in results[name] if isinstance(read, str))
    assert "2 workers" in text
    assert "one process" in text
    assert "Give every rank the same num_workers" in text


@pytest.mark.parametrize("name", ["service, lists", "torch, lists", "torch, lists of a stream", "sequential, lists"])
def test_lists_that_are_split_by_hand_are_refused(results: Results, name: str) -> None:
    text = "\n".join(read for read in results[name] if isinstance(read, str))
    assert "lists 3 shards from 0.tar" in text
    assert "lists 3 shards from 1.tar" in text
    assert "without urls[rank::ranks]" in text


@pytest.mark.parametrize("name", ["service, workers", "service, lists"])
def test_all_ranks_of_a_service_end(results: Results, name: str) -> None:
    assert {type(read) for read in results[name]} == {str}
