"""A lock for torch's traversal of pipelines, which pickles them with hooks that all threads share."""

from __future__ import annotations

import functools
import threading
from typing import Any

from wds_datapipes.datapipes import graph
from wds_datapipes.io.after_fork import at_fork

#: Held while torch traverses a pipeline.
_lock = threading.RLock()


def lock_traversal() -> None:
    """Let one thread at a time traverse a pipeline, and no fork copy the hooks meanwhile."""
    list_unlocked = graph._list_connected_datapipes

    @functools.wraps(list_unlocked)
    def list_locked(*arguments: Any, **options: Any) -> Any:
        with _lock:
            return list_unlocked(*arguments, **options)

    graph._list_connected_datapipes = list_locked
    at_fork("traversal", before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
