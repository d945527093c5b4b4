"""Megatron Energon's own tool writes the same indexes as we do.

This needs the packages of the dependency group ``energon``; `nox -s "peers(energon)"` has them.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from wds_datapipes.index import write_energon_index

COUNT = 5


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_its_own_tool_writes_the_same_indexes(kind: int, tmp_path: Path) -> None:
    """The names of members are so long that the format has headers for them."""
    with tarfile.open(tmp_path / "a.tar", "w", format=kind) as tar:
        for number in range(COUNT):
            key = f"{'k' * (20 if kind == tarfile.USTAR_FORMAT else 120)}{number}"
            for field, data in (("txt", "text" * (1 + number * 99)), ("cls", f"{number}")):
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size, member.mtime = len(data), 1.5 if kind == tarfile.PAX_FORMAT else 1
                tar.addfile(member, io.BytesIO(data.encode()))
    assert len(write_energon_index(tmp_path / "a.tar")) == COUNT
    ours = (tmp_path / "a.tar.idx").read_bytes()
    (tmp_path / "a.tar.idx").unlink()
    WebdatasetPreparator.prepare_dataset(
        tmp_path, ["a.tar"], split_parts_ratio=[("train", 1.0)], workers=1, shuffle_seed=None
    )
    assert (tmp_path / "a.tar.idx").read_bytes() == ours
