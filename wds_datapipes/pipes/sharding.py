"""How a pipeline is split between ranks and workers: which share this instance has, and which stages split."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import Mapper, ShardingFilter
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.graph import as_stage, sources_of, upstream
from wds_datapipes.user_warnings import warn_user

__all__ = [
    "Groups",
    "Instance",
    "groups_of",
    "has_no_share",
    "instance_of",
    "number_instances",
    "place_in",
    "place_of",
    "refuse_remote",
    "share",
    "splits",
    "splitters",
    "turn_shares",
    "turns_of",
    "unsplit",
    "warn_if_hidden",
]

#: What torch's ``ShardingFilter`` remembers: for each kind of splitting, among how many and which of them.
Groups = dict[int, tuple[int, int]]

#: Where a ``.sharding_filter()`` keeps by how many numbers its share has moved on.
_TURN = "_wds_datapipes_turn"

Pipe = IterDataPipe[Any]


class Instance(NamedTuple):
    """The rank and the worker that an instance of a pipeline runs for."""

    rank: int = 0
    workers: int = 1  # of this rank
    worker: int = 0


def share(count: int, place: Instance) -> int:
    """Return how many of the ``count`` items of a rank its worker has to make.

    >>> [share(8, Instance(workers=3, worker=worker)) for worker in range(3)]
    [3, 3, 2]
    """
    return count // place.workers + (place.worker < count % place.workers)


def groups_of(splitter: Any) -> Groups | None:
    """Return among how many ranks and workers a stage, of whichever package, splits the data; None if it is unknown."""
    groups: Groups | None = splitter.groups if isinstance(splitter, Stage) else getattr(splitter, "groups", None)
    return groups


def instance_of(groups: Groups) -> tuple[int, int]:
    """Return among how many instances of a pipeline the data is split, and the number of this instance.

    Instances are numbered as torch's ``DataLoader`` does: the first worker of every rank, then the second of every
    rank, and so on. What is left over after an even deal then goes to different ranks.

    >>> [instance_of({2: (2, rank), 3: (3, worker)}) for rank in range(2) for worker in range(3)]
    [(6, 0), (6, 2), (6, 4), (6, 1), (6, 3), (6, 5)]
    """
    if SHARDING_PRIORITIES.DEFAULT in groups:
        return groups[SHARDING_PRIORITIES.DEFAULT]
    ranks, rank = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
    workers, worker = groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0))
    return ranks * workers, worker * ranks + rank


def number_instances(pipe: Any) -> None:
    """Have every ``.sharding_filter()`` deal as torch's ``DataLoader`` does, once it knows its rank and its worker.

    Left alone, it numbers all workers of rank 0 first where ranks and workers are set one after the other. A share
    that `turn_shares` has moved on stays where it is.
    """
    for splitter in splitters(pipe):
        if isinstance(splitter, ShardingFilter):
            _number(splitter)


def turn_shares(pipe: Any, turn: int) -> None:
    """Give this instance the share that the instance ``turn`` numbers further on has by itself.

    Stages that begin their source again move all shares on by one with each pass. Each pass is still dealt whole, and
    an instance without data in one pass, as there are fewer shards than workers or its shards are empty, gets to the
    data of the others.

    Args:
        pipe: the source of such a stage. Stages before it that count passes of their own count from here.
        turn: by how many numbers.
    """
    for stage in _until_kept(pipe):
        if isinstance(stage, ShardingFilter):
            vars(stage)[_TURN] = turn
            _number(stage)
        else:
            as_stage(stage).move_share(turn)


def turns_of(pipe: Any) -> int:
    """Return after how many passes an instance has had every share; 1 where nothing is split."""
    turns = 1
    for stage in _until_kept(pipe):
        if _moves_share(stage):
            turns = max(turns, instance_of(stage.groups)[0])
    return turns


def _number(splitter: Any) -> None:
    """Set the share of a ``.sharding_filter()``."""
    groups, only = splitter.groups, splitter.sharding_group_filter
    instances, instance = instance_of(groups) if only is None else groups.get(only, (1, 0))
    splitter.num_of_instances = instances
    splitter.instance_id = (instance + vars(splitter).get(_TURN, 0)) % instances


def _until_kept(pipe: Any) -> Iterator[Any]:
    """Yield a stage and those before it, up to those whose items belong to one instance in all passes."""
    kept: set[int] = set()
    for stage in upstream(pipe):
        if id(stage) not in kept:
            if as_stage(stage).spans_epochs or as_stage(stage).rereads_source:
                kept.update(map(id, upstream(stage)))
            else:
                yield stage


def place_in(groups: Groups) -> Instance:
    """Return the place that a loader has told to a stage that splits the data."""
    if SHARDING_PRIORITIES.DEFAULT in groups:
        # torch's DataLoader counts all workers of all ranks in one group, first those of the same number.
        instances, instance = groups[SHARDING_PRIORITIES.DEFAULT]
        info = get_worker_info()
        if info is None:
            return Instance(rank=instance)
        return Instance(instance % max(instances // info.num_workers, 1), info.num_workers, info.id)
    _, rank = groups.get(SHARDING_PRIORITIES.DISTRIBUTED, (1, 0))
    return Instance(rank, *groups.get(SHARDING_PRIORITIES.MULTIPROCESSING, (1, 0)))


def place_of(pipe: Pipe) -> Instance:
    """Return the place of a stage, as a stage before it knows it that splits the data."""
    return next((place_in(groups) for groups in map(groups_of, splitters(pipe)) if groups), Instance())


def has_no_share(pipe: Pipe) -> bool:
    """Whether a stage before this one, whose shares stay where they are, had nothing to deal to this instance."""
    turning = {id(stage) for stage in _until_kept(pipe) if _moves_share(stage)}
    return any(
        not _has_yielded(splitter) and any(map(_has_yielded, sources_of(splitter)))
        for splitter in splitters(pipe)
        if id(splitter) not in turning
    )


def refuse_remote(pipe: Pipe, what: str) -> None:
    """Refuse a source that only the loader can begin again, as its items come from another process.

    Args:
        pipe: the source.
        what: what would begin it again.

    Raises:
        RuntimeError: it is one.
    """
    for stage in upstream(pipe):
        if as_stage(stage).is_remote or type(stage).__module__ == "torchdata.dataloader2.communication.iter":
            raise RuntimeError(
                f"{what} has to read its source on, and begin it again, at any time. Here its source is what other "
                "processes send, which begins when the loader begins an epoch, and only then. Put the stage before "
                "the one that is dispatched, or that stays in the main process."
            )


def splits(stage: object) -> bool:
    """Whether a stage, of whichever package, splits the data between ranks and workers."""
    return inspect.ismethod(getattr(stage, "apply_sharding", None))


def splitters(pipe: Pipe) -> Iterator[Any]:
    """Yield the stages that split the data, at a stage or before it."""
    return filter(splits, upstream(pipe))


def unsplit(pipe: Any) -> Any:
    """Return a stage that yields what a stage would yield if the list of shards were not split.

    Raises:
        StateError: it is no `.sharding_filter()`, and not a function of each URL behind one.
    """
    if type(pipe) is ShardingFilter and pipe.sharding_group_filter is None:
        return pipe.source_datapipe
    if type(pipe) is not Mapper:
        raise StateError(
            f"To go on with another number of ranks or workers, the list of shards is read as it was before it was "
            f"split, and load_wds_shards reads from {type(pipe).__name__}. Put .sharding_filter() directly before it"
        )
    mapper = copy.copy(pipe)
    mapper.datapipe = unsplit(pipe.datapipe)
    return mapper


def _has_yielded(stage: Any) -> bool:
    """Whether a stage has ever yielded anything. torch counts that for the datapipes that are iterated."""
    return not isinstance(stage, IterDataPipe) or stage._number_of_samples_yielded > 0


def _moves_share(stage: Any) -> bool:
    """Whether `turn_shares` gives a stage that splits the data another share."""
    return isinstance(stage, ShardingFilter) or as_stage(stage).moves_share


def warn_if_hidden(pipe: Any) -> None:
    """Warn where several workers or ranks read all of a list that has a ``.sharding_filter()``.

    Args:
        pipe: yields the list. Nothing of it was read yet.
    """
    if all(not isinstance(each, ShardingFilter) or each.groups for each in splitters(pipe)):
        return
    info = get_worker_info()
    if info is not None and info.num_workers > 1:
        if info.id == 0:
            warn_user(
                f"Each of {info.num_workers} workers reads all shards, as no loader has found the .sharding_filter(): "
                f"its data set is of the class {type(info.dataset).__name__}, which reads the pipeline itself. Give "
                "the DataLoader the pipeline, or StatefulShards(pipeline), and leave the loader out of "
                "accelerator.prepare(), which puts it into an IterableDatasetShard"
            )
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and _is_read_by_shard():
        warn_user(
            f"Each of {dist.get_world_size()} ranks reads all shards, in an order of its own, and takes every "
            f"{dist.get_world_size()}th item or batch, so some samples come on several ranks and others on none: the "
            "DataLoader was given to accelerator.prepare(), which puts the pipeline into an IterableDatasetShard. Use "
            "StatefulShards(pipeline), which splits between ranks itself, and leave the loader out of prepare()"
        )


def _is_read_by_shard() -> bool:
    """Whether the pipeline is read by the data set with which accelerate and transformers split another one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # The locals of other functions are left alone: to look at them keeps them alive.
        if frame.f_code.co_name == "__iter__" and type(frame.f_locals.get("self")).__name__ == "IterableDatasetShard":
            return True
        frame = frame.f_back
    return False
