"""The example of a training run that dies, and its result after a restart.

The script is that of docs/tutorials/train-and-resume.md, verbatim.
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

SCRIPT = Path(__file__).parents[3] / "docs/examples/train_and_resume.py"

#: The time limit before a run counts as a hang, in seconds.
LIMIT_S = 300

pytestmark = pytest.mark.timeout(4 * LIMIT_S)

#: Uneven, so that one rank reaches the end of an epoch before the other.
SIZES = (12, 3, 24, 8, 1, 17, 9, 20)
EPOCHS = 2
KEYS = sorted(
    f"epoch {epoch}: {shard}-{n}" for epoch in range(EPOCHS) for shard, size in enumerate(SIZES) for n in range(size)
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard, size in enumerate(SIZES):
        samples = [{"__key__": f"{shard}-{number}", "cls": str(shard + number)} for number in range(size)]
        build_shard(folder / f"{shard}.tar", samples)
    return folder


def run(shards: Path, folder: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(SCRIPT), f"{shards}/*.tar", "--folder", str(folder), "--epochs", str(EPOCHS), *options),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # torchrun would otherwise print a notice about it
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def end_of(shards: Path, folder: Path, ranks: int) -> Any:
    """Run to the end; return the output, and the keys that each rank has seen with the weights."""
    done = run(shards, folder, ranks)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "end.pt", weights_only=True)
    return done.stdout, {"seen": found["seen"], "model": {name: each.tolist() for name, each in found["model"].items()}}


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    printed, end = end_of(shards, tmp_path_factory.mktemp("undisturbed"), 2)
    seen = end["seen"]
    assert sorted(seen[0] + seen[1]) == KEYS
    assert len(seen[0]) != len(seen[1])
    return int(printed.removeprefix("Finished after ").removesuffix(" steps\n")), end


@pytest.mark.parametrize("half", range(2) if os.environ.get("WHOLE_SWEEPS") else [None])
def test_a_run_with_a_killed_rank_ends_like_an_undisturbed_one(
    half: int | None, shards: Path, tmp_path: Path, undisturbed: Any
) -> None:
    """Killed at any step: with two ranks the keys in their order, and the weights, to the last bit."""
    steps, expected = undisturbed
    step = random.randrange(steps) if half is None else half * (steps // 2) + random.randrange(steps // 2)
    died = run(shards, tmp_path / "two", 2, "--die-at", str(step))
    assert died.returncode != 0
    assert f"exitcode  : {-signal.SIGKILL}" in died.stderr
    assert not (tmp_path / "two/end.pt").exists()
    shutil.copytree(tmp_path / "two", tmp_path / "one")

    printed, end = end_of(shards, tmp_path / "two", 2)
    saved = step - step % 3
    assert end == expected, f"killed at step {step}"
    assert (f"resume from step {saved}," in printed) == (saved > 0)

    _, end = end_of(shards, tmp_path / "one", 1)
    assert [sorted(seen) for seen in end["seen"]] == [KEYS], f"killed at step {step}"
