"""Simulating ranks and workers in one process, to see that each sample comes exactly once."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.loading.philox import SeedGenerator
from wds_datapipes.loading.rank_and_worker import RankIdentity, WorkerIdentity, split_by_rank, split_by_worker
from wds_datapipes.loading.seeding import EpochSeeds, reset_pipeline
from wds_datapipes.pipes.sharding import splitters

__all__ = ["MISSING", "describe_item", "rehearse_coverage"]

Pipe = IterDataPipe[Any]

#: What is in the place of an item where there is none.
MISSING = object()


def rehearse_coverage(
    make_pipeline: Callable[[], Pipe],
    *,
    ranks: int,
    workers: int,
    seed: int,
    key: Callable[[Any], Hashable] | None,
) -> None:
    """Give each worker of each rank its share, and see whether they are all; see `testing.check_coverage`."""
    known = _item_key if key is None else key
    wanted = Counter(known(item) for item in _seed_pipeline(make_pipeline(), WorkerIdentity(1, 0), SeedGenerator(seed)))
    if not wanted:
        raise AssertionError(
            "The pipeline yields nothing at all, also without a split. Is its list of shards empty, or does a stage "
            "drop all samples?"
        )
    places = [(rank, worker) for rank in range(ranks) for worker in range(max(workers, 1))]
    pipes: dict[tuple[int, int], Any] = {}
    logs: dict[tuple[int, int], list[list[Any]]] = {}
    for rank, worker in places:
        pipe: Any = make_pipeline()
        logs[rank, worker] = [_listened_to(stage) for stage in splitters(pipe)]
        pipe = split_by_rank(pipe, RankIdentity(ranks, rank))
        pipes[rank, worker] = split_by_worker(pipe, WorkerIdentity(max(workers, 1), worker), RankIdentity(ranks, rank))
    seeds = {place: EpochSeeds() for place in places}
    generators = {place: SeedGenerator(seed) for place in places}
    for epoch in range(2):
        owners = defaultdict(list)
        for place in places:
            rank, worker = place
            for log in logs[place]:
                log.clear()
            generator = generators[place]
            seeds[place].begin(generator)
            own = generator.spawn(rank).spawn(worker)
            for item in _seed_pipeline(pipes[place], WorkerIdentity(max(workers, 1), worker), own):
                owners[known(item)].append(place)
            seeds[place].end(generator)
            for log, first in zip(logs[place], logs[places[0]], strict=True):
                _check_order(log, first, f"Epoch {epoch}: rank {rank}, worker {worker}")
        for item in {**wanted, **owners}:
            found = owners.get(item, [])
            if len(found) != wanted[item]:
                where = ", ".join(f"rank {rank}, worker {worker}" for rank, worker in found) or "nowhere"
                advice = (
                    "" if any(logs.values()) else ". No stage splits the data: put .sharding_filter() behind the shards"
                )
                raise AssertionError(
                    f"Epoch {epoch}: {item!r} has to come {_times(wanted[item])}, and comes {_times(len(found))} "
                    f"({where}){advice}"
                )


def describe_item(item: Any) -> str:
    """Return an item as a message has it, or that there is none."""
    text = "none" if item is MISSING else repr(item)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _seed_pipeline(pipe: Pipe, info: Any, generator: Any) -> Pipe:
    seeded: Pipe = reset_pipeline(pipe, info, generator, iter_reset_fn=None, worker_reset_fn=None)
    return seeded


def _item_key(item: Any) -> Hashable:
    """Return what a sample is known by; for anything else, all that it is."""
    if isinstance(item, Mapping) and "__key__" in item:
        return str(item.get("__url__", "")), item["__key__"]
    try:
        hash(item)
    except TypeError:
        return pickle.dumps(item)
    return item  # type: ignore[no-any-return]  # it can be hashed


class _SplitListener(IterDataPipe[Any]):
    """Notes what passes."""

    def __init__(self, source: Pipe, log: list[Any]) -> None:
        self.source = source
        self.log = log

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            self.log.append(item)
            yield item


def _listened_to(stage: Any) -> list[Any]:
    """Return a list of what a stage gets from its sources, which fills up when it is iterated."""
    log: list[Any] = []
    for name, value in list(vars(stage).items()):
        if isinstance(value, IterDataPipe):
            setattr(stage, name, _SplitListener(value, log))
    return log


def _check_order(log: list[Any], first: list[Any], who: str) -> None:
    for number, (found, wanted) in enumerate(zip_longest(log, first, fillvalue=MISSING)):
        if found is MISSING or wanted is MISSING or _item_key(found) != _item_key(wanted):
            raise AssertionError(
                f"{who} has another order before the split than rank 0, worker 0: item {number} is "
                f"{describe_item(found)}, not {describe_item(wanted)}. What shuffles there has to take the seed that "
                f"the loader gives it (set_seed)"
            )
