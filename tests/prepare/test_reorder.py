"""The order of samples: SampleEntries and FieldSortKey."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import DecodeError, MissingFieldError, ShardError
from wds_datapipes.prepare.reorder import SampleEntries
from wds_datapipes.prepare.sort_key import FieldSortKey
from wds_datapipes.testing import build_shard


def shuffled(count: int, seed: int) -> tuple[int, ...]:
    entries = SampleEntries([])
    entries._order, entries._ends = list(range(count)), [count]  # as many samples, without shards
    entries.shuffle(seed)
    return tuple(entries._order)


def chi_square(counts: Counter[Any], cells: int) -> float:
    """How far counts are from being equal; on average, it is the number of cells."""
    expected = counts.total() / cells
    return sum((count - expected) ** 2 / expected for count in counts.values()) + (cells - len(counts)) * expected


def test_every_order_is_equally_likely() -> None:
    counts = Counter(shuffled(4, seed) for seed in range(4800))
    assert set(counts) == set(permutations(range(4)))
    # Of 23 degrees of freedom, 99.9 % of draws are below 49.7; the seeds are fixed, so the test is deterministic.
    assert chi_square(counts, 24) < 49.7


def test_the_order_depends_only_on_the_seed() -> None:
    assert shuffled(50, 7) == shuffled(50, 7)
    assert len({shuffled(50, seed) for seed in (0, 1, 2, 10**30, 10**30 + 1)}) == 5
    assert shuffled(6, 0) == (0, 3, 5, 1, 2, 4)  # in all versions


def sample(**fields: bytes) -> dict[str, Any]:
    return {"__key__": "k", "__url__": "s3://me:secret@bucket/a.tar", **fields}


@given(st.lists(st.text(max_size=4)))
@settings(deadline=None)
def test_keys_and_text_are_in_the_order_of_code_points(texts: list[str]) -> None:
    by_key = sorted(texts, key=lambda text: FieldSortKey("key")({"__key__": text}))
    by_field = sorted(texts, key=lambda text: FieldSortKey("txt")(sample(txt=text.encode())))
    by_value = sorted(texts, key=lambda text: FieldSortKey("json/a")(sample(json=json.dumps({"a": text}).encode())))
    assert by_key == by_field == by_value == sorted(texts)


@given(st.lists(st.one_of(st.integers(), st.floats(allow_nan=False))))
@settings(deadline=None)
def test_numbers_are_in_the_order_of_their_values(numbers: list[int | float]) -> None:
    texts = [f" {number!r}\n" for number in numbers]
    by_text = sorted(texts, key=lambda text: FieldSortKey("cls", numeric=True)(sample(cls=text.encode())))
    by_value = sorted(
        numbers, key=lambda number: FieldSortKey("json/a")(sample(json=json.dumps({"a": number}).encode()))
    )
    assert by_value == sorted(numbers)
    assert [float(text) if "." in text or "e" in text or "inf" in text else int(text) for text in by_text] == by_value


@pytest.mark.parametrize(
    ("by", "numeric", "value"),
    [
        ("key", False, "k"),
        ("txt", False, b"10"),
        (".txt", False, b"10"),
        ("TXT", True, 10),
        (".key", False, b"a field"),
        ("a.json/size/1", False, 2.5),
        ("a.json/name", False, "7"),
        ("a.json/name", True, 7),
        ("a.json/flag", False, True),
    ],
)
def test_compared_values(by: str, numeric: bool, value: object) -> None:
    data = {"txt": b"10", "key": b"a field", "a.json": b'{"size": [1, 2.5], "name": "7", "flag": true}'}
    assert FieldSortKey(by, numeric=numeric)(sample(**data)) == (0, value)


@pytest.mark.parametrize("by", ["cls", "json/b", "json/none", "json/list/1", "json/list/x", "json/b/c", "json/text/0"])
def test_missing_values_are_an_error_or_put_at_an_end(by: str) -> None:
    data = sample(json=b'{"none": null, "list": [1], "text": "abc"}')
    with pytest.raises(MissingFieldError, match=r"The sample 'k' of s3://.*bucket/a\.tar has no .* to sort by") as told:
        FieldSortKey(by)(data)
    assert f"has no {by!r} to sort by. It has json." in str(told.value)
    assert "secret" not in str(told.value)
    for reverse in (False, True):
        first, last = (FieldSortKey(by, missing=word, reverse=reverse)(data) for word in ("first", "last"))
        assert sorted([first, (0, math.inf), (0, -math.inf), last], reverse=reverse)[0] == first
        assert sorted([first, (0, math.inf), (0, -math.inf), last], reverse=reverse)[-1] == last


@pytest.mark.parametrize(
    ("by", "numeric", "data", "message"),
    [
        ("txt", True, b"ten", "cannot be sorted by 'txt': b'ten' is not a number"),
        ("txt", True, b"1_0", "b'1_0' is not a number"),
        ("txt", True, b"nan", "b'nan' is not a number"),
        ("txt", True, b"\xff", r"b'\\xff' is not a number"),
        ("txt", True, b"", "b'' is not a number"),
        ("txt", True, b"x" * 10_000, r"b'x{58}\.\.\. is not a number"),
        ("txt/a", False, b"{", "The field 'txt' of the sample 'k' of s3://.* is not JSON: "),
        ("txt/a", False, b"\xff\xfe\xff", "is not JSON: "),
        ("txt/a", False, b"[" * 100_000, "is not JSON: "),
        ("txt/a", False, b'{"a": [1]}', r"cannot be sorted by 'txt/a': \[1\] has no order"),
        ("txt/a", False, b'{"a": NaN}', "nan has no order"),
        ("txt/a", True, b'{"a": "x"}', "'x' is not a number"),
    ],
)
def test_values_without_an_order_are_an_error(by: str, numeric: bool, data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        FieldSortKey(by, numeric=numeric)(sample(txt=data))


def test_numbers_and_text_are_not_mixed() -> None:
    order = FieldSortKey("json/a")
    assert order(sample(json=b'{"a": 1}')) < order(sample(json=b'{"a": 1.5}'))
    with pytest.raises(DecodeError, match="'json/a': '1' is text, but earlier samples have a number"):
        order(sample(json=b'{"a": "1"}'))


@pytest.mark.parametrize("by", ["", ".", "/a", "json/", "__key__"])
def test_invalid_names_of_fields_are_refused(by: str) -> None:
    with pytest.raises(ValueError, match="samples are sorted by 'key', a field, or a path"):
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
