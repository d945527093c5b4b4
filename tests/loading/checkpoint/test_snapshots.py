"""The record of each item is small, and suffices to resume after the item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ShardList
from wds_datapipes.loading.snapshots import LoopPosition, Snapshot, SnapshotWriter
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

SAMPLES = 3000


def pipeline(folder: Path, *, is_mixed: bool) -> Any:
    shards = [
        build_shard(folder / f"{name}.tar", [{"__key__": f"{name}{n}", "cls": "1"} for n in range(SAMPLES // 2)])
        for name in "ab"
    ]
    if is_mixed:  # the path of a sample is in its address
        first, second = (ShardList(str(shard)).load_wds_shards().group_samples() for shard in shards)
        return first.mix_samples(second, stop="all").shuffle_samples(1000)
    return ShardList([*map(str, shards)]).load_wds_shards().group_samples().shuffle_samples(1000)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("together", [1, 7])
def test_each_snapshot_is_small_and_its_state_is_that_of_the_pipeline(
    tmp_path: Path, together: int, is_mixed: bool
) -> None:
    """Snapshots used to be pickles of a few hundred bytes per item, which doubled the time of a small sample."""
    pipe = pipeline(tmp_path, is_mixed=is_mixed)
    position, writer = LoopPosition(), SnapshotWriter(pipe)
    states: list[str | None] = []
    snapshots: list[Snapshot] = []
    sizes: list[float] = []

    def send() -> None:
        data = writer.pack(snapshots)
        sizes.append(len(data) / len(snapshots))
        position.add(data, len(snapshots))
        snapshots.clear()

    for number, _ in enumerate(pipe):
        snapshots.append(writer.snapshot())
        states.append(json.dumps(save_state(pipe)) if number % 97 == 0 or number == SAMPLES - 1 else None)
        if len(snapshots) == together:
            send()
    if snapshots:
        send()
    assert len(states) == SAMPLES
    assert sorted(sizes)[len(sizes) * 9 // 10] < (600 if is_mixed else 300)
    for state in states:
        position.delivered += 1
        if state is not None:
            assert position.state().stages == json.loads(state)


def test_without_a_state_a_pipeline_that_has_one_restarts(tmp_path: Path) -> None:
    shard = build_shard(tmp_path / "a.tar", [{"__key__": key, "cls": "1"} for key in "abc"])
    pipe = ShardList(shard).load_wds_shards().group_samples()
    items = iter(pipe)
    next(items)
    load_state(pipe, save_state(pipe))
    items.close()
    load_state(pipe, None)
    assert [sample["__key__"] for sample in pipe] == ["a", "b", "c"]
