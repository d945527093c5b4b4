"""Torch's datapipes, imported from here by all other modules: if torch moves them, only this package changes."""

import os
import threading
import warnings
from typing import Any

from wds_datapipes.io.after_fork import at_fork

# A deprecation of datapipes does not concern users of this package, as it works without those of torch.
warnings.filterwarnings("ignore", "(?is)(?=.*data ?pipe).*deprecat", module=r"(abc|torch|torchdata|wds_datapipes)\b")

from torch.utils.data import IterDataPipe, MapDataPipe, functional_datapipe, graph, graph_settings  # noqa: E402  after the filter
from torch.utils.data.datapipes.iter import Collator, IterableWrapper, ShardingFilter, Shuffler  # noqa: E402  after the filter
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES  # noqa: E402  after the filter
from torch.utils.data.graph import traverse_dps  # noqa: E402  after the filter

#: Held while torch traverses a pipeline: torch pickles it with hooks that all threads share, and rejects concurrent
#: traversals.
_traversal = threading.RLock()


def _list_locked(*arguments: Any, **options: Any) -> Any:
    """List the datapipes that a datapipe refers to, while no other thread does so and no fork can copy the hooks."""
    with _traversal:
        return _list_unlocked(*arguments, **options)


_list_unlocked, graph._list_connected_datapipes = graph._list_connected_datapipes, _list_locked
at_fork("traversal", before=_traversal.acquire, after_in_parent=_traversal.release, after_in_child=_traversal.release)
