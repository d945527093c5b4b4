"""Torch's datapipes, imported from here by all other modules: if torch moves them, only this module changes."""

import os
import threading
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe, graph, graph_settings
from torch.utils.data.datapipes.iter import Batcher, Collator, Filter, IterableWrapper, Mapper, ShardingFilter, Shuffler
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps

#: Held while torch traverses a pipeline: torch pickles it with hooks that all threads share, and rejects concurrent
#: traversals.
_traversal = threading.RLock()
_list_unlocked = graph._list_connected_datapipes


def _list_locked(*arguments: Any, **options: Any) -> Any:
    """List the datapipes that a datapipe refers to, while no other thread does so and no fork can copy the hooks."""
    with _traversal:
        return _list_unlocked(*arguments, **options)


graph._list_connected_datapipes = _list_locked
os.register_at_fork(before=_traversal.acquire, after_in_parent=_traversal.release, after_in_child=_traversal.release)
