"""Mixtures and streams of real ranks resume from their states, within an epoch and between two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ShardList
from wds_datapipes.testing import build_shard, check_resume

SCRIPT = Path(__file__).with_name("streams_scenarios.py")
RANKS = 2
#: The sizes of the shards of two datasets. With two workers, each worker of each rank has one shard of each.
SIZES = {"a": (9, 4, 12, 7), "b": (5, 8, 6, 3)}
KEYS = sorted(
    f"{name}{shard}-{n}" for name, sizes in SIZES.items() for shard, size in enumerate(sizes) for n in range(size)
)

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    for name, sizes in SIZES.items():
        for shard, size in enumerate(sizes):
            samples = [{"__key__": f"{name}{shard}-{number}", "cls": str(number)} for number in range(size)]
            build_shard(folder / f"{name}{shard}.tar", samples)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """The results of each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would otherwise print a notice about it
    done = subprocess.run([*command, SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("pipe", ["mixture", "mixed_stream", "recipe"])
def test_ranks_resume_within_an_epoch_and_between_two(results: Results, pipe: str, workers: int) -> None:
    for rank in results:
        found = rank[f"{pipe} {workers}"]
        assert found["epochs"] == found["whole"]
        assert len({str(epoch) for epoch in found["whole"]}) == 3


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_epochs_of_resumed_ranks_contain_the_right_items(results: Results, workers: int) -> None:
    for epochs in zip(*(rank[f"mixture {workers}"]["epochs"] for rank in results), strict=True):
        assert sorted(key for epoch in epochs for key in epoch) == KEYS
    for pipe, count in (("mixed_stream", 9), ("recipe", 7)):
        assert [[len(epoch) for epoch in rank[f"{pipe} {workers}"]["epochs"]] for rank in results] == [
            [count] * 3
        ] * RANKS
    assert {len(batch) for rank in results for epoch in rank[f"recipe {workers}"]["epochs"] for batch in epoch} == {3}
    assert results[0][f"recipe {workers}"] != results[1][f"recipe {workers}"]


def test_check_resume_finds_no_fault_in_mixtures_and_streams(folder: Path) -> None:
    def drawn() -> Any:
        return ShardList(f"{folder}/a{{0..3}}.tar").resample_wds_shards().load_wds_shards().group_samples()

    def mixture() -> Any:
        other = ShardList(f"{folder}/b{{0..3}}.tar").sharding_filter().load_wds_shards().group_samples()
        mixed = other.shuffle_samples(3).mix_samples(drawn(), weights=[2, 1])
        return mixed.shuffle_samples(4).to_tuple("__key__")

    def stream() -> Any:
        return drawn().shuffle_samples(6).to_tuple("__key__").batch(3).with_epoch(7)

    check_resume(mixture, workers=2, cuts=4)
    check_resume(stream, workers=2, cuts=4)
