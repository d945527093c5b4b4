"""The demo does what the README promises, or fails with one line."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from wds_datapipes.tools.cli import demo
from wds_datapipes.tools.cli.program import main


def test_the_demo_trains_on_shards_that_it_writes(
    program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There are no errors and no warnings; only the number of epochs differs."""
    script = demo.SCRIPT.replace("EPOCHS = 8", "EPOCHS = 3")
    monkeypatch.setattr(demo, "SCRIPT", script)
    done = program("demo", "--output-dir", "a {b} folder")
    assert (done.code, done.err, capfd.readouterr().err) == (0, "", "")
    *_, last, report = done.out.splitlines()
    found = re.fullmatch(r"Epoch 3/3   held-out accuracy ([\d.]+)%   loss ([\d.]+) #+", last)
    assert found
    assert float(found[1]) > 85
    assert float(found[2]) < 0.45  # 0.65 in the first epoch
    # 19 batches of 64 or fewer from each worker, whichever 6 of the 12 shards it gets.
    assert report.startswith("3 epochs: 114 items, ")
    assert done.out.startswith("Wrote 12 + 3 shards of photographs to a {b} folder\n")
    assert (folder / "a {b} folder" / "train.py").read_text() == script
    assert script in done.out


ENDLESS = """
import os
while True:
    print(f"process {os.getpid()}", flush=True)
"""


def run_until_the_output_is_closed(ends: tuple[int, int]) -> None:
    """Run the demo, whose output goes to a pipe."""
    os.close(ends[0])
    os.dup2(ends[1], 1)
    os.close(ends[1])
    os.dup2(os.open("errors.txt", os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115  as in a new process
    sys.argv = ["wds-datapipes", "demo"]
    main()


def test_the_script_ends_with_the_reader_of_its_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SCRIPT", ENDLESS)
    monkeypatch.setattr(demo, "write_photographs", lambda _: ["0.tar"])
    ends = os.pipe()
    running = multiprocessing.get_context("fork").Process(target=run_until_the_output_is_closed, args=(ends,))
    running.start()
    os.close(ends[1])
    with open(ends[0]) as output:
        script = next(int(line[8:]) for line in output if re.fullmatch(r"process \d+\n", line))
    running.join()
    assert (running.exitcode, Path("errors.txt").read_text()) == (141, "")
    assert not psutil.pid_exists(script)


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
