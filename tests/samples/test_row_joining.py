"""Joining planned rows: their samples in order, and an error instead of a row that lacks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from error_facts import naming
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.errors import MissingFieldError, SampleSizeError
from wds_datapipes.samples.row_joining import RowMark

Samples = list[dict[str, Any]]


def marked(key: str, length: int, *mark: Any, kind: Any = np.array, **fields: Any) -> dict[str, Any]:
    return {"__key__": key, "tokens": kind([int(key)] * length), "__row__": RowMark(*mark), **fields}


def two_rows(kind: Any = np.array) -> Samples:
    return [
        marked("1", 2, 7, 0, 2, 0, 2, True, 5, False, 0, kind=kind),
        marked("2", 3, 7, 1, 2, 0, 3, True, 5, False, 0, kind=kind),
        marked("3", 9, 8, 0, 2, 4, 3, False, 5, False, 1, kind=kind),
        marked("4", 1, 8, 1, 2, 0, 1, True, 5, False, 1, kind=kind),
    ]


def rows_of(samples: Samples, *fields: str, **options: Any) -> Samples:
    return list(IterableWrapper(samples).pack_rows(*(fields or ("tokens",)), **options))


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_rows_have_their_samples_and_the_marks_of_sequences(kind: Any) -> None:
    first, second = rows_of(two_rows(kind), pad=0)
    assert (first["__key__"], second["__key__"]) == (["1", "2"], ["3", "4"])
    assert [*map(int, first["tokens"])] == [1, 1, 2, 2, 2]
    assert [*map(int, second["tokens"])] == [3, 3, 3, 4, 0], "a part of a long sample"
    assert [*map(int, second["segment_ids"])] == [1, 1, 1, 2, 0]
    assert [*map(int, second["position_ids"])] == [0, 1, 2, 0, 0]
    offsets = rows_of(two_rows(kind), layout="cu_seqlens")[1]
    assert [*map(int, offsets["cu_seqlens"])] == [0, 3, 4]
    assert "__row__" not in first


def test_padding_leaves_its_space_empty() -> None:
    samples = two_rows()
    samples[0]["__padding__"] = samples[2]["__padding__"] = samples[3]["__padding__"] = True
    first, second = rows_of(samples, pad=9)
    assert (first["__key__"], first["tokens"].tolist()) == (["2"], [2, 2, 2, 9, 9])
    assert (second["__key__"], second["tokens"].tolist()) == ([], [9] * 5)
    assert second["segment_ids"].tolist() == [0] * 5
    assert second["tokens"].dtype == first["tokens"].dtype
    assert rows_of(samples)[1]["tokens"].tolist() == []
    unmarked = [{**each, "__row__": each["__row__"]._replace(is_padding=True)} for each in two_rows()]
    assert [row["__key__"] for row in rows_of(unmarked)] == [[], []]


def test_other_fields_become_lists() -> None:
    samples = [{**each, "image": each["__key__"] * 2} for each in two_rows()]
    for lists in (["image"], ["image", "image"]):
        assert [row["image"] for row in rows_of(samples, lists=lists)] == [["11", "22"], ["44"]], "a part has no image"
    samples[0]["__padding__"] = True
    assert rows_of(samples, lists=["image"])[0]["image"] == ["22"]
    with pytest.raises(MissingFieldError, match=naming("pack_rows", "sound", "'1'")):
        rows_of(two_rows(), lists=["sound"])
    with pytest.raises(ValueError, match="tokens"):
        rows_of(two_rows(), lists=["tokens"])
    with pytest.raises(TypeError, match="lists must be a collection of names"):
        rows_of(two_rows(), lists="image")


CHANGES: dict[str, tuple[Callable[[Samples], Samples], list[str]]] = {
    "the first sample is dropped": (lambda samples: samples[1:], ["Row 7", "1 of 2", "'2'"]),
    "the last sample of a row is dropped": (
        lambda samples: samples[:1] + samples[2:],
        ["Row 7", "2 of 2", "'1'", "'3'"],
    ),
    "a whole row but its end is dropped": (lambda samples: samples[:2] + samples[3:], ["Row 8", "1 of 2", "'4'"]),
    "a whole row is dropped": (lambda samples: samples[2:], ["1 row before row 8", "'3'"]),
    "a whole row comes again": (lambda samples: [*samples, *samples[2:]], ["Row 8", "again", "'3'"]),
    "the last sample of all is dropped": (lambda samples: samples[:3], ["Row 8", "2 of 2", "'3'"]),
    "a sample comes twice": (lambda samples: samples[:1] + samples, ["row 7", "'1'", "twice"]),
    "samples are shuffled": (lambda samples: samples[::-1], ["Row 8", "1 of 2", "'4'"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_row_without_one_of_its_samples_is_an_error(change: str) -> None:
    function, facts = CHANGES[change]
    with pytest.raises(SampleSizeError, match=naming(*facts)):
        rows_of(function(two_rows()))


def test_a_sample_that_is_longer_than_planned_is_an_error_unless_it_fits() -> None:
    samples = two_rows()
    samples[0]["tokens"] = np.ones(4, np.int64)
    with pytest.raises(
        SampleSizeError, match=naming("Row 7", "5", "'1' of an unknown shard has 4", "not 2 as in the index")
    ):
        rows_of(samples)  # the second one is as long as planned
    samples[1]["tokens"] = np.ones(1, np.int64)
    assert len(rows_of(samples)[0]["tokens"]) == 5


def test_samples_without_a_row_are_refused() -> None:
    with pytest.raises(MissingFieldError, match=naming("'1'", "__row__", "pack_samples")):
        rows_of([{"__key__": "1", "tokens": [1]}])
    with pytest.raises(MissingFieldError, match=naming("labels", "pack_rows")):
        rows_of(two_rows(), "tokens", "labels")
    with pytest.raises(TypeError, match=naming("got a row", "once")):
        list(IterableWrapper(two_rows()).pack_rows("tokens").pack_rows("tokens"))
    with pytest.raises(TypeError, match=naming("'1'", "pack_rows", "pack=")):
        list(IterableWrapper(two_rows()).pack_samples(5, "tokens"))


def test_wrong_arguments_name_the_stage() -> None:
    for arguments in ((), ("a", "a"), ("position_ids",)):
        with pytest.raises(ValueError, match="pack_rows needs fields"):
            IterableWrapper([]).pack_rows(*arguments)
    with pytest.raises(TypeError, match=naming('pack_rows("tokens", "labels")')):
        IterableWrapper([]).pack_rows(["tokens"])
    with pytest.raises(TypeError, match="pad must be a number"):
        IterableWrapper([]).pack_rows("tokens", pad="0")


@pytest.mark.parametrize("library", [np, torch])
@pytest.mark.parametrize(("kind", "pad"), [("uint8", -100), ("int64", 0.5), ("int32", float("nan")), ("bool", 2)])
def test_integers_are_not_padded_with_other_values(library: Any, kind: str, pad: float) -> None:
    samples = [
        {**each, "labels": library.ones(len(each["tokens"]), dtype=getattr(library, kind))} for each in two_rows()
    ]
    with pytest.raises(SampleSizeError, match=naming(f"pad={pad}", "'labels'", kind, "map_dict")):
        rows_of(samples, "labels", "tokens", pad={"labels": pad, "tokens": 0})
    rows = rows_of(samples, "labels", "tokens", pad={"labels": 1, "tokens": -100})
    assert [row["labels"].tolist() for row in rows] == [[1] * 5] * 2
