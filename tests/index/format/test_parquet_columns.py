"""Columns of an index from a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from error_facts import naming

from wds_datapipes.errors import DuplicateKeyError, MissingFieldError, MissingSidecarError
from wds_datapipes.index import build_indexes, parquet_columns, read_table
from wds_datapipes.testing import build_shard

arrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def shards(folder: Path) -> str:
    for shard in range(2):
        build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{n}", "txt": "x"} for n in range(3)])
    return "{0,1}.tar"


def write(path: str = "lengths.parquet", **columns: list[Any]) -> str:
    keys = [f"{shard}-{n}" for shard in (1, 0) for n in range(3)]
    known: dict[str, list[Any]] = {"key": [*keys, "another"], "tokens": [*range(6), 99], "kind": [*"abcdef", "g"]}
    parquet.write_table(arrow.table({**known, **columns}), path)
    return path


def build(path: str, columns: Any, **options: Any) -> list[bool]:
    found = parquet_columns(path, columns, **options)
    return [each.is_new for each in build_indexes("{0,1}.tar", columns=found, progress=False, num_workers=0)]


def test_values_are_found_by_key(shards: str) -> None:
    assert build(write(), {"length": "tokens", "kind": "kind"}) == [True, True]
    table = read_table(shards)
    assert table.columns["length"].tolist() == [3, 4, 5, 0, 1, 2]
    assert table.columns["kind"].tolist() == [*"defabc"]
    assert build("lengths.parquet", {"length": "tokens", "kind": "kind"}) == [False, False]
    write(tokens=[*range(10, 16), 9])
    assert build("lengths.parquet", {"length": "tokens", "kind": "kind"}) == [True, True], "the file has changed"
    assert read_table(shards).columns["length"].tolist() == [13, 14, 15, 10, 11, 12]
    assert build(
        write(key=[0, 1, 2, 3, 4, 5, 6], name=["1-0", "1-1", "1-2", "0-0", "0-1", "0-2", ""]), ["tokens"], key="name"
    )


def test_rows_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any, type[Exception], list[str]]] = [
        (
            write(key=["0-0", "0-1", *"abcde"]),
            ["tokens"],
            MissingFieldError,
            ["'0-2'", "lengths.parquet", "such as '0-0'"],
        ),
        (write("null.parquet", tokens=[1, 2, 3, None, 5, 6, 7]), ["tokens"], MissingFieldError, ["'0-0'", "tokens"]),
        (write("twice.parquet", key=["0-0"] * 6 + [None]), ["tokens"], DuplicateKeyError, ["6 rows", "'0-0'"]),
        (
            write("lists.parquet", tokens=[[]] + [[1, 2]] * 6),
            ["tokens"],
            ValueError,
            ["[]", "'tokens'", "list<", "length"],
        ),
        (write("other.parquet"), ["length"], ValueError, ["length", "tokens", "columns="]),
        ("none.parquet", ["tokens"], MissingSidecarError, ["none.parquet"]),
        ("0.tar", ["tokens"], ValueError, ["0.tar", "not a Parquet file"]),
    ]
    for path, columns, error, facts in wrong:
        with pytest.raises(error, match=naming(*facts)):
            build(path, columns)
    with pytest.raises(ValueError, match=naming("id", "key=")):
        build(write("key.parquet"), ["tokens"], key="id")
    others: list[Any] = [[], [1], "tokens", {"a": 1}]
    for columns in others:
        with pytest.raises(TypeError, match="columns"):
            parquet_columns("a.parquet", columns)


def test_rows_without_a_key_belong_to_no_sample() -> None:
    build_shard("0.tar", [{"__key__": key, "txt": "x"} for key in ("0-0", "None")])
    path = write(key=["0-0", "1-0", "1-1", "1-2", None, None, "0-1"])
    with pytest.raises(MissingFieldError, match=naming("no row", "'None'")):
        build(path, ["tokens"])


def test_the_command_builds_them(program: Any, shards: str) -> None:
    path = write(id=[f"{shard}-{n}" for shard in (0, 1) for n in range(3)] + ["x"])
    run = program("index", shards, "--parquet", path, "--columns", "length=tokens", "--key-column", "id")
    assert (run.code, run.err) == (0, "")
    assert read_table(shards).columns["length"].tolist() == [0, 1, 2, 3, 4, 5]
    assert "--columns" in program("index", shards, "--parquet", path).err
