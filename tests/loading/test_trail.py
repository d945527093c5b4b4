"""The record of each item: small, and sufficient to resume after it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ShardList
from wds_datapipes.loading.checkpoint.item_positions import ItemPositions
from wds_datapipes.pipes.state.pipeline_state import record_state, save_state
from wds_datapipes.pipes.state.recording import Record, Recorder, pack_records
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
def test_each_record_is_small_and_its_state_is_that_of_the_pipeline(
    tmp_path: Path, together: int, is_mixed: bool
) -> None:
    """Records were once dicts and pickles of some hundred bytes per item, which doubled the time of a small sample."""
    pipe = pipeline(tmp_path, is_mixed=is_mixed)
    trail, recorder = ItemPositions(), Recorder()
    states: list[str | None] = []
    records: list[Record] = []
    sizes: list[float] = []
    items = 0

    def send() -> None:
        data = pack_records(records)
        sizes.append(len(data) / len(records))
        trail.add(data, len(records))
        records.clear()

    for _ in pipe:
        record = record_state(pipe, recorder)
        if records and (records[0][1] is not record[1] or len(records) == together):
            send()
        records.append(record)
        states.append(json.dumps(save_state(pipe)) if items % 97 == 0 or items == SAMPLES - 1 else None)
        items += 1
    send()
    assert items == SAMPLES
    assert sorted(sizes)[len(sizes) * 9 // 10] < (350 if is_mixed else 140)
    for state in states:
        trail.deliver()
        if state is not None:
            assert json.loads(json.dumps(trail.state().stages)) == json.loads(state)


def test_records_of_delivered_items_are_discarded(tmp_path: Path) -> None:
    """The trail of a long epoch takes no more memory than that of a short one, also if many samples make one item."""
    samples = pipeline(tmp_path, is_mixed=False)
    pipe, trail, recorder = samples.batch(10), ItemPositions(), Recorder()
    for _ in islice(pipe, 190):
        record = record_state(pipe, recorder)
        trail.add(pack_records([record]), 1)
        trail.deliver()
        assert len(trail._runs) == 1
        assert len(record[1].shuffles[0].slots) < 7000
    assert json.loads(json.dumps(trail.state().stages)) == save_state(pipe)
