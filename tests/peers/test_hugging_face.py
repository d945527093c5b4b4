"""The Trainer of Hugging Face trains on indexed samples, and resumes from its own checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

from numbered_shards import write_numbered

SCRIPT = str(Path(__file__).with_name("trainer_run.py"))
KEYS = sorted(f"{shard}-{number}" for shard in range(4) for number in range(10))
#: The number of batches per epoch on each of the two ranks.
LENGTH = 4


def train(folder: Path, name: str, stop: int = 0, checkpoint: str = "") -> list[list[list[str]]]:
    """Train on two ranks, and return the keys of the batches of each."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, SCRIPT, name, str(stop), checkpoint],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def test_ranks_train_on_each_sample_once_and_resume(tmp_path: Path) -> None:
    write_numbered(tmp_path, [10] * 4)
    whole = train(tmp_path, "whole")
    assert [len(rank) for rank in whole] == [2 * LENGTH] * 2
    epochs = [[*chain(*(batch for rank in whole for batch in rank[at : at + LENGTH]))] for at in (0, LENGTH)]
    assert [sorted(epoch) for epoch in epochs] == [KEYS] * 2
    assert epochs[0] != epochs[1]
    stopped = train(tmp_path, "stopped", stop=3)
    resumed = train(tmp_path, "stopped", checkpoint="stopped/checkpoint-3")
    assert [one + two for one, two in zip(stopped, resumed, strict=True)] == whole
