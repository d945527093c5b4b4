"""The other loaders support what torchdata's nodes need: wrapped states and interrupted epochs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from numbered_shards import key_of, numbered_shards
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.integrations.ranks import gather_states

shards = numbered_shards([5, 9, 6])


def data_of(length: int = 0) -> StatefulShards:
    pipe = ShardList("{0..2}.tar").shuffle().sharding_filter().load_wds_shards().group_samples().map(key_of)
    return StatefulShards(pipe.with_epoch(length) if length else pipe, seed=7)


def epoch_of(data: StatefulShards, num_workers: int = 0) -> Iterator[str]:
    return data.tracked(DataLoader(data, batch_size=None, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("length", [0, 8])
def test_an_ended_epoch_is_followed_by_the_next_one_here_and_elsewhere(num_workers: int, length: int) -> None:
    broken = data_of(length)
    items = epoch_of(broken, num_workers)
    head = list(islice(items, 3))
    items.close()  # type: ignore[attr-defined]  # it is a generator
    following = list(epoch_of(broken, num_workers))

    data = data_of(length)
    items = epoch_of(data, num_workers)
    assert list(islice(items, 3)) == head
    items.close()  # type: ignore[attr-defined]  # it is a generator
    data.end_epoch()
    state = data.state_dict()
    data.end_epoch()
    assert list(epoch_of(data, num_workers)) == following
    data = data_of(length)
    data.load_state_dict(state)
    assert list(epoch_of(data, num_workers)) == following


def test_a_state_is_found_in_a_chain_of_nodes() -> None:
    with DataLoader2(data_of().pipe, reading_service=ShardReadingService(1)) as loader:
        loader.seed(7)
        items = iter(loader)
        list(islice(items, 4))
        saved = loader.state_dict()
        rest = list(items)

    def wrapped(**counts: int) -> dict[str, Any]:
        mapped = {"it_state": {"snapshot": {"source": {**saved, "is_exhausted": False}}, **counts}}
        return {"root": mapped, "num_yielded": 4}

    data = data_of()
    data.load_state_dict(gather_states(wrapped(steps_since_snapshot=0)))
    assert list(epoch_of(data, 1)) == rest
    for counts in ({"steps_since_snapshot": 3}, {"batch_idx": 2}):
        with pytest.raises(StateError, match=r"saved some items after .*snapshot_frequency=1, and without Unbatcher"):
            data_of().load_state_dict(wrapped(**counts))
    with pytest.raises(StateError, match="not the state of a loader"):
        data_of().load_state_dict({"root": {"source": None}, "num_yielded": 4})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_length_is_that_of_the_rank(ranks: int) -> None:
    for rank in range(ranks):
        pipe = IndexedSamples("{0..2}.tar", global_batch_size=8).map(key_of).batch(8 // ranks)
        data = StatefulShards(pipe, seed=7, distributed=(rank, ranks))
        assert len(data) == 2
        assert len(list(data)) == len(data) == 2
