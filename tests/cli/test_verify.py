"""The command ``verify``."""

from __future__ import annotations

import json
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from wds_datapipes.prepare.verify import MAX_FAULTS, verify_shards
from wds_datapipes.testing import build_shard


def kinds(done: Any) -> dict[str, int]:
    """The faults that a report counts; the exit code says whether there are any."""
    counts: dict[str, int] = json.loads(done.out)["counts"]
    assert done.code == bool(counts)
    return counts


def photo() -> bytes:
    stream = BytesIO()
    Image.effect_noise((40, 40), 50).convert("RGB").save(stream, "jpeg")
    return stream.getvalue()


def test_every_field_is_decoded(program: Any, folder: Path) -> None:
    good = photo()
    build_shard(
        "d.tar",
        [
            {"__key__": "a", "jpg": good, "cls": "1", "json": "{}"},
            {"__key__": "b", "jpg": good[:-200], "cls": "one", "json": "{", "txt": b"\xff"},
            {"__key__": "c", "jpg": good, "cls": "3", "pyd": pickle.dumps(1), "blob": b"x"},
        ],
    )
    assert kinds(program("verify", "d.tar", "--json")) == {}
    done = program("verify", "d.tar", "--json", "--decode")
    assert kinds(done) == {"DecodeError": 4}
    facts = json.loads(done.out)
    assert [(fault["key"], fault["field"]) for fault in facts["faults"]] == [
        ("b", "jpg"),
        ("b", "cls"),
        ("b", "json"),
        ("b", "txt"),
    ]
    assert facts["notes"] == [
        "d.tar: 1 fields 'pyd' were not decoded, as decoding them can run code",
    ]


def test_many_faults_are_counted_and_some_shown(program: Any, folder: Path) -> None:
    count = MAX_FAULTS + 20
    build_shard("m.tar", [{"__key__": f"{n}", "cls": "x"} for n in range(count)])
    done = program("verify", "m.tar", "--decode", "--show", "2")
    assert done.lines[0] == f"DecodeError ({count}):"
    assert done.lines[3] == f"  ... and {count - 2} more"
    assert done.lines[-1].endswith(f": {count} faults in 1 shard")
    done = program("verify", "m.tar", "--decode", "--json")
    assert (kinds(done)["DecodeError"], len(json.loads(done.out)["faults"])) == (count, MAX_FAULTS)


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
    monkeypatch.setattr("wds_datapipes.prepare.verify._digest", lambda key: int(key[1]))
    assert repeated("a.tar", "b.tar") == []
    assert repeated("a.tar", "b.tar", "./a.tar") == ["a0", "a1", "a2"]
