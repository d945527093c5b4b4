"""How the data is split among ranks and workers, and what is said where it is not, or twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import reading_service
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes.reading.serving import split


def split_by_ours(pipe: Any, info: Any) -> Any:
    return split(pipe, info, None)


def split_by_the_patched_service(pipe: Any, info: Any) -> Any:
    return reading_service.process_init_fn(pipe, info)  # as in its worker processes


class TestInstances:
    """torch's ``DataLoader`` counts the first worker of every rank, then the second of every rank."""

    @pytest.mark.parametrize("split_by", [split_by_ours, split_by_the_patched_service])
    @pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 2), (3, 1), (4, 3)])
    @pytest.mark.parametrize("shards", [3, 6, 13])
    def test_shards_are_dealt_as_by_torch(self, split_by: Any, ranks: int, workers: int, shards: int) -> None:
        owned = {}
        for rank in range(ranks):
            for worker in range(workers):
                pipe: Any = IterableWrapper(range(shards)).sharding_filter()
                graph_settings.apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
                pipe = split_by(pipe, WorkerInfo(workers, worker))
                owned[rank, worker] = list(pipe)
                torchs: Any = IterableWrapper(range(shards)).sharding_filter()
                graph_settings.apply_sharding(torchs, ranks * workers, worker * ranks + rank)
                assert owned[rank, worker] == list(torchs)
                assert len(pipe) == len(torchs)
        of_ranks = [sum(len(owned[rank, worker]) for worker in range(workers)) for rank in range(ranks)]
        assert max(of_ranks) - min(of_ranks) <= 1
        assert sorted(itertools.chain(*owned.values())) == list(range(shards))

    def test_a_filter_of_one_group_alone_is_left_as_it_is(self) -> None:
        pipe: Any = IterableWrapper(range(6)).sharding_filter(SHARDING_PRIORITIES.DISTRIBUTED)
        graph_settings.apply_sharding(pipe, 2, 1, SHARDING_PRIORITIES.DISTRIBUTED)
        assert list(split_by_ours(pipe, WorkerInfo(3, 2))) == [1, 3, 5]
