"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no process and no open descriptor behind, even before garbage is collected."""
    gc.collect()
    gc.disable()  # what only a collection would close does not count as closed
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = {os.readlink(f"/proc/self/fd/{number}") for number in opened() - before}
    children = psutil.Process().children()
    gc.enable()
    assert left == set()
    assert children == []


def opened() -> set[str]:
    """The numbers of this process's open descriptors, without the one that lists them."""
    numbers = os.listdir("/proc/self/fd")
    return {number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")}
