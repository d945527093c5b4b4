"""Hundreds of loaders that are started, interrupted and shut down, and many epochs: no hang, and no leak."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sweeps import WHOLE

#: The number of loaders, and of epochs of each kind.
CYCLES = 1000 if WHOLE else 120
EPOCHS = 100 if WHOLE else 60
PARTS = 2

#: The growth of a process allowed in two thirds of its run, in bytes: as much as its memory fluctuates.
GROWTH = 8_000_000

# The script itself exits if a loader hangs.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.alone]


def soak(folder: Path, *arguments: list[str]) -> list[dict[str, Any]]:
    """Run the script with several lists of arguments at the same time."""
    script = Path(__file__).with_name("service_soak.py")
    environment = {**os.environ, "FAULTS_FOLDER": str(folder)}
    running = [
        subprocess.Popen(
            [sys.executable, script, *each], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for each in arguments
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * len(running), outputs
    assert [errors for _, errors in outputs] == [""] * len(running)
    return [json.loads(answer) for answer, _ in outputs]


def test_no_loader_of_hundreds_hangs_or_leaves_anything(tmp_path: Path) -> None:
    parts = soak(tmp_path, *(["cycles", str(CYCLES // PARTS), str(seed)] for seed in range(PARTS)))
    assert sum(part["cycles"] for part in parts) == CYCLES
    assert all(len(part["hows"]) == 9 for part in parts)
    assert all(part["growth"] < GROWTH for part in parts), parts


def test_no_process_grows_over_many_whole_and_interrupted_epochs(tmp_path: Path) -> None:
    (whole,) = soak(tmp_path, ["epochs", str(EPOCHS), "0"])
    assert whole["growth"] < GROWTH
