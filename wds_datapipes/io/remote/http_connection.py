"""HTTP connections: sockets that never block, and a pool that keeps them open between requests."""

from __future__ import annotations

import atexit
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from http.client import HTTPException, RemoteDisconnected
from typing import TypeAlias, TypeVar

from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.remote.request_steps import Steps
from wds_datapipes.io.streams import move_bytes
from wds_datapipes.system import POLLIN, POLLOUT, new_poll

T = TypeVar("T")

#: The maximum number of connections that a process keeps open between requests; `IndexedSamples` uses this many.
MAX_IDLE = 64
#: The maximum size of the headers of a response in bytes.
MAX_HEAD_BYTES = 256 << 10
#: What TLS waits for, whether it sends or receives.
TLS_EVENTS: dict[type, int] = {ssl.SSLWantReadError: POLLIN, ssl.SSLWantWriteError: POLLOUT}
#: The number of bytes received at once while headers are expected.
RECEIVED_BYTES = 16 << 10
#: Linux only: acknowledges the next segments at once.
QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)


class Connection:
    """A connection to a server. Its steps share a deadline.

    With a time limit for each read, a server that sends single bytes or endless headers could block its client forever.

    Args:
        sock: the socket, which no longer blocks.

    Attributes:
        sock: the socket.
        received: the bytes that were received and not used yet.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.received = b""
        self.limit(0.0)

    def limit(self, seconds: float) -> None:
        """Set the time limit of all following steps together; after it, they raise `TimeoutError`."""
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def attempt(self, call: Callable[[], T], events: int = POLLIN) -> Steps[T]:
        """Call a method of the socket; repeat it after each of ``events`` until it does not have to wait."""
        while time.monotonic() < self._until:
            try:
                return call()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                events = TLS_EVENTS.get(type(error), events)
            yield self.sock, events
        raise TimeoutError(f"the server has not sent its headers, or the next bytes, within {self._seconds:g} s")

    def send(self, data: bytes) -> Steps[None]:
        """Send a request and drop what was received before."""
        self.received = b""
        while data:
            data = data[(yield from self.attempt(partial(self.sock.send, data), POLLOUT)) :]
        # A server that waits for each acknowledgement would otherwise wait for 40 ms.
        if QUICKACK is not None:
            self.sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)

    def secure(self, context: ssl.SSLContext, host: str) -> Steps[None]:
        """Begin TLS with a server of this name.

        Raises:
            ssl.SSLError: the server is not trusted, or does not speak TLS.
        """
        # A connection that ends without TLS's own message was cut; by default, that looks like the end of the body.
        self.sock = secured = context.wrap_socket(
            self.sock, server_hostname=host, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        yield from self.attempt(secured.do_handshake)

    def receive(self, view: memoryview) -> Steps[int]:
        """Receive the available bytes, at most ``len(view)``; 0 at the end of the connection.

        Raises:
            EOFError: TLS shows that the connection was cut.
        """
        if not self.received:
            try:
                return (yield from self.attempt(partial(self.sock.recv_into, view)))
            except ssl.SSLEOFError:
                raise EOFError(
                    "the connection was cut: it ended without close_notify of TLS, so the rest may be missing"
                ) from None
        count, rest = move_bytes(memoryview(self.received), view)
        self.received = bytes(rest)
        return count

    def receive_until(self, end: re.Pattern[bytes]) -> Steps[bytes]:
        """Receive the bytes up to a pattern and return them without it."""
        while (found := end.search(self.received)) is None:
            if len(self.received) > MAX_HEAD_BYTES:
                raise HTTPException(f"the server sends headers of more than {MAX_HEAD_BYTES} bytes")
            if not getattr(self.sock, "pending", int)():  # bytes that TLS has decrypted
                # Even if bytes are available, so that endless headers do not hold up other requests.
                yield self.sock, POLLIN
            try:
                more = yield from self.attempt(partial(self.sock.recv, RECEIVED_BYTES))
            except ssl.SSLEOFError:  # without close_notify
                more = b""
            if not more:
                raise RemoteDisconnected("the server has closed the connection before the end of its headers")
            self.received += more
        part, self.received = self.received[: found.start()], self.received[found.end() :]
        return part

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


IdleConnection: TypeAlias = tuple[Hashable, Connection, float]
"""The key of an idle connection, the connection, and the time until which it is kept."""


class ConnectionPool:
    """Keeps connections open between requests; it is thread-safe, and empty in a forked process.

    A new connection takes one or two round trips to the server, more with TLS, and as much CPU time as a request.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The idle connections, the oldest first.
        self._idle: list[IdleConnection] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> Connection | None:
        """Return the most recently used open connection, or None if there is none."""
        while True:
            with self._lock:
                found = next((entry for entry in reversed(self._idle) if entry[0] == key), None)
                if found is None:
                    return None
                self._idle.remove(found)
            _, connection, until = found
            if self._clock() <= until and _is_quiet(connection.sock):
                return connection
            connection.close()

    def put(self, key: Hashable, connection: Connection, idle_s: float) -> None:
        """Keep a connection whose last response was read to its end, for some seconds."""
        now = self._clock()
        with self._lock:
            self._idle.append((key, connection, now + idle_s))
            _, oldest, until = self._idle[0]
            if len(self._idle) <= MAX_IDLE and now <= until:
                return
            del self._idle[0]
        oldest.close()

    def clear(self, key: Hashable = None) -> None:
        """Close all kept connections, or those with a key."""
        with self._lock:
            dropped = [each for each in self._idle if key in (None, each[0])]
            self._idle = [each for each in self._idle if key not in (None, each[0])]
        for _, connection, _ in dropped:
            connection.close()

    def forget(self) -> None:
        """Drop the connections of the parent process, which still uses them."""
        self._lock = threading.Lock()  # a thread that does not exist in this process may hold it
        self.clear()


def _is_quiet(sock: socket.socket) -> bool:
    """Whether a connection is open and has received no unrequested data."""
    poll = new_poll()
    poll.register(sock, POLLIN)
    return not poll.poll(0) and not (isinstance(sock, ssl.SSLSocket) and sock.pending())


#: The connections of this process.
POOL = ConnectionPool()
at_fork("connections", after_in_child=POOL.forget)
atexit.register(POOL.clear)
