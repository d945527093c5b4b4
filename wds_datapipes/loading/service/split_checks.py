"""Warnings about data that several processes would read whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import distributed as dist
from torch.utils.data import IterDataPipe

from wds_datapipes.loading.rank_and_worker import ONLY_RANK, RankIdentity
from wds_datapipes.pipes.sharding import groups_of, splits, splitters
from wds_datapipes.pipes.state.graph import as_stage, sources_of, upstream
from wds_datapipes.pipes.state.unsupported import name_of

__all__ = [
    "SPLIT_TWICE",
    "advice_for_ranks",
    "advice_for_split",
    "advice_for_torchrun",
    "is_called_by_accelerate",
    "is_called_by_shard",
    "place_given",
    "ranks_of_run",
]

SPLIT_TWICE = (
    "StatefulShards gives each rank its part of the data, and accelerate or the Trainer would split that once more, so "
    "that most samples never come. Leave the loader out of accelerator.prepare(), and move batches to the device in "
    "the loop; or give the pipeline to DataLoader2 with ShardReadingService(..., distributed=True)"
)


def advice_for_split(pipe: Any, *, workers: int, ranks: int, knows_workers: bool = False) -> str:
    """Return what is wrong with a pipeline that several processes run, or "".

    Streams that are cut by ``.with_epoch()`` are left alone: each process may draw from all data there. So is what
    ``.sharding_round_robin_dispatch()`` reads, which one process runs for all workers of a rank.

    Args:
        pipe: the last stage.
        workers: how many processes of a rank run it.
        ranks: how many ranks share the data.
        knows_workers: whether a source may ask torch for its worker, and split by itself.
    """
    for source, instances in _unsplit(pipe, workers * ranks, ranks):
        is_users = type(source).__module__.partition(".")[0] not in ("torch", "torchdata", "wds_datapipes")
        if instances > 1 and not (knows_workers and is_users):
            counts = {"ranks": ranks, "workers": instances // ranks}
            who = " and ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
            return (
                f"{who} read all of {name_of(source)}, as no stage splits it: each sample comes {instances} times in "
                "an epoch. Put .sharding_filter() behind the list of shards and its .shuffle(), before "
                ".load_wds_shards(); or draw shards with .resample_wds_shards(), and end epochs with .with_epoch(n)"
            )
    return ""


def advice_for_ranks(pipe: Any) -> str:
    """Return what is wrong where each rank of a run has a loader that does not know of the others, or ""."""
    if advice := advice_for_torchrun():
        return advice
    ranks = ranks_of_run()
    if ranks == 1 or place_given(pipe) != ONLY_RANK:
        return ""
    if any(map(groups_of, splitters(pipe))):
        return ""  # the program has split by itself
    return (
        f"There are {ranks} ranks, and this loader gives all data to each of them. Use "
        "ShardReadingService(..., distributed=True), which gives each rank its part; or distributed=False, if the list "
        "of shards is only that of this rank"
    )


def advice_for_torchrun() -> str:
    """Return what is wrong where torchrun has started several ranks, and torch knows of one, or ""."""
    started = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if started == "1" or ranks_of_run() > 1:
        return ""
    return (
        f"torchrun has started {started} ranks, and torch.distributed.init_process_group has not been called, so each "
        "of them reads all data. Call it before the loader is made. Then StatefulShards splits the data between ranks, "
        "and so does ShardReadingService(..., distributed=True); distributed=False says that the list is that of "
        "this rank alone"
    )


def is_called_by_accelerate() -> bool:
    """Whether the caller was called by accelerate, whose loaders set the epoch of their data set."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] == "accelerate"


def is_called_by_shard() -> bool:
    """Whether the caller was called by the data set with which accelerate and transformers split another one."""
    return type(sys._getframe(2).f_locals.get("self")).__name__ == "IterableDatasetShard"


def place_given(pipe: Any) -> RankIdentity:
    """Return the rank whose part of a pipeline this is, as torchdata's ``DistributedReadingService`` gives it."""
    is_given = ranks_of_run() > 1 and any(name_of(stage) == "FullSync" for stage in upstream(pipe))
    return RankIdentity(dist.get_world_size(), dist.get_rank()) if is_given else ONLY_RANK


def ranks_of_run() -> int:
    """Return how many ranks the run has, as far as torch knows in this process."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _unsplit(pipe: Any, instances: int, ranks: int) -> Iterator[tuple[Any, int]]:
    """Yield the sources that no stage splits, with how many processes read each."""
    seen, found = set[int](), [(pipe, instances)]
    while found:
        stage, readers = found.pop()
        if id(stage) in seen or splits(stage) or as_stage(stage).spans_epochs or not _is_replicated(stage):
            continue
        seen.add(id(stage))
        if name_of(stage) == "ShardingRoundRobinDispatcher":
            readers = ranks
        sources = [source for source in sources_of(stage) if isinstance(source, IterDataPipe)]
        # What takes shards out of a directory hands each to one process.
        if not sources and name_of(stage) != "DirectoryShards":
            yield stage, readers
        found += [(source, readers) for source in reversed(sources)]


def _is_replicated(stage: Any) -> bool:
    """Whether workers may run a stage, and not the main process alone; torchdata asks the same."""
    is_replicable = getattr(stage, "is_replicable", None)
    return not (callable(is_replicable) and not is_replicable() and not list(sources_of(stage)))
