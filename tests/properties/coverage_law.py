"""The law of splitting: all ranks and workers, simulated in one process, yield each item once per epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any

from wds_datapipes.loading.epoch import EpochRun, EpochSeeds, EpochStart
from wds_datapipes.loading.splitting import RankIdentity, WorkerIdentity, split_by_rank, split_by_worker
from wds_datapipes.seeds import SeedGenerator

EPOCHS = 2


def identify(item: Any) -> Hashable:
    """Return the URL and key of a sample, or any other item as text."""
    return (item.get("__url__"), item["__key__"]) if isinstance(item, dict) else repr(item)


def check_coverage(make_pipeline: Callable[[], Any], *, ranks: int = 2, workers: int = 2, seed: int = 0) -> None:
    """Check the law with the shares and seeds that a loader assigns."""
    whole = EpochRun(make_pipeline(), EpochStart(SeedGenerator(seed), owns_generators=True)).items
    expected = Counter(map(identify, whole))
    assert expected
    epochs = [Counter[Hashable]() for _ in range(EPOCHS)]
    for rank, worker in product(range(ranks), range(workers)):
        identity = RankIdentity(ranks, rank)
        pipe = split_by_worker(split_by_rank(make_pipeline(), identity), WorkerIdentity(workers, worker), identity)
        generator, seeds = SeedGenerator(seed), EpochSeeds()
        for found in epochs:
            seeds.begin(generator)
            own = generator.spawn(rank).spawn(worker)
            found.update(map(identify, EpochRun(pipe, EpochStart(own, owns_generators=True)).items))
            seeds.end(generator)
    assert epochs == [expected] * EPOCHS
