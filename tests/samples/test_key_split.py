"""Parts of a dataset depend on keys, and have the requested shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from numbered_shards import write_numbered

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.samples.keys import KeySplit

KEYS = [f"d/{number:05d}" for number in range(20_000)]

#: The numbers of some keys in a split of one fifth, which must be the same in all versions.
PINNED = [1, 2, 6, 7, 13, 18, 22, 25, 28, 34, 35]


def test_parts_have_their_shares() -> None:
    parts = KeySplit({"train": 80, "val": 15, "test": 5})
    counts = Counter(map(parts.assign, KEYS))
    # Five standard deviations.
    for name, share in {"train": 0.8, "val": 0.15, "test": 0.05}.items():
        assert abs(counts[name] - share * len(KEYS)) < 5 * (len(KEYS) * share * (1 - share)) ** 0.5
    assert {part for part, _ in Counter(map(KeySplit({"one": 0.1}).assign, KEYS)).items()} == {"one"}


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": -1.0}, {"a": float("inf")}, {"a": float("nan")}])
def test_shares_are_above_0(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares of splits must be positive"):
        KeySplit(shares)


def test_the_rule_never_changes() -> None:
    splits = KeySplit({"train": 0.8, "val": 0.2}, seed=1)
    # Python's own hashes differ in each run.
    assert [number for number in range(40) if splits.assign(f"é{number}") == "val"] == PINNED


def test_indexed_samples_are_split_as_streamed_ones(tmp_path: Path) -> None:
    pattern = write_numbered(tmp_path, [40] * 3)
    splits = KeySplit({"train": 3, "val": 1})
    streamed = [sample["__key__"] for sample in ShardList(pattern).load_wds_shards().group_samples()]
    found = []
    for name in splits.names:
        samples = IndexedSamples(pattern, select=splits.select(name), order="sequential")
        keys = [sample["__key__"] for sample in samples]
        assert keys == [key for key in streamed if splits.assign(key) == name]
        found += keys
    assert sorted(found) == sorted(streamed)
    with pytest.raises(ValueError, match=r"there is no split 'test', only \['train', 'val'\]"):
        splits.select("test")
