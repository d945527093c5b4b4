"""Tables of keys: every key is found at its first sample, repeated and absent ones are recognized."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes.index import key_table
from wds_datapipes.index.key_table import KeyTable

KEYS = st.sampled_from(["", "a", "b", "ab", "é", "漢/字", "\udcff", "long " * 30]) | st.text("abé\udc80", max_size=3)
SHARDS = st.lists(st.lists(KEYS, max_size=6), max_size=5)


def table_of(shards: list[list[str]]) -> KeyTable:
    raw = [[key.encode("utf-8", "surrogateescape") for key in keys] for keys in shards]
    ends = [np.cumsum([len(key) for key in keys], dtype=np.int64) for keys in raw]
    return KeyTable([b"".join(keys) for keys in raw], ends)


def check_find(shards: list[list[str]], others: list[str]) -> None:
    table, keys = table_of(shards), list(chain(*shards))
    assert list(table) == [table[number] for number in range(len(table))] == keys
    wanted = [*others, *keys]
    assert table.find(wanted).tolist() == [keys.index(key) if key in keys else -1 for key in wanted]


def check_repeated(shards: list[list[str]], others: list[str]) -> None:
    table, keys = table_of(shards), list(chain(*shards))
    wanted = [key for key in others if key in keys]
    repeated = table.repeated(table.find(wanted))
    assert (repeated is not None) == any(keys.count(key) > 1 for key in wanted)
    if repeated is not None:
        first, second = repeated
        assert first != second
        assert keys[first] == keys[second]
        assert keys[first] in wanted


@given(SHARDS, st.lists(KEYS, max_size=6))
def test_keys_are_found_at_their_first_sample(shards: list[list[str]], others: list[str]) -> None:
    check_find(shards, others)


@given(SHARDS, st.lists(KEYS, max_size=6))
def test_a_repeated_key_is_recognized_if_it_is_among_the_wanted(shards: list[list[str]], others: list[str]) -> None:
    check_repeated(shards, others)


@given(SHARDS, st.lists(KEYS, max_size=6))
def test_keys_with_the_same_hash_are_distinguished(shards: list[list[str]], others: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:  # nothing finds two keys with the same hash
        patch.setattr(key_table, "hash", len, raising=False)
        check_find(shards, others)
        check_repeated(shards, others)


def test_another_process_finds_keys_with_hashes_of_its_own(tmp_path: Path) -> None:
    table = table_of([["a", "b"], ["c"]])
    assert table.find(["c"]).tolist() == [2]
    (tmp_path / "table").write_bytes(pickle.dumps(table))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).find(['c', 'a', 'x']).tolist())"
    command = [sys.executable, "-c", program, str(tmp_path / "table")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[2, 0, -1]\n"
