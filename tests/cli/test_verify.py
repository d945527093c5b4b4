"""The command ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.prepare.verify import verify_shards
from wds_datapipes.testing import build_shard


def test_workers_find_what_one_process_finds(program: Any, shards: list[str], nothing_left: None) -> None:
    build_shard("b.tar", [{"__key__": "02", "cls": "x"}])
    Path("cut.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    one, three = (
        program("verify", *shards, "b.tar", "cut.tar", "--decode", "--num-workers", workers) for workers in ("1", "3")
    )
    assert one == three
    assert one.code == 1


def test_keys_are_compared_and_not_their_digests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "txt": "x"} for n in range(3)])

    def repeated(*urls: str) -> list[str]:
        return [fault.key for shard in verify_shards(urls, num_workers=0) for fault in shard.faults]

    assert repeated("a.tar", "b.tar") == []
    monkeypatch.setattr("wds_datapipes.prepare.verify.hash", lambda key: int(key[1]), raising=False)
    assert repeated("a.tar", "b.tar") == []
    assert repeated("a.tar", "b.tar", "./a.tar") == ["a0", "a1", "a2"]
