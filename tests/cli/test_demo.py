"""The demo does what the README promises, and fails with one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.cli.demo import SCRIPT


@pytest.mark.timeout(900)  # a whole training, which takes half a minute on an idle machine
def test_the_demo_trains_on_shards_that_it_writes(folder: Path) -> None:
    """There is no error and no warning."""
    demo = [sys.executable, "-m", "wds_datapipes", "demo", "--output-dir", "a {b} folder"]
    done = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *_, last, report = done.stdout.splitlines()
    found = re.fullmatch(r"Epoch 8/8   held-out accuracy ([\d.]+)%   loss ([\d.]+) #+", last)
    assert found
    assert float(found[1]) > 90
    assert float(found[2]) < 0.2  # 0.65 in the first epoch
    # 19 batches of 64 or fewer from each worker, whichever 6 of the 12 shards it gets.
    assert report.startswith("8 epochs: 304 items, ")
    assert done.stdout.startswith("Wrote 12 + 3 shards of photographs to a {b} folder\n")
    script = folder / "a {b} folder" / "train.py"
    assert script.read_text() == SCRIPT
    assert SCRIPT in done.stdout


def test_a_folder_that_cannot_be_created_and_a_missing_package_are_errors(
    program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("not a folder")
    done = program("demo", "--output-dir", "file")
    message = "Error: The folder file cannot be created: File exists. Name another with --output-dir\n"
    assert (done.code, done.err) == (2, message)
    missing: Any = None  # makes an import fail
    monkeypatch.setitem(sys.modules, "sklearn.datasets", missing)
    done = program("demo")
    assert done.code == 2
    assert done.err.startswith("Error: 'sklearn.datasets' is needed to ")
    assert done.err.endswith('python -m pip install "wds-datapipes[demo]"\n')
