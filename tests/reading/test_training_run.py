"""The example of a training run that dies: what becomes of it when it is started again.

The script is that of docs/tutorials/train-and-resume.md, as it stands there.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).parents[2] / "docs/examples/train_and_resume.py"

#: How long a run may take before it counts as a hang, in seconds.
LIMIT_S = 200

pytestmark = pytest.mark.timeout(4 * LIMIT_S)

SHARDS, SAMPLES, EPOCHS = 8, 12, 2
KEYS = sorted(
    f"epoch {epoch}: {shard}-{n}" for epoch in range(EPOCHS) for shard in range(SHARDS) for n in range(SAMPLES)
)
STEPS = len(KEYS) // 8  # of two ranks, with batches of 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        samples = [{"__key__": f"{shard}-{number}", "cls": str(shard + number)} for number in range(SAMPLES)]
        build_shard(folder / f"{shard}.tar", samples)
    return folder


def run(shards: Path, folder: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(SCRIPT), f"{shards}/*.tar", "--folder", str(folder), "--epochs", str(EPOCHS), *options),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # which torchrun would otherwise talk about
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def end_of(shards: Path, folder: Path, ranks: int) -> Any:
    """Run to the end; return what was printed, the keys that each rank has seen, and the weights."""
    done = run(shards, folder, ranks)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "end.pt", weights_only=True)
    return done.stdout, found["seen"], {name: weight.tolist() for name, weight in found["model"].items()}


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    printed, seen, weights = end_of(shards, tmp_path_factory.mktemp("undisturbed"), 2)
    assert printed == f"The end, after {STEPS} steps\n"
    assert len(seen) == 2
    assert sorted(seen[0] + seen[1]) == KEYS
    return seen, weights


@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_a_run_of_which_a_rank_is_killed_ends_as_if_nothing_had_happened(
    epoch: int, shards: Path, tmp_path: Path, undisturbed: Any
) -> None:
    """At any step of an epoch: with two ranks the keys in their order, and the weights, to the last bit."""
    of_an_epoch = STEPS // EPOCHS
    step = epoch * of_an_epoch + random.randrange(of_an_epoch)
    died = run(shards, tmp_path / "two", 2, "--die-at", str(step))
    assert died.returncode != 0
    assert f"exitcode  : {-signal.SIGKILL}" in died.stderr
    assert not (tmp_path / "two/end.pt").exists()
    shutil.copytree(tmp_path / "two", tmp_path / "one")

    printed, *end = end_of(shards, tmp_path / "two", 2)
    saved = step - step % 3
    assert end == [*undisturbed], f"killed at step {step}"
    assert (f"go on from step {saved}," in printed) == (saved > 0)

    _, (seen,), _ = end_of(shards, tmp_path / "one", 1)
    assert sorted(seen) == KEYS, f"killed at step {step}"
