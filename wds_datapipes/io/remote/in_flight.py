"""Requests in flight: what each thread waits for, so that another thread can abort it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: The sockets that wait for the headers of a response, by the thread that has sent the request.
_waiting: dict[int | None, socket.socket] = {}
#: The threads whose requests were aborted.
_aborted: set[int | None] = set()


class AbortedRequestError(Exception):
    """Another thread has aborted the request, because its answer is no longer needed."""


@contextmanager
def wait_for_headers(sock: socket.socket) -> Iterator[None]:
    """Let other threads abort the request for whose answer this thread waits in the context.

    Raises:
        AbortedRequestError: one of them has done so.
    """
    thread = threading.get_ident()
    _waiting[thread] = sock
    try:
        yield
    except Exception:
        if thread in _aborted:
            raise AbortedRequestError from None
        raise
    finally:
        _waiting.pop(thread, None)
        _aborted.discard(thread)


def abort_request(thread: threading.Thread) -> None:
    """Abort the request of a thread that waits for the headers of a response, if it does."""
    if (sock := _waiting.get(thread.ident)) is not None:
        _aborted.add(thread.ident)
        with suppress(OSError):  # it may be closed
            sock.shutdown(socket.SHUT_RDWR)


def forget_requests() -> None:
    """Forget the requests of the parent process."""
    _waiting.clear()
    _aborted.clear()
