"""Fork hooks: their order, their errors, and that each place in the order has its hook."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.io import after_fork
from wds_datapipes.io.after_fork import ORDER, at_fork

PACKAGE = Path(after_fork.__file__).parents[1]


def fork_with(hooks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Fork with these hooks only; return what the parent and the child have written into one list each."""
    monkeypatch.setattr(after_fork, "_hooks", hooks)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, "\n".join(CALLS).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as lines:
        return [*CALLS], lines.read().splitlines()


CALLS: list[str] = []


def add_hooks(name: str) -> None:
    moments = ("before", "after_in_parent", "after_in_child")
    at_fork(name, **{moment: partial(CALLS.append, f"{moment} {name}") for moment in moments})


def test_hooks_run_in_the_order_of_the_list_and_before_a_fork_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(after_fork, "_hooks", hooks)
    for name in ("segments", "certificates", "workers"):  # as modules are imported, in any order
        add_hooks(name)
    parent, child = fork_with(hooks, monkeypatch)
    before = [f"before {name}" for name in ("segments", "workers", "certificates")]
    assert parent == [*before, *(f"after_in_parent {name}" for name in ("certificates", "workers", "segments"))]
    assert child == [*before, *(f"after_in_child {name}" for name in ("certificates", "workers", "segments"))]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_error_of_a_hook_stops_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(after_fork, "_hooks", hooks)
    add_hooks("certificates")
    at_fork("workers", before=lambda: 1 / 0, after_in_child=lambda: 1 / 0)
    add_hooks("segments")
    _, child = fork_with(hooks, monkeypatch)
    assert child == [
        *("before segments", "before certificates", "after_in_child certificates", "after_in_child segments")
    ]


def test_each_place_in_the_list_belongs_to_one_module() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert sorted(re.findall(r'^ *at_fork\(\s*"([^"]+)"', texts, re.MULTILINE)) == sorted(ORDER)
    assert len(re.findall(r"os\.register_at_fork\(", texts)) == 1


def test_a_name_that_is_not_in_the_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        at_fork("anything")
