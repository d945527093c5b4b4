"""Torch's datapipes, imported from here by all other modules: if torch moves them, only this package changes.

In place of those that a release lacks come those of `replacement`, which are fewer. Then `graph` is None, and the
loaders of torchdata cannot be imported.
"""

import os
import threading
import warnings
from typing import Any

from wds_datapipes.io.after_fork import at_fork

# A deprecation of datapipes does not concern users of this package, as it works without those of torch.
warnings.filterwarnings("ignore", "(?is)(?=.*data ?pipe).*deprecat", module=r"(abc|torch|torchdata|wds_datapipes)\b")

try:
    from torch.utils.data import IterDataPipe, MapDataPipe, functional_datapipe, graph, graph_settings
    from torch.utils.data.datapipes.iter import Collator, IterableWrapper, ShardingFilter, Shuffler
    from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
    from torch.utils.data.graph import traverse_dps
except ImportError:
    graph = None  # type: ignore[assignment]
    from wds_datapipes.datapipes.replacement import *  # type: ignore[assignment]

#: Held while torch traverses a pipeline: torch pickles it with hooks that all threads share, and rejects concurrent
#: traversals.
_traversal = threading.RLock()


def _list_locked(*arguments: Any, **options: Any) -> Any:
    """List the datapipes that a datapipe refers to, while no other thread does so and no fork can copy the hooks."""
    with _traversal:
        return _list_unlocked(*arguments, **options)


if graph is not None:
    _list_unlocked, graph._list_connected_datapipes = graph._list_connected_datapipes, _list_locked
at_fork("traversal", before=_traversal.acquire, after_in_parent=_traversal.release, after_in_child=_traversal.release)
