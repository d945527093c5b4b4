"""HTTP connections: urllib3 opens them, and they are kept between requests, but not in a forked process."""

from __future__ import annotations

import atexit
import io
import os
import socket
import ssl
import threading
import time
import weakref
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.remote.in_flight import forget_requests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

#: The maximum number of connections that a process keeps open between requests; `IndexedSamples` uses this many.
MAX_IDLE = 256

Connection: TypeAlias = "PlainConnection | TlsConnection"


class Proxy(NamedTuple):
    """A proxy, and the value of the header that authenticates this client, "" for none."""

    host: str
    port: int
    authorization: str

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers for the proxy."""
        return {"Proxy-Authorization": self.authorization} if self.authorization else {}


class Route(NamedTuple):
    """The way to a server: its scheme, host name and port, the TLS context, and the proxy, if any."""

    server: tuple[str, str, int]
    context: ssl.SSLContext
    proxy: Proxy | None = None

    def connect(self, limit_s: float) -> Connection:
        """Return a new connection.

        Args:
            limit_s: the time limit of each step.

        Raises:
            TimeoutError: a step takes longer.
            OSError: the server or the proxy refuses.
            urllib3.exceptions.HTTPError: the same, with the cause.
        """
        scheme, host, port = self.server
        address = (host, port) if self.proxy is None else self.proxy[:2]
        connection: Connection
        if scheme == "https":
            connection = TlsConnection(*address, timeout=limit_s, ssl_context=self.context)
            if self.proxy is not None:
                connection.set_tunnel(host, port, self.proxy.headers)
        else:
            connection = PlainConnection(*address, timeout=limit_s)
        connection.route = self
        try:
            connection.connect()
        except BaseException as error:
            connection.close()
            is_late = isinstance(error, TimeoutError | ConnectTimeoutError) and not isinstance(
                error, NewConnectionError
            )
            if is_late:
                raise TimeoutError(f"the connection, or the handshake of TLS, took longer than {limit_s:g} s") from None
            raise
        if isinstance(connection, TlsConnection):  # one that is cut would look like the end of the body
            connection.sock.suppress_ragged_eofs = False
        _open.add(connection)
        return connection


class KeptConnection:
    """What `PlainConnection` and `TlsConnection` add to the connections of urllib3.

    Attributes:
        route: the way to the server.
        kept_until: the time of `time.monotonic` until which it is kept without a request; 0 if it is new.
    """

    sock: Any
    route: Route
    kept_until = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether it may be used again: it is open, has not been idle for too long, and has received nothing."""
        is_quiet: bool = self.is_connected  # type: ignore[attr-defined]  # it is that of urllib3
        return is_quiet and not self.is_too_old and not (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending())

    @property
    def is_too_old(self) -> bool:
        """Whether it has been idle for too long."""
        return time.monotonic() > self.kept_until


class PlainConnection(KeptConnection, HTTPConnection):
    """A connection to a server or a proxy."""


class TimedReader(io.RawIOBase):
    """Receives from a socket, whose time limit holds for all reads together."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._until = sock, time.monotonic() + (sock.gettimeout() or 0.0)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Receive the available bytes; return 0 at the end of the connection."""
        self._sock.settimeout(max(self._until - time.monotonic(), 1e-6))
        return self._sock.recv_into(buffer)


class ProxyAnswer(HTTPResponse):
    """The answer of a proxy. With a limit for each read alone, endless headers would block forever."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(TimedReader(sock))


class TlsConnection(KeptConnection, HTTPSConnection):
    """A connection to a server by TLS, maybe through a proxy."""

    response_class = ProxyAnswer


#: The open connections of this process.
_open: weakref.WeakSet[Connection] = weakref.WeakSet()
#: The idle connections, the oldest first.
_idle: list[Connection] = []
_lock = threading.Lock()
#: What a forked process must not destroy, because that would send TLS's farewell to the server of its parent.
_inherited: list[list[Connection]] = []


def take_idle(route: Route) -> Connection | None:
    """Return the most recently used open connection, or None if there is none."""
    while True:
        with _lock:
            place = next((place for place in range(len(_idle) - 1, -1, -1) if _idle[place].route == route), None)
            if place is None:
                return None
            found = _idle.pop(place)
        if found.is_usable:
            return found
        found.close()


def keep(connection: Connection, idle_s: float) -> None:
    """Keep a connection whose last response was read to its end, for some seconds."""
    connection.kept_until = time.monotonic() + idle_s
    with _lock:
        _idle.append(connection)
        dropped = _idle[: len(_idle) - MAX_IDLE] if len(_idle) > MAX_IDLE else []
        dropped += [each for each in _idle[len(dropped) : len(dropped) + 1] if each.is_too_old]
        del _idle[: len(dropped)]
    for each in dropped:
        each.close()


def close_idle(route: Route | None = None) -> None:
    """Close the connections that wait for a request, or those of a route."""
    with _lock:
        dropped = [each for each in _idle if route in (None, each.route)]
        _idle[:] = [each for each in _idle if route not in (None, each.route)]
    for each in dropped:
        each.close()


def _forget_all() -> None:
    """Close the copies of the connections of the parent process, which still uses them, without TLS's farewell."""
    global _lock, _open, _idle
    forget_requests()
    _inherited.append(_idle)
    _lock, _idle = threading.Lock(), []
    for connection in [*_open]:
        if connection.sock is not None and (descriptor := connection.sock.detach()) >= 0:
            os.close(descriptor)
    _open = weakref.WeakSet()


at_fork("connections", after_in_child=_forget_all)
atexit.register(close_idle)
