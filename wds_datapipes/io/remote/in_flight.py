"""Requests in flight: what each thread waits for, so that another thread can abort it."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from wds_datapipes.io.process_lock import ProcessLock

#: The sockets that wait for the headers of a response, by the thread that has sent the request; not by its identifier,
#: which a later thread may have.
_waiting: dict[threading.Thread, socket.socket] = {}
#: The sockets whose requests were aborted.
_aborted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
#: Held while a request is aborted, and when its connection becomes free for another one.
abort_lock = ProcessLock()  # garbage collection may abort requests in a thread that holds it


class AbortedRequestError(Exception):
    """Another thread has aborted the request, because its answer is no longer needed."""


@contextmanager
def wait_for_headers(sock: socket.socket) -> Iterator[None]:
    """Let other threads abort the request for whose answer this thread waits in the context.

    Raises:
        AbortedRequestError: one of them has done so.
    """
    thread = threading.current_thread()
    _waiting[thread] = sock
    try:
        yield
    except Exception:
        if sock in _aborted:
            raise AbortedRequestError from None
        raise
    finally:
        with abort_lock:
            _waiting.pop(thread, None)


def abort_request(thread: threading.Thread) -> None:
    """Abort the request of a thread that waits for the headers of a response, if it does."""
    with abort_lock:
        if (sock := _waiting.get(thread)) is not None:
            _aborted.add(sock)
            with suppress(OSError):  # it may be closed
                sock.shutdown(socket.SHUT_RDWR)


def forget_requests() -> None:
    """Forget the requests of the parent process."""
    _waiting.clear()
    _aborted.clear()
