"""Runs of pytest in a process of its own, on the checkout or on a copy that has a mutant."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from mutants import Mutant
from mutation_plugin import JOURNAL, SELECTION

PLUGINS = Path(__file__).parent
ROOT = PLUGINS.parents[2]
NOT_COPIED = [".git", ".nox", ".venv", ".*_cache", ".cache", ".hypothesis", "__pycache__", "site"]
#: A test may take this long, and a run of pytest besides its tests.
TEST_SECONDS, RUN_SECONDS = 20.0, 180.0


class Test(NamedTuple):
    """A test that ended."""

    seconds: float
    failed: bool


class Ran(NamedTuple):
    """The exit status of pytest, or none if it took too long, its output, and the tests that ended."""

    status: int | None
    output: str
    tests: dict[str, Test]


def run_selected(root: Path, time_outs: dict[str, float], folder: Path, *, stop: bool = True) -> Ran:
    """Run tests in their order, without coverage, up to the first failure."""
    selection = folder / "selection"
    selection.write_text(json.dumps(time_outs))
    files = dict.fromkeys(name.partition("::")[0] for name in time_outs)
    seconds = RUN_SECONDS + sum(time_outs.values()) - TEST_SECONDS * (len(time_outs) - 1)
    arguments = [*files, *(["-x"] if stop else [])]
    return run_pytest(root, arguments, folder, {SELECTION: str(selection)}, ["pytest"], seconds)


def run_pytest(
    root: Path,
    arguments: list[str],
    folder: Path,
    variables: dict[str, str],
    command: list[str],
    seconds: float | None = None,
) -> Ran:
    """Run pytest on the package in a folder, and end all processes that its tests leave."""
    journal = folder / "journal"
    journal.write_text("")
    token = uuid.uuid4().hex
    environment = {**os.environ, **variables, JOURNAL: str(journal), "MUTATION_RUN": token}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(PLUGINS)])
    options = ["-q", "-p", "mutation_plugin", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *options, *arguments],
            cwd=root,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_all(token)
            process.wait()
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    tests = {name: Test(seconds, failed) for name, seconds, failed in rows}
    return Ran(status, (folder / "output").read_text(errors="replace"), tests)


def kill_all(token: str) -> None:
    """Kill the processes that inherited the token of a run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MUTATION_RUN") == token:
                process.kill()


@contextlib.contextmanager
def copy_of_checkout() -> Iterator[Path]:
    """Copy the checkout to a temporary folder, and compile it so that Python notices each change of a source."""
    with TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder, "checkout")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        # By default, bytecode is that of the source if size and time agree, and a mutant has the same within a second.
        compilation = ["compileall", "-q", "--invalidation-mode", "checked-hash", "wds_datapipes"]
        subprocess.run([sys.executable, "-m", *compilation], cwd=copy, check=True)
        yield copy


@contextlib.contextmanager
def mutated(copy: Path, mutant: Mutant) -> Iterator[None]:
    """Change the copy while the tests run."""
    source = (copy / mutant.path).read_bytes()
    (copy / mutant.path).write_bytes(mutant.apply(source))
    try:
        yield
    finally:
        (copy / mutant.path).write_bytes(source)
