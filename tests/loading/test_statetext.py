"""The text of a state: what is written is read again, and nobody reads it who does not load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint import format as state_format
from wds_datapipes.loading.checkpoint.encoding import decode_state, encode_state
from wds_datapipes.testing import build_shard

KEYS = [f"{shard}-{number:02}" for shard in range(4) for number in range(30)]


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for shard in range(4):
        build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{number:02}", "cls": "1"} for number in range(30)])
    return iter(())


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def pipeline() -> Any:
    urls = ShardList("{0..3}.tar").shuffle().sharding_filter()
    return urls.load_wds_shards().group_samples().shuffle_samples(40).map(key_of)


NUMBERS = st.integers(-2, 3) | st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1 << 40).map(lambda n: 512 * n)
ADDRESSES = st.tuples(st.integers(0, 300), st.integers(0, 1 << 31), st.integers(1, 1 << 20) | st.none()).map(
    lambda each: [each[0], 512 * each[1], -1 if each[2] is None else 512 * (each[1] + each[2])]
)
ROWS = st.lists(ADDRESSES, max_size=60) | st.integers(0, 5).flatmap(
    lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), max_size=40)
)
# What a stage of a user has may be anything.
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda values: (
        st.lists(values, max_size=20) | st.dictionaries(st.sampled_from(["waiting", "rows", "columns", "a"]), values)
    ),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, other=ANYTHING)
def test_what_is_written_is_read(rows: list[list[int]], other: Any) -> None:
    state = [{"next": [3, 512]}, None, {"sources": [{"state": {"waiting": rows}}], "waiting": other}]
    assert decode_state(encode_state(state)) == state
    assert decode_state(encode_state(None)) is None


def test_a_thousand_addresses_take_ten_bytes_each() -> None:
    rng, ends = Random(0), [0]
    for _ in range(40_000):
        ends.append(ends[-1] + 512 * rng.randint(3, 300))
    waiting = [[7, ends[number], ends[number + 1]] for number in rng.sample(range(40_000), 1000)]
    assert len(encode_state([{"waiting": waiting}])) < 10_500
    assert len(json.dumps(waiting, separators=(",", ":"))) > 20_000


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        '[{"waiting in columns":{"rows":9,"columns":[[0,1,1,"AA=="]]}}]',
        '[{"waiting in columns":{"rows":1,"columns":[[0,1,1,"?"]]}}]',
    ],
)
def test_a_text_that_is_none_is_named(text: str) -> None:
    with pytest.raises(StateError, match="not whole"):
        decode_state(text)


def test_a_state_of_workers_is_put_together_without_reading_another(monkeypatch: pytest.MonkeyPatch) -> None:
    data = StatefulShards(pipeline())
    batches = data.tracked(DataLoader[Any](data, batch_size=4, num_workers=2, multiprocessing_context="fork"))
    with DataLoader2(pipeline(), reading_service=ShardReadingService(2)) as loader:
        items = iter(loader)
        for _ in range(5):
            next(items)
            next(batches)

        def fail(*arguments: Any) -> Any:
            raise AssertionError(f"It was read here: {arguments}")

        with monkeypatch.context() as patch:
            patch.setattr(state_format, "decode_state", fail)
            states = [source.state_dict()["wds_datapipes"] for source in (loader, data)]
        for state in states:
            assert [len(decode_state(part["stages"]) or ()) for part in json.loads(state)["ranks"][0]["parts"]] == [
                2,
                2,
            ]
