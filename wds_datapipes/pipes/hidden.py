"""Pipelines that torch's loader does not find, since the data set that it was given is another one that reads them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import ShardingFilter

from wds_datapipes.core.userwarnings import warn_user
from wds_datapipes.pipes.upstream import splitters

__all__ = ["warn_if_hidden"]


def warn_if_hidden(pipe: Any) -> None:
    """Warn where several workers of torch's ``DataLoader`` read all of a list, and it has a ``.sharding_filter()``.

    Args:
        pipe: yields the list, in a worker.
    """
    info = get_worker_info()
    if info is None or info.num_workers == 1 or info.id:
        return
    for splitter in splitters(pipe):
        if isinstance(splitter, ShardingFilter) and not splitter.groups:
            warn_user(
                f"Each of {info.num_workers} workers reads all shards, as no loader has found the .sharding_filter(): "
                f"its data set is of the class {type(info.dataset).__name__}, which reads the pipeline itself. Give "
                "the DataLoader the pipeline, or StatefulShards(pipeline), and leave the loader out of "
                "accelerator.prepare(), which puts it into an IterableDatasetShard"
            )
