"""Differences between operating systems: file locks, processors, and waiting for sockets."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Whether this system has file locks that end with their owner and that apply to open files.
HAS_LOCKS = fcntl is not None
#: Whether processes can be forked.
HAS_FORK = hasattr(os, "fork")
#: Whether an open file can be renamed and removed, as by POSIX.
MOVES_OPEN_FILES = HAS_LOCKS
#: Of `os.open`: child processes do not inherit the descriptor, and line breaks are not translated.
OPEN_FLAGS: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
#: The events of `new_poll`.
POLLIN: int = getattr(select, "POLLIN", 1)
POLLOUT: int = getattr(select, "POLLOUT", 4)


def processor_count() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Return the default number of processes: one per processor, or 0 if the system cannot fork."""
    return processor_count() if HAS_FORK else 0


def user_id() -> int:
    """Return the number of the user of this process; 0 if users have none."""
    return os.getuid() if hasattr(os, "getuid") else 0


def no_locks() -> OSError:
    """Return the error of a system without locks of open files."""
    return OSError(errno.ENOLCK, f"{sys.platform} has no locks of open files")


def lock_descriptor(descriptor: int, *, is_shared: bool = False, wait: bool = True) -> None:
    """Lock an open file until it is closed by every process that has this descriptor.

    Raises:
        BlockingIOError: another process holds the lock, and ``wait`` is False.
        OSError: the system or the file system has no locks.
    """
    if fcntl is None:
        raise no_locks()
    fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def unlock_descriptor(descriptor: int) -> None:
    """Unlock an open file for all processes that have this descriptor."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


#: Held while the position of a file is changed.
_positioned = threading.Lock()


def _read_at(descriptor: int, count: int, offset: int) -> bytes:
    with _positioned:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)


def _write_first(descriptor: int, chunks: Sequence[memoryview]) -> int:
    return os.write(descriptor, chunks[0])


#: ``os.pread``, which reads bytes at an offset of an open file, or the same under a lock.
read_at: Callable[[int, int, int], bytes] = getattr(os, "pread", _read_at)
#: ``os.writev``, which writes some or all of the chunks with one system call and returns the number of bytes.
write_chunks: Callable[[int, Sequence[memoryview]], int] = getattr(os, "writev", _write_first)


class SelectPoll:
    """The interface of `select.poll` for sockets, by `select.select`, on systems that have only this one."""

    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, file: socket.socket | int, events: int = POLLIN | POLLOUT) -> None:
        """Wait for events of a socket, too."""
        self._events[file if isinstance(file, int) else file.fileno()] = events

    def unregister(self, file: socket.socket | int) -> None:
        """Stop waiting for a socket."""
        del self._events[file if isinstance(file, int) else file.fileno()]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        """Return the sockets with events, and the events; an empty list after ``timeout_ms``."""
        timeout_s = None if timeout_ms is None else max(timeout_ms, 0) / 1000
        if not self._events:  # Windows rejects empty lists
            threading.Event().wait(timeout_s)
            return []
        read, write = ([each for each, events in self._events.items() if events & event] for event in (POLLIN, POLLOUT))
        readable, writable, broken = select.select(read, write, [*self._events], timeout_s)
        found = dict.fromkeys(broken, POLLIN | POLLOUT)
        for each, event in ((readable, POLLIN), (writable, POLLOUT)):
            for number in each:
                found[number] = found.get(number, 0) | event
        return [*found.items()]


#: Returns a new `select.poll`, or a `SelectPoll`.
new_poll: Callable[[], Any] = getattr(select, "poll", SelectPoll)
