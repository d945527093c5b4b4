"""Joins by key: the counterpart of each sample, whatever the order of the shards."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.errors import DuplicateKeyError, MisalignedShardsError, ShardReadError
from wds_datapipes.index.key_table import KeyTable
from wds_datapipes.index.reading.key_join import KeyJoin, join_fields


def join(keys: list[list[str]], others: list[list[str]]) -> KeyJoin:
    sizes = np.array([len(each) for each in others], np.int64)
    raw = [[key.encode() for key in each] for each in others]
    ends = [np.cumsum([len(key) for key in each], dtype=np.int64) for each in raw]
    table = KeyTable([b"".join(each) for each in raw], ends)
    return KeyJoin(keys, table, [f"{number}.tar" for number in range(len(others))], sizes)


SHARDS: Any = st.lists(st.lists(st.text("ab/é", max_size=4), max_size=6), max_size=4)


@given(SHARDS, st.permutations([f"key-{number}" for number in range(9)]), st.integers(0, 9))
def test_each_key_is_found_wherever_it_is(keys: list[list[str]], order: list[str], cut: int) -> None:
    keys = [*keys, [f"key-{number}" for number in range(5, 12)]]
    others = [order[:cut], order[cut:]]
    found = join(keys, others)
    expected = [order.index(key) if key in order else -1 for shard in keys for key in shard]
    assert found.numbers.tolist() == expected
    shards, numbers = found.find(np.arange(9))
    assert [others[shard][number] for shard, number in zip(shards, numbers, strict=True)] == order


def test_a_join_with_nothing_finds_nothing() -> None:
    assert join([["a"], []], [[]]).numbers.tolist() == [-1]
    assert join([[]], [["a"]]).numbers.tolist() == []


def test_a_repeated_key_is_refused_with_both_shards() -> None:
    with pytest.raises(DuplicateKeyError, match=r"0\.tar and 2\.tar both have the key 'b' \(samples 1 and 0\)"):
        join([["a"]], [["a", "b"], ["c"], ["b"]])


def test_a_sample_with_another_key_or_the_same_field_is_an_error() -> None:
    sample = {"__key__": "a", "__url__": "x.tar", "jpg": b"1"}
    for other, error, message in (
        ({"__key__": "b", "__url__": "y.tar", "txt": b"2"}, MisalignedShardsError, "another key"),
        ({"__key__": "a", "__url__": "y.tar", "jpg": b"2"}, DuplicateKeyError, r"join got 'jpg' from y\.tar"),
    ):
        with pytest.raises(error, match=message):
            raise cast(Exception, join_fields(dict(sample), [None, other]))
    unreadable = ShardReadError("it cannot be read")
    assert join_fields(sample, [None, unreadable]) is join_fields(unreadable, [sample]) is unreadable
