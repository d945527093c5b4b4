"""Ranks that work on each row together, as under FSDP, hang at the end of a packed stream, but not of planned rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from data_parallel_pipelines import open_service
from forked_ranks import LIMIT_S, on_ranks
from packed_shards import ROW, packed, write_texts

from wds_datapipes import ShardList
from wds_datapipes.index import IndexOptions, build_indexes

RANKS, EPOCHS = 2, 3
#: How long a rank waits for a row that the other one does not have, in seconds.
WAIT_S = 0.2


class Trained(NamedTuple):
    """The rows of both ranks in each epoch, and the rows after which this rank waits for the other in the last one."""

    rows: list[list[int]]
    waits_after: int | None


def ones(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [1] * len(sample["txt"])}


def streamed(pattern: str) -> Any:
    samples = ShardList(pattern).shuffle().sharding_filter().load_wds_shards().group_samples().wds_decode()
    return samples.map_samples(ones).pack_samples(ROW, "tokens").batch(1)


def train(pipe: Any) -> Trained:
    counts, waits_after = list[list[int]](), None
    with open_service(pipe, 1, distributed=True) as loader:
        for _ in range(EPOCHS):
            rows = sum(map(len, loader))
            counts.append([0] * RANKS)
            dist.all_gather_object(counts[-1], rows)
    group = dist.new_group()
    for row in range(rows):
        work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        if row < min(counts[-1]):
            work.wait(timedelta(seconds=LIMIT_S))
            continue
        # The other rank does not have this row, so no machine is too busy for the limit.
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            work.wait(timedelta(seconds=WAIT_S))
        waits_after = row
        break
    dist.barrier()  # the other rank lives until then
    return Trained(counts, waits_after)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    pattern = write_texts(tmp_path_factory.mktemp("texts"), [60] * 4)
    build_indexes(pattern, progress=False, options=IndexOptions())
    return pattern


def test_a_rank_with_more_rows_of_a_stream_waits_forever(shards: str) -> None:
    trained = on_ranks(RANKS, lambda _: train(streamed(shards)))
    rows = trained[0].rows
    assert all(len({*epoch}) == RANKS for epoch in rows), "the ranks differ in each epoch"
    fewest = min(rows[-1])
    assert [each.waits_after for each in trained] == [fewest if own > fewest else None for own in rows[-1]]


def test_planned_rows_end_on_all_ranks_together(shards: str) -> None:
    trained = on_ranks(RANKS, lambda _: train(packed(shards, 2 * RANKS, RANKS)))
    assert all(len({*epoch}) == 1 for epoch in trained[0].rows)
    assert [each.waits_after for each in trained] == [None] * RANKS
