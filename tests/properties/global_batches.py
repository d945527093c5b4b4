"""The global batches of `IndexedSamples` for any ranks and workers, in this process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain, zip_longest
from typing import Any

import numpy as np
from readers import keys_of

from wds_datapipes import IndexedSamples
from wds_datapipes.index.order.lanes import Lanes
from wds_datapipes.index.order.mixed_order import MixedOrder
from wds_datapipes.index.order.phase import Phase
from wds_datapipes.index.order.sample_order import Order, SampleOrder
from wds_datapipes.index.order.timeline import RunTimeline


def global_batches(
    dataset: Any, ranks: int, workers: int, batch: int, of: Callable[[Any], list[Any]] = keys_of, **options: Any
) -> list[list[Any]]:
    """Return the global batches of an epoch, merged from each rank's batches."""
    by_rank = []
    for rank in range(ranks):
        by_worker = []
        for worker in range(workers):
            pipe = IndexedSamples(dataset, global_batch_size=batch, **options).set_seed(5)
            pipe.groups = {2: (ranks, rank), 3: (workers, worker)}
            found = of(pipe)
            assert len(found) == len(pipe)
            size = batch // ranks
            by_worker.append([found[start : start + size] for start in range(0, len(found), size)])
        turns = zip_longest(*by_worker, fillvalue=[])
        by_rank.append([each for each in chain.from_iterable(turns) if each])
    return [list(chain.from_iterable(parts)) for parts in zip_longest(*by_rank, fillvalue=[])]


def starts_of(sizes: list[int]) -> Any:
    """Return the number of the first sample of each shard."""
    return np.cumsum(sizes, dtype=np.int64) - sizes


def numbers_at(order: SampleOrder, sizes: list[int], positions: Any = None) -> list[int]:
    """Return the number of the sample at each position, or at all positions, in the whole dataset."""
    shards, places = order.find(np.arange(len(order)) if positions is None else np.array(positions, np.int64))
    assert np.all((places >= 0) & (places < np.array(sizes)[shards]))
    numbers: list[int] = (starts_of(sizes)[shards] + places).tolist()
    return numbers


def mixed_order(datasets: list[list[int]], weights: list[int], kind: Order, seed: int, lanes: Lanes) -> MixedOrder:
    """Return the first epoch of a run with the same weights in all steps."""
    names, ends = [*map(str, range(len(datasets)))], [0, *accumulate(map(len, datasets))]
    known = {name: (len(sizes), sum(sizes)) for name, sizes in zip(names, datasets, strict=True)}
    phase = Phase(lanes.count, lanes.batch, known, [(0, dict(zip(names, weights, strict=True)))])
    parts = dict(zip(names, map(slice, ends, ends[1:]), strict=False))
    sizes = [*chain(*datasets)]
    return MixedOrder(RunTimeline([phase], len(lanes)), 0, sizes, parts, kind, seed=seed, lanes=lanes, window_shards=2)
