"""The end of worker processes: asked for, waited for, and in the last resort forced."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from wds_datapipes.reading.inbox import Inbox

__all__ = ["GRACE_S", "end_processes"]

#: How long a process may take to end by itself, in seconds. Nobody needs the item that it may be making.
GRACE_S = 2.0

#: How long a signal may take to end a process, in seconds.
SIGNAL_S = 1.0


def end_processes(processes: Iterable[BaseProcess], inboxes: Sequence[Inbox] = (), *, grace_s: float = GRACE_S) -> None:
    """Wait for processes that were told to end; after ``grace_s`` seconds terminate, then kill, those that did not.

    Args:
        processes: what to end.
        inboxes: what they send to. These are emptied meanwhile: a process ends only after all that it sent was read.
        grace_s: how long they may take by themselves, in seconds.
    """
    running = [process for process in processes if process.is_alive()]
    deadline = time.monotonic() + grace_s
    while running and (left := deadline - time.monotonic()) > 0:
        wait([*(process.sentinel for process in running), *(inbox.connection for inbox in inboxes)], left)
        for inbox in inboxes:
            inbox.drain()
        running = [process for process in running if process.is_alive()]
    for signal in (BaseProcess.terminate, BaseProcess.kill):
        for process in running:
            signal(process)
        deadline = time.monotonic() + SIGNAL_S
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [process for process in running if process.is_alive()]
