"""Advice on pipelines that several workers or ranks read as a whole, because no stage or no loader splits them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import call_of, name_of, sources_of, splits
from wds_datapipes.pipes.sharding import groups_of, splitters
from wds_datapipes.user_warnings import warn_user


def advice_for_split(pipe: Any, *, workers: int, ranks: int, knows_workers: bool = False) -> str:
    """Return advice on a pipeline that several processes run without splitting the data, or "".

    Streams cut by ``.with_epoch()`` are exempt: each process may draw from all data. So is the source of
    ``.sharding_round_robin_dispatch()``, which one process runs for all workers of a rank.

    Args:
        pipe: the last stage.
        workers: the number of processes of a rank that run it.
        ranks: the number of ranks that share the data.
        knows_workers: whether a source may get its worker from torch and split the data itself.
    """
    for source, instances in _unsplit(pipe, workers * ranks, ranks):
        is_users = type(source).__module__.partition(".")[0] not in ("torch", "torchdata", "wds_datapipes")
        if instances > 1 and not (knows_workers and is_users):
            counts = {"ranks": ranks, "workers": instances // ranks}
            readers = " and ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
            return (
                f"{readers} read all of {name_of(source)}, because no stage splits it: each sample is yielded "
                f"{instances} times per epoch. Put .sharding_filter() after the list of shards and its .shuffle(), "
                "before .load_wds_shards(); or draw shards with .resample_wds_shards(), and end epochs with "
                ".with_epoch(n)"
            )
    return ""


def warn_of_copies(pipe: Any) -> None:
    """Warn if several workers or ranks of torch's ``DataLoader`` read all shards.

    Args:
        pipe: the source of shards, before iteration.
    """
    found = list(splitters(pipe))
    info = get_worker_info()
    hidden = next((each for each in found if groups_of(each) == {}), None)
    if hidden is None:
        # The dataset is the whole pipeline, in which a later stage may split.
        advice = ""
        if not found and info is not None and info.id == 0 and isinstance(info.dataset, IterDataPipe):
            advice = advice_for_split(info.dataset, workers=info.num_workers, ranks=1, knows_workers=True)
        if advice:
            warn_user(advice)
        return
    splitter = call_of(hidden)
    if info is not None and info.num_workers > 1:
        if info.id == 0:
            warn_user(
                f"Each of {info.num_workers} workers reads all shards, since the DataLoader did not find the "
                f"{splitter}: its dataset is a {type(info.dataset).__name__}, which wraps the pipeline. Pass "
                "the pipeline or StatefulShards(pipeline) to the DataLoader, and do not pass the loader to "
                "accelerator.prepare(), which wraps the pipeline in an IterableDatasetShard"
            )
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and is_read_by_shard():
        warn_user(
            f"Each of {dist.get_world_size()} ranks reads all shards, in a different order, and takes every "
            f"{dist.get_world_size()}th item or batch, so samples are repeated on several ranks or missing on all: the "
            "DataLoader was passed to accelerator.prepare(), which wraps the pipeline in an IterableDatasetShard. Use "
            "StatefulShards(pipeline), which splits between ranks itself, and do not pass the loader to prepare()"
        )


def is_read_by_shard() -> bool:
    """Whether the caller is accelerate's or transformers' ``IterableDatasetShard``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Only the locals of this function are read, since reading them keeps them alive.
        if frame.f_code.co_name == "__iter__" and type(frame.f_locals.get("self")).__name__ == "IterableDatasetShard":
            return True
        frame = frame.f_back
    return False


def _unsplit(pipe: Any, instances: int, ranks: int) -> Iterator[tuple[Any, int]]:
    """Yield the sources that no stage splits, with the number of processes that read each."""
    seen, found = set[int](), [(pipe, instances)]
    while found:
        stage, readers = found.pop()
        if id(stage) in seen or splits(stage) or declared(stage).spans_epochs or not _is_replicated(stage):
            continue
        seen.add(id(stage))
        if declared(stage).is_dispatched:
            readers = ranks
        sources = [source for source in sources_of(stage) if isinstance(source, IterDataPipe)]
        # A stage that takes shards from a directory gives each shard to one process.
        if not sources and not declared(stage).claims_shards:
            yield stage, readers
        found += [(source, readers) for source in reversed(sources)]


def _is_replicated(stage: Any) -> bool:
    """Whether workers may run a stage, rather than only the main process; torchdata uses the same check."""
    is_replicable = getattr(stage, "is_replicable", None)
    return not (callable(is_replicable) and not is_replicable() and not list(sources_of(stage)))
