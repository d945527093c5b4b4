"""HTTP connections: those of urllib3, with one deadline for all headers, and closed in a forked process."""

from __future__ import annotations

import atexit
import io
import os
import queue
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from typing import TYPE_CHECKING, Any, TypeAlias

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager, ProxyManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from wds_datapipes.errors import plural
from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.remote.in_flight import forget_requests, wait_for_headers
from wds_datapipes.io.streams import move_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: The maximum number of connections to a server that a process keeps open between requests.
MAX_IDLE = 64
#: The maximum number of servers to which connections are kept.
MAX_SERVERS = 64
#: Linux only: acknowledges the next segments at once. Some servers wait for each acknowledgement, up to 40 ms.
QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
#: The size of a chunk, and its extensions; http.client would also accept a sign.
CHUNK = re.compile(rb"\s*([0-9a-fA-F]{1,16})\s*(?:;.*)?\r?\n", re.DOTALL)
#: The maximum length of the line with the size of a chunk.
MAX_LINE_BYTES = 64 << 10
#: At most this many bytes of a body are read so that its connection can be kept.
MAX_DRAINED_BYTES = 4 << 10
#: A size in ASCII digits, with a limited length; http.client would also accept others.
SIZE = re.compile(r"[0-9]{1,19}")


class Incoming(io.RawIOBase):
    """What a connection receives. With a time limit for each read alone, endless headers would block forever.

    Args:
        sock: the socket, with the time limit of a read.

    Attributes:
        until: the time by which what has begun must have arrived; None once it has.
        is_paused: whether nothing is received now, also if something has arrived.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._file = sock, sock.makefile("rb", buffering=0)
        self._seconds = sock.gettimeout() or 0.0
        self.until: float | None = None
        self.is_paused = False
        self.begin("its headers")

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return a buffered file, as a socket does."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        """Receive the available bytes; return 0 at the end of the connection.

        Raises:
            TimeoutError: nothing arrives in time.
            EOFError: TLS shows that the connection was cut.
        """
        if self.is_paused:
            return None
        try:
            if self.until is not None:
                self._sock.settimeout(max(self.until - time.monotonic(), 1e-3))
            count = self._file.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(
                f"the server has not sent its headers, or the next bytes, within {self._seconds:g} s"
            ) from None
        except ssl.SSLEOFError:
            if self.until is None:
                raise EOFError(
                    "the connection was cut: it ended without close_notify of TLS, so the rest may be missing"
                ) from None
            count = 0
        if not count and self.until is not None:  # http.client would take it for the end of the headers
            raise RemoteDisconnected(f"the server has closed the connection before the end of {self._what}")
        return count

    def begin(self, what: str) -> None:
        """Let the time limit hold for all of something from now on, such as ``"its headers"``."""
        self._what, self.until = what, time.monotonic() + self._seconds

    def end(self) -> None:
        """Let the time limit hold for each read from now on."""
        self.until = None
        self._sock.settimeout(self._seconds)

    def abort(self) -> None:
        """Abort a read in another thread."""
        with suppress(OSError):  # it may be closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the file of the socket."""
        self._file.close()
        super().close()


class Response(HTTPResponse):
    """A response whose body is read as it arrives."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        self.incoming = Incoming(sock)
        super().__init__(self.incoming, *args, **options)  # type: ignore[arg-type]  # it makes only a file of it
        #: The bytes of the body that have arrived with the headers; and the rest of a chunk.
        self._rest, self._chunk = memoryview(b""), 0

    def begin(self) -> None:
        """Receive the status and the headers, also after responses that only announce it, such as 103."""
        super().begin()
        while 100 <= self.status < 200:
            self.headers = self.msg = None  # type: ignore[assignment]  # so that http.client receives others
            super().begin()
        if self.length and not SIZE.fullmatch(self.headers["Content-Length"].strip()):
            self.length, self.will_close = None, True
        self.incoming.end()
        self._rest = memoryview(b"") if self.chunked else memoryview(self._received())

    def _received(self) -> bytes:
        """Return the bytes that have arrived with the headers."""
        self.incoming.is_paused = True
        rest = self.fp.peek()
        self.incoming.is_paused = False
        return rest

    def readinto1(self, buffer: Buffer, /) -> int:
        """Read the bytes that are available or arrive first, at most ``len(buffer)``; 0 at the end.

        Raises:
            EOFError: the connection has ended too early.
        """
        view = memoryview(buffer)
        if self.chunked:
            left = self._chunk or self._begin_chunk()
            data = self.fp.read1(min(left, len(view))) if left else b""
            count = len(data)
            view[:count] = data
            self._chunk -= count
        else:
            left = len(view) if self.length is None else self.length
            if self._rest:
                count, _ = move_bytes(self._rest[:left], view)
                self._rest = self._rest[count:]
            else:
                count = self.incoming.readinto(view[:left]) or 0 if left else 0
            left, self.length = self.length or 0, None if self.length is None else self.length - count
        if left and not count and len(view):
            raise EOFError(f"the response ends {plural(left, 'byte')} too early")
        return count

    @property
    def has_ended(self) -> bool:
        """Whether the body was read to its end and nothing follows it, so that the connection may be kept."""
        return self.length == 0 and not self.will_close and not self._rest

    def drain(self) -> bool:
        """Read the rest of a small body that has arrived; return whether another request may use the connection."""
        if self.length is not None and self.length <= MAX_DRAINED_BYTES:
            self.incoming.until = time.monotonic()
            with suppress(OSError, EOFError):
                while self.readinto1(bytearray(MAX_DRAINED_BYTES)):
                    pass
        return self.has_ended

    def _begin_chunk(self) -> int:
        """Return the size of the next chunk, 0 after the last one."""
        if self.length == 0:
            return 0
        self.incoming.begin("the size of a chunk")
        line = self.fp.readline(MAX_LINE_BYTES)
        if line in (b"\r\n", b"\n"):  # of the previous chunk
            line = self.fp.readline(MAX_LINE_BYTES)
        if (found := CHUNK.fullmatch(line)) is None:
            raise HTTPException(f"the size of a chunk is {line[:100]!r}")
        self._chunk = int(found[1], 16)
        if not self._chunk:
            while self.fp.readline(MAX_LINE_BYTES).strip():
                pass
            self.length = 0
        self.incoming.end()
        return self._chunk


#: Whether this thread has tried to connect to a server since `forget_connecting`.
_connected = threading.local()
#: The open connections of this process.
_open: weakref.WeakSet[Any] = weakref.WeakSet()


class TimedConnection:
    """What `Connection` and `TlsConnection` add to the connections of urllib3.

    Attributes:
        idle_s: for how many seconds it is kept open without a request.
    """

    sock: Any
    timeout: Any
    idle_s, _idle_since = 0.0, 0.0

    def connect(self) -> None:
        """Connect to the server, or to the proxy."""
        _connected.value = True
        try:
            super().connect()  # type: ignore[misc]  # it is that of urllib3
        except NewConnectionError:
            raise
        except (TimeoutError, ConnectTimeoutError):
            raise TimeoutError(
                f"the connection, or the handshake of TLS, took longer than {self.timeout:g} s"
            ) from None
        if hasattr(self.sock, "suppress_ragged_eofs"):  # of TLS: a connection that is cut would look like the end
            self.sock.suppress_ragged_eofs = False
        _open.add(self)

    def getresponse(self) -> Any:
        """Receive the headers of a response."""
        if QUICKACK is not None:
            self.sock.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
        with wait_for_headers(self.sock):
            return super().getresponse()  # type: ignore[misc]  # it is that of urllib3

    def close(self) -> None:
        """Close the connection."""
        super().close()  # type: ignore[misc]  # it is that of urllib3

    def become_idle(self) -> None:
        """Begin to wait for the next request."""
        self._idle_since = time.monotonic()

    @property
    def is_too_old(self) -> bool:
        """Whether it has been idle for too long."""
        return time.monotonic() > self._idle_since + self.idle_s

    @property
    def is_connected(self) -> bool:
        """Whether it is open, and has received no unrequested data."""
        is_quiet: bool = super().is_connected  # type: ignore[misc]  # it is that of urllib3
        return is_quiet and not self.is_too_old and not (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending())


class Connection(TimedConnection, HTTPConnection):
    """A connection to a server."""

    response_class = Response


class TlsConnection(TimedConnection, HTTPSConnection):
    """A connection to a server by TLS."""

    response_class = Response


class IdleConnections(queue.LifoQueue[Any]):
    """Connections that wait for a request; the last one is used first, and those that wait too long are closed."""

    def put(self, item: TimedConnection | None, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002  as in Queue
        """Keep a connection, or close it if there are too many."""
        try:
            super().put(item, block=False)
        except queue.Full:
            if item is not None:
                item.close()

    def _put(self, item: TimedConnection | None) -> None:
        while self.queue and self.queue[0].is_too_old:
            self.queue.pop(0).close()
        if item is not None:  # urllib3 fills a pool with None, in place of connections to come
            item.become_idle()
            super()._put(item)


class Pool(HTTPConnectionPool):
    """The connections to a server."""

    ConnectionCls: type[Any] = Connection
    QueueCls = IdleConnections


class TlsPool(HTTPSConnectionPool):
    """The connections to a server by TLS."""

    ConnectionCls: type[Any] = TlsConnection
    QueueCls = IdleConnections


Key: TypeAlias = tuple[ssl.SSLContext, str, tuple[tuple[str, str], ...]]

#: The pools of this process, by the TLS context, and the proxy and its headers.
_managers: dict[Key, PoolManager] = {}
_managers_lock = threading.Lock()
#: What a forked process must not destroy, because that would take locks that another thread may have held.
_inherited: list[dict[Key, PoolManager]] = []


def pool_of(
    server: tuple[str, str, int],
    context: ssl.SSLContext,
    proxy: str = "",
    proxy_headers: Mapping[str, str] | None = None,
) -> HTTPConnectionPool:
    """Return the connections of this process to a server, by its scheme, host and port.

    Args:
        server: the scheme, host name and port of the server.
        context: the TLS context.
        proxy: the URL of the proxy; "" for none.
        proxy_headers: sent to the proxy.
    """
    scheme, host, port = server
    key = context, proxy, tuple((proxy_headers or {}).items())
    with _managers_lock:
        if (found := _managers.get(key)) is None:
            options: dict[str, Any] = {"num_pools": MAX_SERVERS, "maxsize": MAX_IDLE, "ssl_context": context}
            found = ProxyManager(proxy, proxy_headers=proxy_headers, **options) if proxy else PoolManager(**options)
            found.pool_classes_by_scheme = {"http": Pool, "https": TlsPool}
            _managers[key] = found
    return found.connection_from_host(host, port, scheme)


def forget_connecting() -> None:
    """Begin to watch whether this thread connects to a server."""
    _connected.value = False


def has_connected() -> bool:
    """Whether this thread has tried to connect to a server; otherwise, it has used a connection again."""
    return getattr(_connected, "value", False)


def close_idle() -> None:
    """Close the connections that wait for a request."""
    with _managers_lock:
        for manager in _managers.values():
            for key in manager.pools.keys():  # noqa: SIM118  it cannot be iterated
                if (pool := manager.pools.get(key)) is not None:
                    pool.close()  # clearing a manager closes them only once nothing refers to them
            manager.clear()


def _forget_all() -> None:
    """Close the copies of the connections of the parent process, which still uses them, without TLS's farewell."""
    global _managers, _managers_lock, _open
    forget_requests()
    _inherited.append(_managers)
    _managers, _managers_lock = {}, threading.Lock()
    for connection in [*_open]:
        if connection.sock is not None and (descriptor := connection.sock.detach()) >= 0:
            os.close(descriptor)
    _open = weakref.WeakSet()


at_fork("connections", after_in_child=_forget_all)
atexit.register(close_idle)
