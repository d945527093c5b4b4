"""Gather a single state of a loader for all ranks, which the checkpoints of most trainers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch.distributed as dist

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.resharding import merge_states, outline_state, ranks_to_read

__all__ = ["gather_states", "outline_state", "ranks_to_read"]


def gather_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a loader on all ranks, which every rank can load, even if the number of ranks changes.

    All ranks of the default process group must call this at the same step: each waits for the others. Without a process
    group, there is a single rank. Only rank 0 receives the states of the others, unless all states are equal, as with
    indexed datasets.

    Args:
        state: the state of the loader on this rank.

    Returns:
        On rank 0, which saves it, the result of `merge_states`. On the other ranks, the same result if all states are
        equal, or else the state of that rank.

    Raises:
        StateError: on all ranks, if a state is not that of a loader, or the states belong to different pipelines or
            epochs.

    Examples:
        >>> from wds_datapipes.integrations.ranks import gather_states
        >>> data = StatefulShards(MockSamples({"cls": "3"}, 8))
        >>> state = gather_states(data.state_dict())
        >>> data.load_state_dict(state)
    """
    if not (dist.is_available() and dist.is_initialized()):
        return merge_states([state])
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, crc32(repr(state).encode()))
    if len({*digests}) == 1:
        return merge_states([state])
    states: list[Any] | None = [None] * len(digests) if dist.get_rank() == 0 else None
    dist.gather_object(state, states)
    merged, refusal = dict(state), [""]
    if states is not None:
        try:
            merged = merge_states(states)
        except StateError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise StateError(refusal[0])
    return merged
