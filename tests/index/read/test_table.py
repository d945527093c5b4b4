"""Tables of samples: keys, sizes and columns of a dataset, keys that are found, balanced labels, and weights."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_facts import naming
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import DuplicateKeyError
from wds_datapipes.index import AccessOptions, Manifest, build_indexes, read_table, resample
from wds_datapipes.index.order import join
from wds_datapipes.index.order.join import KeyTable
from wds_datapipes.testing import build_shard

SIZES = (4, 0, 7)


def label(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": int(sample["cls"])}


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    for shard, size in enumerate(SIZES):
        samples: list[dict[str, bytes | str]] = [
            {"__key__": f"{shard}-{n}", "cls": f"{int(n == 3)}", "bin": b"x" * n} for n in range(size)
        ]
        build_shard(tmp_path / f"{shard}.tar", samples)
    build_indexes(f"{tmp_path}/{{0..2}}.tar", columns=label)
    return f"{tmp_path}/{{0..2}}.tar"


def test_a_table_has_the_samples_in_the_order_of_the_shards(pattern: str) -> None:
    table = read_table(pattern)
    dataset = IndexedSamples(pattern).map_style()
    assert repr(table) == "<SampleTable of 11 samples in 3 shards, ['label']>"
    for number in range(len(dataset)):
        sample = dataset[number]
        assert table.keys[number] == sample["__key__"]
        assert table.urls[table.shards[number]] == sample["__url__"]
        assert table.sizes[number] == len(sample["cls"]) + len(sample["bin"])
        assert table.columns["label"][number] == int(sample["cls"])
    again = read_table(Manifest(build_indexes(pattern)), access=AccessOptions(indexes="require"))
    assert again.keys == table.keys


KEYS = st.sampled_from(["", "a", "b", "ab", "é", "漢/字", "\udcff", "long " * 30]) | st.text("abé\udc80", max_size=3)


class Keys:
    """What a table of keys takes from the index of a shard."""

    def __init__(self, keys: list[str]) -> None:
        raw = [key.encode("utf-8", "surrogateescape") for key in keys]
        ends = np.cumsum([len(key) for key in raw], dtype=np.int64)
        self.columns: dict[str, Any] = {"key_text": np.frombuffer(b"".join(raw), np.uint8), "key_ends": ends}

    def __len__(self) -> int:
        return len(self.columns["key_ends"])


@pytest.mark.parametrize("hashed", [hash, len])  # by length, since no two keys with the same hash are known
@given(shards=st.lists(st.lists(KEYS, max_size=6), max_size=5), others=st.lists(KEYS, max_size=6))
def test_each_wanted_key_is_found_or_is_not_unique(hashed: Any, shards: list[list[str]], others: list[str]) -> None:
    keys = list(chain(*shards))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "hash", hashed, raising=False)
        table = KeyTable([f"{number}.tar" for number in range(len(shards))], [Keys(each) for each in shards])  # type: ignore[misc]
        assert list(table) == keys
        if any(keys.count(key) > 1 for key in others):
            with pytest.raises(DuplicateKeyError, match=r"is not unique: sample \d+ \(in \d\.tar\)"):
                table.find(others)
            others = [key for key in others if keys.count(key) < 2]
        expected = [keys.index(key) if key in keys else -1 for key in others]
        assert table.find(others).tolist() == expected
        patch.setattr(join, "hash", lambda key: -len(str(key)), raising=False)  # as in another process
        assert pickle.loads(pickle.dumps(table)).find(others).tolist() == expected


def test_keys_are_found_in_the_order_of_the_request(pattern: str) -> None:
    table = read_table(pattern)
    assert table.find(["2-6", "0-0", "2-6"]).tolist() == [10, 0, 10]
    chosen = IndexedSamples(pattern, select=table.find(["2-6", "0-2"]), order="sequential")
    assert [sample["__key__"] for sample in chosen] == ["0-2", "2-6"]
    with pytest.raises(KeyError, match=naming("4 of 5 keys", "'a', 'b', 'c', ...")):
        table.find(["a", "b", "0-0", "c", "d"])


def test_a_key_that_is_not_unique_is_refused_if_it_is_wanted(pattern: str, tmp_path: Path) -> None:
    twice = build_shard(tmp_path / "3.tar", [{"__key__": "0-1", "cls": "1"}, {"__key__": "new", "cls": "0"}])
    build_indexes([twice], columns=label)
    table = read_table([*read_table(pattern).urls, twice])
    assert table.find(["new", "0-0"]).tolist() == [12, 0]
    with pytest.raises(DuplicateKeyError, match=naming("'0-1'", "sample 1", "0.tar", "sample 11")):
        table.find(["0-1"])


def test_shards_with_different_columns_are_refused(pattern: str, tmp_path: Path) -> None:
    other = build_shard(tmp_path / "3.tar", [{"__key__": "x", "cls": "1"}])
    shards = [*read_table(pattern).urls, other]
    with pytest.raises(ValueError, match=naming("3.tar", "[]", "0.tar", "['label']")):
        read_table(shards)
    build_indexes([other], columns=lambda sample: {"label": "one"})
    with pytest.raises(ValueError, match=naming("'label'", "<U3", "int64")):
        read_table(shards)
    build_indexes([other], columns=lambda sample: {"label": 0.5})
    assert read_table(shards).columns["label"].tolist()[-1] == 0.5


def test_a_table_keeps_no_index_open(pattern: str) -> None:
    before = os.listdir("/proc/self/fd")
    table = read_table(pattern)
    assert table.columns["label"].sum() == 2
    assert os.listdir("/proc/self/fd") == before


WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any)


@given(WEIGHTS, st.none() | st.integers(0, 100), st.integers(0, 5))
def test_samples_come_in_proportion_to_their_weights(weights: list[int], count: int | None, seed: int) -> None:
    numbers = resample(weights, count=count, seed=seed).tolist()
    wanted = len(weights) if count is None else count
    assert len(numbers) == wanted
    assert numbers == sorted(numbers) == resample(weights, count=count, seed=seed).tolist()
    times = Counter(numbers)
    for number, weight in enumerate(weights):
        assert abs(times[number] - wanted * weight / sum(weights)) < 1 + 1e-6
        assert times[number] == 0 or weight > 0


def test_the_seed_chooses_which_samples_come() -> None:
    weights = np.ones(1000)
    first, second = (resample(weights, count=500, seed=seed) for seed in (0, 1))
    assert len({*first.tolist()}) == len({*second.tolist()}) == 500
    assert 200 < len({*first.tolist()} & {*second.tolist()}) < 300
    assert resample(weights, seed=7).tolist() == list(range(1000))
    assert resample([], count=3).tolist() == []


def test_the_sum_of_large_weights_is_finite() -> None:
    assert resample([1e308] * 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("weights", [[-1, 2], [float("nan")], [float("inf")], [0, 0], [[1]]])
def test_invalid_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="one finite number for each sample"):
        resample(weights)
