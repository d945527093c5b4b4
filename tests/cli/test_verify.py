"""The command ``verify``."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from wds_datapipes.index import IndexOptions
from wds_datapipes.index.build_many import build_indexes
from wds_datapipes.index.manifest import Manifest, write_manifest
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


def write_names(path: str, *names: str) -> None:
    with tarfile.open(path, "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))


def test_good_shards_have_no_fault(program: Any, shards: list[str]) -> None:
    done = program("verify", "a-{0..2}.tar")
    assert (done.code, done.err) == (0, "")
    assert done.out == "3 shards, 12 samples, 24 files, 30.7 kB: no faults\n"


def test_all_faults_are_found_in_one_run(program: Any, shards: list[str]) -> None:
    build_shard("twice.tar", [{"__key__": "t", "txt": "x", "TXT": "y"}])
    write_names("parts.tar", "p.x", "q.x", "p.y", "README")
    whole = Path("a-1.tar").read_bytes()
    Path("cut.tar").write_bytes(whole[:4000])
    Path("flip.tar").write_bytes(whole[:1024] + bytes([whole[1024] ^ 1]) + whole[1025:])
    Path("page.tar").write_text("<html>404</html>")
    Path("empty.tar").write_bytes(b"")
    done = program("verify", "a-0.tar", "{twice,parts,cut,flip,page,empty,none}.tar")
    assert done.code == 1
    assert done.err == ""
    lines = done.lines
    for heading in (
        "CorruptShardError (1):",
        "DuplicateKeyError (2):",
        "ShardOpenError (1):",
        "TruncatedShardError (3):",
    ):
        assert heading in lines
    assert "Note: parts.tar: 1 files belong to no sample, such as 'README'" in lines
    assert lines[-1].startswith("8 shards, ")
    assert ", more than " in lines[-1]
    assert lines[-1].endswith(" 7 faults in 7 shards")
    assert program("verify", "cut.tar").lines[-1].endswith(" files, unknown size: 1 fault in 1 shard")


def test_concatenated_archives_are_a_fault_and_the_advice_needs_no_option(program: Any, shards: list[str]) -> None:
    Path("two.tar").write_bytes(Path("a-0.tar").read_bytes() * 2)
    found = program("verify", "two.tar").lines[1]
    assert "If archives were concatenated, read them in Python, with .load_wds_shards(ignore_zeros=True)" in found


def test_the_end_marker_may_be_missing_on_request(program: Any, folder: Path) -> None:
    build_shard("open.tar", [{"__key__": "a", "txt": "x"}], end_marker=False)
    assert kinds(program("verify", "open.tar", "--json")) == {"TruncatedShardError": 1}
    assert kinds(program("verify", "open.tar", "--json", "--end-marker", "optional")) == {}


def test_keys_shared_by_shards_are_named(program: Any, shards: list[str]) -> None:
    build_shard("b.tar", [{"__key__": key, "txt": "x"} for key in ("x", "02", "13", "y")])
    done = program("verify", *shards, "b.tar")
    assert done.code == 1
    assert done.lines[:3] == [
        "DuplicateKey (2):",
        "  b.tar contains the sample '02', as does a-0.tar",
        "  b.tar contains the sample '13', as does a-1.tar",
    ]
    assert kinds(program("verify", *shards, "b.tar", "--json", "--shared-keys")) == {}


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
        "d.tar: 1 fields 'blob' were read but not decoded, as they have no codec",
    ]


def test_a_broken_shard_is_decoded_up_to_the_fault(program: Any, folder: Path) -> None:
    build_shard("d.tar", [{"__key__": f"{n}", "cls": "one"} for n in range(5)])
    with Path("d.tar").open("r+b") as file:
        file.truncate(3 * 1024 + 100)
    assert kinds(program("verify", "d.tar", "--json", "--decode")) == {"TruncatedShardError": 1, "DecodeError": 2}


def test_fields_may_be_required(program: Any, folder: Path) -> None:
    build_shard("f.tar", [{"__key__": "a", "jpg": "x", "cls": "1"}, {"__key__": "b", "PNG": "x"}])
    done = program("verify", "f.tar", "--field", "jpg;png", "--field", "cls", "--json")
    assert kinds(done) == {"MissingFieldError": 1}
    assert json.loads(done.out)["faults"][0]["message"] == "f.tar has no field 'cls' in the sample 'b'"


def test_an_index_that_disagrees_is_a_fault(program: Any, shards: list[str]) -> None:
    build_indexes("a-{0..2}.tar")
    assert program("verify", *shards).out == "3 shards, 12 samples, 24 files, 30.7 kB, 3 indexed: no faults\n"
    build_shard("a-1.tar", [{"__key__": "new", "txt": "x"}])
    index = Path("a-2.tar.wdsidx").read_bytes()
    Path("a-2.tar.wdsidx").write_bytes(index[:-10])
    assert kinds(program("verify", *shards, "--json")) == {"StaleSidecarError": 1, "CorruptSidecarError": 1}
    assert kinds(program("verify", *shards, "--json", "--no-index")) == {}


def test_digests_notice_changes_that_headers_do_not(program: Any, shards: list[str]) -> None:
    write_manifest(Manifest(build_indexes("a-{0..2}.tar", options=IndexOptions(digest=True))), "m.json")
    data = bytearray(Path("a-2.tar").read_bytes())
    data[4096 - 512 + 5] ^= 1  # in a field
    Path("a-2.tar").write_bytes(data)
    assert kinds(program("verify", *shards, "--json", "--manifest", "m.json")) == {}
    done = program("verify", *shards, "--json", "--manifest", "m.json", "--digest")
    assert kinds(done) == {"StaleSidecarError": 2}
    for name in ("SHA-256", "the manifest"):
        assert name in done.out
    build_shard("a-0.tar", [{"__key__": "new", "txt": "x"}])
    build_shard("more.tar", [{"__key__": "more", "txt": "x"}])
    done = program("verify", "a-0.tar", "more.tar", "--json", "--manifest", "m.json", "--no-index")
    messages = [fault["message"] for fault in json.loads(done.out)["faults"]]
    assert messages == [
        "a-0.tar: the number of samples is 1, but 4 in the manifest",
        "more.tar is not in the manifest",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gone*.tar", "No file matches"),
        ("gone://a.tar", "gone"),
        ("- --decode", "--decode reads each shard twice"),
        ("pipe:cat a-0.tar --workers 0", "'--workers'"),
    ],
)
def test_wrong_use(program: Any, shards: list[str], arguments: str, message: str) -> None:
    done = program("verify", *arguments.split())
    assert done.code == 2
    assert message in done.err


def test_workers_find_what_one_process_finds(program: Any, shards: list[str], nothing_left: None) -> None:
    build_shard("b.tar", [{"__key__": "02", "cls": "x"}])
    Path("cut.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    one, three = (
        program("verify", *shards, "b.tar", "cut.tar", "--decode", "--workers", workers) for workers in ("1", "3")
    )
    assert one == three
    assert one.code == 1


def test_ctrl_c_ends_all_workers_at_once(shards: list[str]) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "wds_datapipes", "verify", "--workers", "2", *["pipe:echo >> begun; sleep 60"] * 3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        while not Path("begun").exists() or Path("begun").stat().st_size < 2:
            assert running.poll() is None
            time.sleep(0.02)
        children = psutil.Process(running.pid).children(recursive=True)
        assert len(children) >= 2
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=600)
    finally:
        running.kill()
    assert (running.returncode, out, err) == (130, b"", b"Interrupted\n")
    _, left = psutil.wait_procs(children, timeout=600)
    assert left == []
    assert Path("begun").stat().st_size == 2, "the third shard was begun, too"


def test_keys_are_compared_and_not_their_digests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "txt": "x"} for n in range(3)])

    def repeated(*urls: str) -> list[str]:
        return [fault.key for shard in verify_shards(urls, num_workers=0) for fault in shard.faults]

    assert repeated("a.tar", "b.tar") == []
    monkeypatch.setattr("wds_datapipes.prepare.verify._digest", lambda key: int(key[1]))
    assert repeated("a.tar", "b.tar") == []
    assert repeated("a.tar", "b.tar", "./a.tar") == ["a0", "a1", "a2"]
