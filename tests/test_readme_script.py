"""The script of the README continues after kill -9 with the same samples, as in its picture."""

from __future__ import annotations

import fcntl
import html
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from terminal import PICTURE, script, steps

from wds_datapipes.tools.cli.demo import write_photographs


def start() -> subprocess.Popen[str]:
    """Start the script. It is never more than a page of output ahead of the reader, so it cannot end unread."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "train.py"], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 1 << 12)
    return process


def without_losses(lines: dict[int, str]) -> dict[int, str]:
    """Return the keys of the first samples; losses depend on the processor."""
    return {step: line.split()[-1] for step, line in lines.items()}


@pytest.fixture
def shards(folder: Path) -> None:
    Path("wds-datapipes-demo").mkdir()
    write_photographs(Path("wds-datapipes-demo"))
    Path("train.py").write_text(script())


@pytest.mark.timeout(300)
def test_the_script_continues_with_the_next_sample_after_a_kill(shards: None) -> None:
    with start() as process:
        assert process.stdout is not None
        whole = steps(process.stdout.read().splitlines())
    assert [*whole] == [*range(1, len(whole) + 1)]
    Path("checkpoint.pt").unlink()
    with start() as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().rstrip() for _ in range(25)]
        process.kill()
        before = steps(lines + process.stdout.read().splitlines())
    assert process.returncode == -9
    found: tuple[int, Any] = torch.load("checkpoint.pt")
    assert 20 <= found[0] < len(whole)
    with start() as process:
        assert process.stdout is not None
        after = steps(process.stdout.read().splitlines())
    keys = without_losses(whole)
    assert without_losses({**before, **after}) == keys
    assert min(after) == found[0] + 1
    again = before.keys() & after.keys()
    assert {step: before[step] for step in again} == {step: after[step] for step in again}  # with the same losses
    # The picture shows the same run.
    text = html.unescape(re.sub("<[^>]*>", "\n", PICTURE.read_text("utf-8"))).replace("\N{NO-BREAK SPACE}", " ")
    first, second = (steps(part.splitlines()) for part in text.split("Killed"))
    assert without_losses(first) == {step: keys[step] for step in first}
    assert second.items() <= first.items()
    assert len(second) == 3
