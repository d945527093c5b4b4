"""Programs with a release of torch that warns of datapipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks_of

from wds_datapipes.tools.cli.demo import write_photographs

#: The program of the README, which prints each step.
README = next(each.text for each in blocks_of((ROOT / "README.md").read_text("utf-8")) if each.kind == "python")


def run(program: str) -> tuple[str, str]:
    """Return what a program prints with such a release of torch, in which warnings are errors."""
    Path("program.py").write_text(program)
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}"
    environ = {**os.environ, "PYTHONPATH": path, "IMPORTED_FIRST": "release_that_warns"}
    command = [sys.executable, "-W", "error", "program.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout, done.stderr


@pytest.fixture
def shards(folder: Path) -> None:
    """What the command above the program in the README writes."""
    Path("wds-datapipes-demo").mkdir()
    write_photographs(Path("wds-datapipes-demo"))


def test_no_warning_of_torch_reaches_a_program(shards: None) -> None:
    assert "UserWarning: torch.utils.data.datapipes is deprecated" in run("import torch.utils.data")[1]
    out, errors = run(f"import wds_datapipes\n{README}\nclass Own(wds_datapipes.Stage): pass")
    assert (out.splitlines()[-1][:8], errors) == ("step 148", "")
