"""Pipelines that torch's loader does not find, since the data set that it was given is another one that reads them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import ShardingFilter

from wds_datapipes.pipes.state.graph import splitters
from wds_datapipes.user_warnings import warn_user

__all__ = ["warn_if_hidden"]


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
