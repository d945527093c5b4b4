"""The command ``map``."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from readers import samples_in

#: Commands of this process are identified by this sleeping time in seconds.
LONG_S = f"600.{os.getpid()}"


def test_a_killed_process_is_replaced_and_leaves_nothing(program: Any, shards: list[str], nothing_left: None) -> None:
    """The first command kills the worker that runs it, and would keep its process group busy for a minute."""
    # $PPID is the process that ends the shell along with the worker; its own parent is the worker.
    kill = "kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)"
    command = f"mkdir {Path.cwd()}/once 2>/dev/null && {{ {kill}; sleep {LONG_S}; }}; :"
    place = Path("scratch")
    place.mkdir()
    before = tempfile.tempdir
    tempfile.tempdir = str(place)
    try:
        done = program("map", *shards, "-c", command, "-o", "o/")
    finally:
        tempfile.tempdir = before
    assert done.code == 0
    assert "will be retried: WorkerDiedError" in done.err
    assert [samples_in(f"o/{shard}") for shard in shards] == [samples_in(shard) for shard in shards]
    assert list(place.iterdir()) == []
    while any(each.info["cmdline"] == ["sleep", LONG_S] for each in psutil.process_iter(["cmdline"])):
        time.sleep(0.02)  # a killed process takes a moment to exit


def test_an_error_in_the_module_keeps_its_traceback(program: Any, shards: list[str]) -> None:
    Path("broken.py").write_text("import nosuchpackage\n")
    with pytest.raises(ModuleNotFoundError, match="nosuchpackage"):
        program("map", "a-0.tar", "-o", "o/", "-f", "broken:f")


@pytest.mark.parametrize("work", [["-f", "mapping:forgets"], ["-c", "rm sample.*"]])
def test_dropping_all_samples_is_noticed(process: Any, shards: list[str], work: list[str]) -> None:
    Path("mapping.py").write_text("def forgets(sample): {**sample, 'label': b'n'}\n")
    done = process("map", *shards, *work, "-o", "o/")
    assert done.code == 0
    assert "0 samples of " in done.out.decode()
    warning = r"Warning: The function dropped all \d+ samples, which leaves 3 new shards .* to keep it\n"
    assert re.fullmatch(warning, done.err)
