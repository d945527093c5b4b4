"""The command ``index``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.index.build import build_index
from wds_datapipes.index.file_format import read_index
from wds_datapipes.index.interop.dali import read_dali_index
from wds_datapipes.index.interop.energon import read_energon_index
from wds_datapipes.index.interop.wids import read_wids_index
from wds_datapipes.index.manifest import read_manifest
from wds_datapipes.testing import build_shard


def test_missing_and_stale_indexes_are_built(program: Any, shards: list[str], nothing_left: None) -> None:
    done = program("index", "a-{0..2}.tar", "--workers", "2")
    assert (done.code, done.err) == (0, "")
    assert done.out == "3 shards, 12 samples: 3 indexes written\n"
    assert [read_index(f"{url}.wdsidx") == build_index(url) for url in shards] == [True] * 3
    assert program("index", *shards).out == "3 shards, 12 samples: 0 indexes written, 3 already up to date\n"
    build_shard("a-1.tar", [{"__key__": "new", "txt": "x"}])
    os.utime("a-1.tar", ns=(2**60, 2**60))
    assert json.loads(program("index", *shards, "--json").out) == {
        "shards": 3,
        "samples": 9,
        "written": ["a-1.tar.wdsidx"],
        "held": 2,
        "manifest": None,
    }
    assert read_index("a-1.tar.wdsidx").keys == ["new"]
    assert program("index", *shards, "--rebuild").out == "3 shards, 9 samples: 3 indexes written\n"


def test_a_manifest_and_digests(program: Any, shards: list[str]) -> None:
    done = program("index", *shards, "--digest", "--manifest", "m.json", "--folder", "indexes")
    assert done.out == "3 shards, 12 samples: 3 indexes written\nManifest: m.json\n"
    manifest = read_manifest("m.json")
    assert (manifest.urls, manifest.samples) == (shards, 12)
    assert all(len(entry.sha256 or "") == 64 for entry in manifest.entries)
    assert sorted(path.name for path in Path("indexes").iterdir()) == [f"{url}.wdsidx" for url in shards]
    assert program("verify", *shards, "--digest", "--manifest", "m.json").code == 0


def test_columns_of_a_function(program: Any, shards: list[str]) -> None:
    Path("counts.py").write_text(
        "def count(sample):\n    return {'fields': sum(name[:2] != '__' for name in sample)}\n"
    )
    field = build_index(shards[0]).fields[0]
    done = program("index", *shards, "--columns", "counts:count", "--field", field)
    assert (done.code, done.out) == (0, "3 shards, 12 samples: 3 indexes written\n")
    assert read_index(f"{shards[0]}.wdsidx").columns["fields"].tolist() == [1] * 4
    assert program("index", *shards).out == "3 shards, 12 samples: 0 indexes written, 3 already up to date\n"


@pytest.mark.parametrize(("name", "suffix"), [("dali", ".idx"), ("energon", ".tar.idx")])
def test_to_the_format_of_another_program_and_back(program: Any, shards: list[str], name: str, suffix: str) -> None:
    done = program("index", *shards, "--to", name, "--workers", "2")
    assert done.out == "3 shards, 12 samples: 3 indexes written\n"
    place = f"a-0{suffix}"
    found = read_dali_index(place, "a-0.tar") if name == "dali" else read_energon_index(place, "a-0.tar")
    assert found.has_same_layout(build_index("a-0.tar"))
    assert not Path("a-0.tar.wdsidx").exists()
    assert program("index", *shards, "--from", name).out == "3 shards, 12 samples: 3 indexes written\n"
    assert read_index("a-2.tar.wdsidx").has_same_layout(build_index("a-2.tar"))
    Path(place).write_bytes(Path(f"a-1{suffix}").read_bytes())  # an index of another shard
    done = program("index", "a-0.tar", "--from", name)
    assert done.code == 1
    assert done.err.startswith("Error: ")


def test_to_wids(program: Any, shards: list[str]) -> None:
    done = program("index", *shards, "--to", "wids", "--output", "w.json")
    assert done.out == "3 shards, 12 samples: 1 index written\n"
    assert read_wids_index("w.json").urls == shards


def test_a_faulty_shard_is_an_error(program: Any, shards: list[str]) -> None:
    Path("a-1.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    done = program("index", *shards, "--workers", "1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: a-1.tar ends at byte 4000 ")
    assert Path("a-0.tar.wdsidx").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a-0.tar --to wids", "--output is required with --to wids"),
        ("a-0.tar --output x.json", "--output is required with --to wids"),
        ("a-0.tar --from dali --to energon", "--from converts to indexes of wds-datapipes"),
        ("a-0.tar --to dali --columns a:b", "--columns cannot be used with --to and --from"),
        ("a-0.tar --field cls", "so it requires --columns"),
        ("a-0.tar --to dali --digest", "--digest cannot be used with --to and --from"),
        ("a-0.tar --to dali --key-rule last-dot", "--key-rule cannot be used with --to and --from"),
        ("a-0.tar --from dali --manifest m.json", "--manifest cannot be used with --to and --from"),
        ("a-0.tar sub/a-0.tar --folder i", "Several shards would have the index"),
        ("-", "cannot be written next to standard input"),
        ("none.tar", "There is no file 'none.tar'"),
    ],
)
def test_wrong_use(program: Any, shards: list[str], arguments: str, message: str) -> None:
    done = program("index", *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert sorted(path.name for path in Path().iterdir()) == shards
