"""Lightning trains on each loader, and resumes from its own checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from numbered_shards import write_numbered

SCRIPT = str(Path(__file__).with_name("lightning_run.py"))
#: The number of batches per epoch.
LENGTH = 8
KEYS = sorted(f"{shard}-{number}" for shard in range(4) for number in range(10))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the script, and return its folder and its output; importing Lightning takes longer than its training."""
    folder = tmp_path_factory.mktemp("lightning")
    write_numbered(folder, [10] * 4)
    command, environment = [sys.executable, "-W", "ignore", SCRIPT, str(LENGTH)], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def keys_of(batches: list[list[str]]) -> list[str]:
    return sorted(chain(*batches))


def test_a_fit_resumes_from_its_checkpoints_with_the_exact_batches(ended: tuple[Path, str]) -> None:
    told = json.loads(ended[1].splitlines()[-1])
    assert set(told["loaders"]) == {"DataLoader2", "StatefulDataLoader", "DataLoader", "indexed DataLoader2"}
    for name, found in told["loaders"].items():
        whole: list[Any] = found["whole"]
        assert [keys_of(whole[begin : begin + LENGTH]) for begin in range(0, 3 * LENGTH, LENGTH)] == [KEYS] * 3
        # The page describes what a StatefulDataLoader does after the end of an epoch.
        ends = {} if name == "StatefulDataLoader" else {"epoch=0": LENGTH}
        for cut, count in {"step=2": 2, f"step={LENGTH}": LENGTH, f"step={LENGTH + 3}": LENGTH + 3, **ends}.items():
            assert found["rests"][cut] == whole[count:], (name, cut)
    warned = [text for text in told["without a length"] if "Lightning fetches one batch ahead from a loader" in text]
    assert len(set(warned)) == 1
    assert len(warned) >= 3  # of each loader


def test_ranks_share_the_data(ended: tuple[Path, str]) -> None:
    by_default, indexed, map_style = (
        [json.loads(ended[0].joinpath(f"{name}-{rank}.json").read_text()) for rank in range(2)]
        for name in ("by default", "indexed", "map style")
    )
    assert keys_of([batch for rank in by_default for batch in rank["seen"]]) == sorted(3 * KEYS)
    assert not any("ranks" in text for rank in by_default for text in rank["warnings"])
    for equal in (indexed, map_style):
        by_epoch = [[rank["seen"][start : start + LENGTH // 2] for rank in equal] for start in range(0, 12, 4)]
        assert [keys_of(list(chain(*parts))) for parts in by_epoch] == [KEYS] * 3
        assert [len(rank["seen"]) for rank in equal] == [3 * LENGTH // 2] * 2
        assert not any("ranks" in text for rank in equal for text in rank["warnings"])
