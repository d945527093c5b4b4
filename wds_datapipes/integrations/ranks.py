"""One state of a loader for all ranks, as the checkpoints of most trainers need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from wds_datapipes.loading.checkpoint.resharding import merge_states


def gather_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a loader on all ranks, which each rank of this and of any other number of ranks can load.

    All ranks of the default process group call this at the same step: each waits for the others. Without a process
    group, there is one rank.

    Args:
        state: the state of the loader on this rank.

    Returns:
        The result of `merge_states`, the same on all ranks.

    Raises:
        StateError: one of the states is not that of a loader; or they belong to different pipelines or epochs.

    Examples:
        >>> from wds_datapipes.integrations.ranks import gather_states
        >>> data = StatefulShards(MockSamples({"cls": "3"}, 8))
        >>> state = gather_states(data.state_dict())
        >>> data.load_state_dict(state)
    """
    states: list[Any] = [state]
    if dist.is_available() and dist.is_initialized():
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
    return merge_states(states)
