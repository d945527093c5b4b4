"""Process lock: a lock that no forked process inherits from a thread of its parent."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A reentrant lock that is not shared with forked processes.

    A thread may hold it for seconds. A process that is forked meanwhile does not have this thread, and would wait for
    it forever, for example to close what its parent process reads.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}

    def __enter__(self) -> None:
        self._locks.setdefault(os.getpid(), threading.RLock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._locks[os.getpid()].release()
