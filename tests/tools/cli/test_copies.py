"""Properties of the commands that copy samples: ``cat``, ``split``, ``shuffle``, ``sort`` and ``cache``."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from readers import keys_in, samples_in

from wds_datapipes import ShardList
from wds_datapipes.testing import build_shard


@pytest.mark.parametrize("field", ["jpg", "pyd"])
def test_any_bytes_are_copied_unchanged(program: Any, folder: Path, field: str) -> None:
    data = random.Random(0).randbytes(70_000)
    build_shard("raw.tar", [{"__key__": "a", field: data}])
    for command in ("cat", "shuffle", "split"):
        assert program(command, "raw.tar", "-o", f"{command}-%d.tar").code == 0
        assert samples_in(f"{command}-0.tar") == [{"__key__": "a", field: data}]


def test_parts_depend_only_on_keys(program: Any, folder: Path) -> None:
    samples: list[dict[str, bytes | str]] = [{"__key__": f"{n:04d}", "txt": f"{n}"} for n in range(600)]
    build_shard("x.tar", samples[:400])
    build_shard("y.tar", samples[400:])
    build_shard("z.tar", samples[::-2])
    arguments = ["-p", "train=80", "-p", "val=20", "-o", "{part}-%d.tar", "--json"]
    facts = json.loads(program("split", "x.tar", "y.tar", *arguments).out)
    train, val = samples_in("train-0.tar"), keys_in("val-0.tar")
    assert facts["parts"] == {"train": len(train), "val": len(val)}
    assert sorted([*train, *samples_in("val-0.tar")], key=lambda sample: sample["__key__"]) == samples_in(
        "x.tar", "y.tar"
    )
    assert 70 < len(val) < 170
    program("split", "z.tar", *arguments)
    assert set(keys_in("val-0.tar")) == set(val) & set(keys_in("z.tar"))
    program("split", "x.tar", "y.tar", *arguments, "--seed", "1")
    assert keys_in("val-0.tar") != val


@given(
    st.lists(st.tuples(st.integers(-3, 12), st.integers(0, 400)), min_size=1, max_size=25), st.booleans(), st.booleans()
)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each writes its own files
def test_it_sorts_as_python_does(program: Any, values: list[tuple[int, int]], numeric: bool, reverse: bool) -> None:
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"{number:03d}", "cls": f"{value}", "bin": bytes([number]) * size}
        for number, (value, size) in enumerate(values)
    ]
    build_shard("x.tar", samples[:10])
    build_shard("y.tar", samples[10:])
    arguments = [*["--numeric"][: int(numeric)], *["--reverse"][: int(reverse)]]
    assert program("sort", "x.tar", "y.tar", "-o", "o.tar", "--by", "cls", *arguments).code == 0
    before = samples_in("x.tar", "y.tar")
    assert samples_in("o.tar") == sorted(
        before, key=lambda sample: int(sample["cls"]) if numeric else sample["cls"], reverse=reverse
    )


def test_shards_of_a_web_server_are_read_by_ranges(program: Any, shards: list[str], nginx: Any) -> None:
    (nginx.files / "shuffled").mkdir()
    for name in shards:
        shutil.copy(name, nginx.files / "shuffled")
    assert program("shuffle", *shards, "-o", "here.tar").code == 0
    for place in ("", "whole/"):
        done = program("shuffle", f"http://127.0.0.1:{nginx.http}/{place}shuffled/a-{{0..2}}.tar", "-o", "there.tar")
        assert ("is compressed or has no random access" in done.err) is bool(place)
        assert done.code == (2 if place else 0)
    assert Path("there.tar").read_bytes() == Path("here.tar").read_bytes()


def test_cached_copies_in_use_are_not_removed(program: Any, shards: list[str]) -> None:
    assert program("cache", "warm", *shards, "--cache-dir", "copies").code == 0
    Path(shards[2]).unlink()
    reading = iter(ShardList(shards[2]).cache_wds_shards("copies").load_wds_shards())
    next(reading)
    assert program("cache", "clear", "--cache-dir", "copies").lines == ["2 copies removed, 1 left, 10.2 kB"]
    list(reading)
    del reading
    assert program("cache", "clear", "--cache-dir", "copies").lines == ["1 copy removed, 0 left"]
