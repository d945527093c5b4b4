"""What tests of several folders share, and where the examples in docstrings run."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Before a test module imports torchdata: that alone would show its banner, and a warning is an error here.
import wds_datapipes


@pytest.fixture(autouse=True)
def example_surroundings(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Run a docstring's example in a folder of its own, with the public names at hand; other tests go without."""
    if isinstance(request.node, pytest.DoctestItem):
        doctest_namespace.update({name: getattr(wds_datapipes, name) for name in wds_datapipes.__all__})
        folder: Path = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Make sure that a test leaves no process and no open descriptor, even before garbage is collected."""
    gc.collect()
    gc.disable()  # what only a collection would close does not count as closed
    before = opened()
    others = set(psutil.Process().children())  # such as multiprocessing's own, once a test has spawned a worker
    yield
    for _ in range(100):  # a thread of torch may take a moment to close what it has
        if opened() <= before:
            break
        time.sleep(0.01)
    left = {os.readlink(f"/proc/self/fd/{number}") for number in opened() - before}
    children = set(psutil.Process().children()) - others
    gc.enable()
    assert left == set()
    assert children == set()


@pytest.fixture
def closed_garbage() -> Iterator[None]:
    """Close what webdataset leaves to the garbage collection, while nobody minds: a later test would be blamed."""
    yield
    gc.collect()


def opened() -> set[str]:
    """Return the numbers of this process's open descriptors, without the one that lists them."""
    numbers = os.listdir("/proc/self/fd")
    return {number for number in numbers if Path(f"/proc/self/fd/{number}").exists()}
