"""Columns of the user in indexes: values of each sample, kept in files, and used to select samples."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import CorruptSidecarError, MissingFieldError, StaleSidecarError, UnsupportedSidecarError
from wds_datapipes.index import ShardIndex, build_index, build_indexes, index_url, read_index, write_index
from wds_datapipes.testing import build_shard


def columns_of(sample: dict[str, Any]) -> dict[str, Any]:
    facts = json.loads(sample["json"])
    return {"label": int(sample["cls"]), "width": facts["width"], "split": facts["split"], "is_odd": bool(facts["odd"])}


def write(folder: Path, sizes: tuple[int, ...] = (5, 0, 8)) -> str:
    number = 0
    for shard, size in enumerate(sizes):
        samples: list[dict[str, bytes | str]] = []
        for _ in range(size):
            facts = json.dumps({"width": number / 2, "split": "val" if number % 4 == 3 else "train", "odd": number % 2})
            samples.append({"__key__": f"{number:02}", "cls": f"{number % 3}", "json": facts, "jpg": b"x" * 9000})
            number += 1
        build_shard(folder / f"{shard}.tar", samples)
    return f"{folder}/{{0..{len(sizes) - 1}}}.tar"


def test_columns_are_computed_stored_and_read(tmp_path: Path) -> None:
    pattern = write(tmp_path)
    assert [result.is_new for result in build_indexes(pattern, columns=columns_of)] == [True] * 3
    index = read_index(index_url(f"{tmp_path}/2.tar"))
    assert index.user_columns == ["label", "width", "split", "is_odd"]
    assert index.columns["label"].tolist() == [number % 3 for number in range(5, 13)]
    assert index.columns["width"].tolist() == [number / 2 for number in range(5, 13)]
    assert index.columns["split"].tolist() == ["val" if number % 4 == 3 else "train" for number in range(5, 13)]
    assert index.columns["is_odd"].dtype == np.bool_
    assert index == build_index(f"{tmp_path}/2.tar", columns=columns_of) == pickle.loads(pickle.dumps(index))
    assert index != build_index(f"{tmp_path}/2.tar")
    assert index.has_same_layout(build_index(f"{tmp_path}/2.tar"))


def test_columns_come_from_fields_and_paths_in_them(tmp_path: Path) -> None:
    pattern = write(tmp_path)
    places = {"label": "cls", "width": "json.width", "split": "json.split"}
    assert [result.is_new for result in build_indexes(pattern, columns=places)] == [True] * 3
    index = read_index(index_url(f"{tmp_path}/2.tar"))
    expected = build_index(f"{tmp_path}/2.tar", columns=columns_of)
    assert index.user_columns == [*places]
    assert all(index.columns[name].tolist() == expected.columns[name].tolist() for name in places)
    assert not any(result.is_new for result in build_indexes(pattern, columns=places, num_workers=2))
    assert all(result.is_new for result in build_indexes(pattern, columns={"label": "cls"}, num_workers=2))
    samples = IndexedSamples(pattern, order="sequential", select=lambda index: index.columns["label"] == 2)
    assert [sample["__key__"] for sample in samples] == ["02", "05", "08", "11"]


def test_only_the_fields_of_paths_are_read(tmp_path: Path) -> None:
    deep = json.dumps({"a": [{"b.c": 1}, {"b": True}]})
    url = build_shard(tmp_path / "a.tar", [{"__key__": "x", "meta.json": deep, "jpg": b"no image", "txt": "text"}])
    columns = build_index(url, columns={"is_b": "meta.json.a.1.b", "text": "txt"}).columns
    assert (columns["is_b"].tolist(), columns["text"].tolist()) == ([True], ["text"])
    for place, message in (
        ("cls", "no such field in the sample 'x' "),
        ("meta.json.a.2", "has no '2'"),
        ("meta.json.a.b", "no 'b'"),
        ("meta.json.a.0.c", "no 'c'"),
        ("txt.0", "has 'text', which has no '0'"),
    ):
        with pytest.raises(MissingFieldError, match=f"The column of '{place}' has no value: .*{message}"):
            build_index(url, columns={"new": place})
    with pytest.raises(MissingFieldError, match=naming("'meta.json.a'", "'x'", "[", "length", "function")):
        build_index(url, columns={"new": "meta.json.a"})
    wrong: Any
    for wrong in ({"label": 1}, {"": "cls"}, "cls", ["cls"]):
        with pytest.raises(TypeError, match=naming("columns", "function", "mapping")):
            build_indexes([url], columns=wrong)


def test_columns_select_samples(tmp_path: Path) -> None:
    pattern = write(tmp_path)
    build_indexes(pattern, columns=columns_of, fields=["json", "cls"])
    samples = IndexedSamples(pattern, order="sequential", select=lambda index: index.columns["label"] == 2)
    assert [sample["__key__"] for sample in samples] == ["02", "05", "08", "11"]
    validation = IndexedSamples(pattern, select=lambda index: index.columns["split"] == "val", order="sequential")
    assert [sample["__key__"] for sample in validation] == ["03", "07", "11"]
    with pytest.raises(KeyError, match=naming("'class'", "'is_odd', 'label', 'split', 'width'")):
        IndexedSamples(pattern, select=lambda index: index.columns["class"] == 2)


def test_only_the_needed_fields_are_given_to_the_function(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def note_fields(sample: dict[str, Any]) -> dict[str, int]:
        seen.append({name for name in sample if name[:2] != "__"})
        return {"label": int(sample["cls"])}

    url = write(tmp_path, (3,)).replace("{0..0}", "0")
    build_index(url, columns=note_fields, fields=["cls"])
    assert seen == [{"cls"}] * 3


def test_an_index_is_rebuilt_for_another_function_and_kept_without_one(tmp_path: Path) -> None:
    pattern = write(tmp_path)

    def length(sample: dict[str, Any]) -> dict[str, int]:
        return {"length": len(sample["jpg"])}

    def is_new(**options: Any) -> list[bool]:
        return [result.is_new for result in build_indexes(pattern, **options)]

    assert is_new(columns=columns_of) == [True] * 3
    assert is_new(columns=columns_of) == is_new() == [False] * 3
    assert len(IndexedSamples(pattern, select=lambda index: index.columns["label"] == 2)) == 4
    assert is_new(columns=length) == [True] * 3
    assert is_new(columns=length, fields=["jpg"]) == [True] * 3
    assert is_new(columns=lambda sample: {"length": 1}, num_workers=2) == [True] * 3


def test_a_stale_index_with_columns_is_not_rebuilt_without_them(tmp_path: Path) -> None:
    pattern = write(tmp_path)
    build_indexes(pattern, columns=columns_of)
    build_shard(tmp_path / "0.tar", [{"__key__": "new", "cls": "1", "json": "{}"}])
    os.utime(tmp_path / "0.tar", ns=(1, 1))
    with pytest.raises(StaleSidecarError, match=r"0\.tar\.wdsidx is stale and has the columns \['label', "):
        IndexedSamples(pattern)
    build_indexes(pattern, rebuild=True)
    assert len(IndexedSamples(pattern)) == 9


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([{"a": 1}, {"a": "x"}], TypeError, "the column 'a' of .* has values of the types int, str"),
        ([{"a": True}, {"a": 2}], TypeError, "the types bool, int"),
        ([{"a": None}, {"a": None}], TypeError, "the types NoneType"),
        ([{"a": 1}, {}], ValueError, r"returned \[\] for the sample '1' .*, but \['a'\] for those before"),
        ([{"key_ends": 1}], ValueError, "already has a column 'key_ends'"),
        ([{"a": "x" * 300}] * 2, ValueError, "a text of more than 256 characters"),
        ([{"a": "x\0"}] * 2, ValueError, "ends with a null character"),
        ([{"a": 1 << 70}] * 2, ValueError, "integers of more than 64 bits"),
        ([{"a": 1 << 1100}, {"a": 0.5}], ValueError, "integers of more than 64 bits"),
        ([[1]], TypeError, "must return a mapping from names to values"),
        ([{1: 1}], TypeError, "must return a mapping from names to values"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(
    tmp_path: Path, values: list[Any], error: type[Exception], message: str
) -> None:
    url = build_shard(tmp_path / "0.tar", [{"__key__": f"{number}", "cls": "1"} for number in range(2)])
    with pytest.raises(error, match=message):
        build_index(url, columns=lambda sample: values[int(sample["__key__"])])


def test_columns_of_a_compressed_shard_are_refused(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "0.tar.gz", [{"__key__": "0", "cls": "1"}])
    with pytest.raises(UnsupportedSidecarError, match="compressed with gzip"):
        build_index(url, columns=lambda sample: {"a": 1})


@pytest.mark.parametrize(
    "column",
    [
        np.zeros(2, complex),
        np.array([b"x", b"y"]),
        np.array([None, {}]),
        np.array(["x" * 257, ""]),
        np.zeros(3),
        np.zeros((2, 1)),
    ],
    ids=["complex", "bytes", "objects", "a long text", "another length", "two dimensions"],
)
def test_a_column_that_no_function_returns_is_damage(tmp_path: Path, column: Any) -> None:
    url = build_shard(tmp_path / "0.tar", [{"__key__": f"{number}", "cls": "1"} for number in range(2)])
    index = build_index(url)
    with pytest.raises(
        CorruptSidecarError, match=r"is damaged: the values of its column a are inconsistent\. Delete it"
    ):
        ShardIndex(index.facts, {**index.columns, "a": column})


VALUES = st.one_of(
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3),
    st.lists(st.floats(allow_nan=False), min_size=3, max_size=3),
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=3, max_size=3),
)


@settings(max_examples=25)
@given(st.dictionaries(st.text("abc_é", min_size=1), VALUES, max_size=3))
def test_columns_survive_the_file(tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[Any]]) -> None:
    folder = tmp_path_factory.mktemp("columns")
    url = build_shard(folder / "0.tar", [{"__key__": f"{number}", "cls": "1"} for number in range(3)])
    index = build_index(
        url, columns=lambda sample: {name: values[int(sample["__key__"])] for name, values in columns.items()}
    )
    write_index(index, index_url(url))
    found = read_index(index_url(url))
    assert found == index
    assert {name: found.columns[name].tolist() for name in found.user_columns} == columns
