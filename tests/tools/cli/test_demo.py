"""The demo does what the README promises, or fails with one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.tools.cli import demo


def test_the_demo_trains_on_shards_that_it_writes(
    program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There are no errors and no warnings; only the number of epochs differs."""
    script = demo.SCRIPT.replace("EPOCHS = 8", "EPOCHS = 3")
    monkeypatch.setattr(demo, "SCRIPT", script)
    done = program("demo", "--output-dir", "a {b} folder")
    trained = capfd.readouterr()
    assert (done.code, done.err, trained.err) == (0, "", "")
    *_, last, report = trained.out.splitlines()
    found = re.fullmatch(r"Epoch 3/3   held-out accuracy ([\d.]+)%   loss ([\d.]+) #+", last)
    assert found
    assert float(found[1]) > 85
    assert float(found[2]) < 0.45  # 0.65 in the first epoch
    # 19 batches of 64 or fewer from each worker, whichever 6 of the 12 shards it gets.
    assert report.startswith("3 epochs: 114 items, ")
    assert done.out.startswith("Wrote 12 + 3 shards of photographs to a {b} folder\n")
    assert (folder / "a {b} folder" / "train.py").read_text() == script
    assert script in done.out


def test_a_script_that_was_changed_is_not_replaced(program: Any, folder: Path) -> None:
    Path("train.py").write_text(demo.SCRIPT.replace("EPOCHS = 8", "EPOCHS = 80"))
    done = program("demo", "--output-dir", ".")
    assert done.code == 2
    assert done.err.startswith("Error: train.py is not the script of this demo, which would replace it. Run it with ")
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert "EPOCHS = 80" in Path("train.py").read_text()


def test_a_folder_that_cannot_be_created_and_a_missing_package_are_errors(
    program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("not a folder")
    done = program("demo", "--output-dir", "file")
    message = "Error: --output-dir: File exists\n"
    assert (done.code, done.err) == (2, message)
    missing: Any = None  # makes an import fail
    monkeypatch.setitem(sys.modules, "sklearn.datasets", missing)
    done = program("demo")
    assert done.code == 2
    assert done.err.startswith("Error: 'sklearn.datasets' is needed to ")
    assert done.err.endswith('python -m pip install "wds-datapipes[demo]"\n')
