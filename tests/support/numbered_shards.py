"""Shards of numbered samples, which most tests of loaders read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.testing import build_shard


def write_numbered(folder: Path, sizes: Sequence[int]) -> str:
    """Write shards with these numbers of samples, and return their pattern; ``0.tar`` contains ``0-0`` and so on."""
    for shard, size in enumerate(sizes):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}-{n}", "cls": f"{n}"} for n in range(size)])
    return f"{folder}/{{0..{len(sizes) - 1}}}.tar"


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def numbered_shards(sizes: Sequence[int]) -> Any:
    """Return a fixture that runs each test of a module in a folder with such shards."""

    @pytest.fixture(autouse=True)
    def shards(folder: Path) -> None:
        write_numbered(folder, sizes)

    return shards
