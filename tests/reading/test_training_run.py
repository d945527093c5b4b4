"""A training run of two ranks, of which one is killed, and what becomes of it when it is started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("training_run.py")

#: How long a run may take before it counts as a hang, in seconds.
LIMIT_S = 200

pytestmark = pytest.mark.timeout(3 * LIMIT_S)

SHARDS, SAMPLES, EPOCHS = 8, 12, 2
KEYS = sorted(f"{epoch}/{shard}-{n}" for epoch in range(EPOCHS) for shard in range(SHARDS) for n in range(SAMPLES))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        samples = [{"__key__": f"{shard}-{number}", "cls": str(shard + number)} for number in range(SAMPLES)]
        build_shard(folder / f"{shard}.tar", samples)
    return folder


def run(shards: Path, folder: Path, ranks: int, dies_at: int = 0) -> int:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, SCRIPT, shards, folder, str(dies_at)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert dies_at or not done.returncode, done.stderr
    return done.returncode


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(shards, folder, 2)
    found = results(folder, 2)
    assert sorted(key for rank in found for key in rank["keys"]) == KEYS
    assert found[0]["weights"] == found[1]["weights"]
    return found


@pytest.mark.parametrize("dies_at", [5, 17])
def test_a_run_that_was_killed_goes_on_to_the_same_end(
    dies_at: int, shards: Path, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """In the first epoch, and in the second: the keys in their order, and the weights, to the last bit."""
    assert run(shards, tmp_path, 2, dies_at) != 0
    assert not list(tmp_path.glob("*.json"))
    run(shards, tmp_path, 2)
    assert results(tmp_path, 2) == undisturbed


def test_a_run_that_was_killed_goes_on_with_one_rank_and_each_sample_comes_once(shards: Path, tmp_path: Path) -> None:
    assert run(shards, tmp_path, 2, dies_at=8) != 0
    run(shards, tmp_path, 1)
    (alone,) = results(tmp_path, 1)
    assert sorted(alone["keys"]) == KEYS
