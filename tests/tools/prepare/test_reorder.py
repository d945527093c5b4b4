"""The order of samples: SampleEntries and FieldSortKey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.errors import DecodeError, MissingFieldError, ShardError
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.reorder import FieldSortKey, SampleEntries


def shuffled(count: int, seed: int) -> tuple[int, ...]:
    entries = SampleEntries([])
    entries._order, entries._ends = list(range(count)), [count]  # as many samples, without shards
    entries.shuffle(seed)
    return tuple(entries._order)


def test_the_order_depends_only_on_the_seed() -> None:
    assert shuffled(50, 7) == shuffled(50, 7)
    assert len({shuffled(50, seed) for seed in (0, 1, 2, 10**30, 10**30 + 1)}) == 5
    assert shuffled(6, 0) == (0, 3, 5, 1, 2, 4)  # in all versions


def sample(**fields: bytes) -> dict[str, Any]:
    return {"__key__": "k", "__url__": "s3://me:secret@bucket/a.tar", **fields}


@given(st.lists(st.text(max_size=4)))
def test_keys_and_text_are_in_the_order_of_code_points(texts: list[str]) -> None:
    by_key = sorted(texts, key=lambda text: FieldSortKey("key")({"__key__": text}))
    by_field = sorted(texts, key=lambda text: FieldSortKey("txt")(sample(txt=text.encode())))
    assert by_key == by_field == sorted(texts)


@given(st.lists(st.one_of(st.integers(), st.floats(allow_nan=False))))
def test_numbers_are_in_the_order_of_their_values(numbers: list[int | float]) -> None:
    by_text = sorted(
        numbers, key=lambda number: FieldSortKey("cls", numeric=True)(sample(cls=f" {number!r}\n".encode()))
    )
    assert by_text == sorted(numbers)


@pytest.mark.parametrize(
    ("by", "numeric", "value"),
    [("key", False, b"k"), (".txt", False, b"10"), ("TXT", True, 10), (".key", False, b"a field")],
)
def test_compared_values(by: str, numeric: bool, value: object) -> None:
    assert FieldSortKey(by, numeric=numeric)(sample(txt=b"10", key=b"a field")) == value


def test_a_missing_value_is_an_error_without_credentials() -> None:
    with pytest.raises(MissingFieldError, match=r"The sample .k. of s3:.*bucket.a.tar has no .cls. to sort") as told:
        FieldSortKey("cls")(sample(json=b"1"))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("data", [b"ten", b"1_0", b"nan", b"\xff", b"", b"x" * 10_000])
def test_a_value_that_is_not_a_number_is_an_error(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"cannot be sorted by 'txt': b'.*' is not a number") as told:
        FieldSortKey("txt", numeric=True)(sample(txt=data))
    assert len(str(told.value)) < 200


@pytest.mark.parametrize("by", ["", ".", "__key__"])
def test_invalid_names_of_fields_are_refused(by: str) -> None:
    with pytest.raises(ValueError, match="samples are sorted by 'key' or a field"):
        FieldSortKey(by)


@pytest.mark.parametrize("change", ["other", "shorter", "gone", "no tar"])
def test_a_shard_that_changes_after_it_was_indexed_is_an_error(tmp_path: Path, change: str) -> None:
    samples: list[dict[str, bytes | str]] = [{"__key__": f"{n}", "bin": b"x" * 700 * n} for n in range(9)]
    url = build_shard(tmp_path / "a.tar", samples)
    entries = SampleEntries([url])
    entries.shuffle(0)
    assert len(list(entries.read())) == 9
    if change == "other":
        build_shard(url, samples[::-1])
    elif change == "shorter":
        build_shard(url, samples[:3])
    elif change == "gone":
        Path(url).unlink()
    else:
        Path(url).write_bytes(b"x" * Path(url).stat().st_size)
    with pytest.raises(ShardError, match=r"a\.tar"):
        list(entries.read())
