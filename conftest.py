"""Where the examples in docstrings run: in a folder of their own, with the public names at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wds_datapipes


@pytest.fixture(autouse=True)
def example_surroundings(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Give a docstring's example what a user has who reads it; all other tests go without."""
    if isinstance(request.node, pytest.DoctestItem):
        doctest_namespace.update({name: getattr(wds_datapipes, name) for name in wds_datapipes.__all__})
        folder: Path = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)
