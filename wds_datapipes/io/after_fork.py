"""Fork hooks: what each part of the package does when this process forks, in one order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

#: The hooks in the order in which they run after a fork, in the parent and in the child. Before a fork, they run in the
#: reverse order, so that locks are held as briefly as possible, and no other hook waits while they are.
ORDER = (
    # Locks that no other thread may hold at a fork, because the child does not have this thread.
    "certificates",  # io/remote/http
    "traversal",  # datapipes/traversal
    # Ends of pipes whose readers would wait for the child, too.
    "workers",  # loading/workers/shutdown: they end with the process that has started them
    "commands",  # io/shell_process: so do shell commands
    # What the parent keeps using.
    "file systems",  # io/remote/filesystem: the child keeps fsspec's objects, and their connections, alive
    "connections",  # io/remote/http_connection: the child closes its copies
    "parts",  # shard_cache/download: parts of files that threads of the parent fetch
    "segments",  # loading/transport/shared_memory: memory that the child sees is not reused
    "process group",  # io/once_per_host: the child is not a rank
)


class ForkHooks(NamedTuple):
    """What a part of the package does at a fork."""

    before: Callable[[], object] = bool
    after_in_parent: Callable[[], object] = bool
    after_in_child: Callable[[], object] = bool


_hooks: dict[str, ForkHooks] = {}


def at_fork(name: str, **hooks: Callable[[], object]) -> None:
    """Call functions at each fork of this process, also of ``os.fork`` in the program; systems without forks do not.

    Args:
        name: the place of the functions in `ORDER`.
        hooks: ``before``, ``after_in_parent`` and ``after_in_child``, as in `os.register_at_fork`.

    Raises:
        ValueError: `ORDER` does not have the name.
    """
    _hooks[ORDER[ORDER.index(name)]] = ForkHooks(**hooks)


def _run(moment: str) -> None:
    """Run the hooks of a moment, all of them even if one fails; Python then prints its error and forks anyway."""
    last_first = ORDER if moment == "before" else reversed(ORDER)
    with ExitStack() as hooks:
        for name in last_first:
            if name in _hooks:
                hooks.callback(getattr(_hooks[name], moment))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _run("before"),
        after_in_parent=lambda: _run("after_in_parent"),
        after_in_child=lambda: _run("after_in_child"),
    )
