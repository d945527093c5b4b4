"""HTTP connections: a timeout for each step of a response, and a pool that keeps them open between requests."""

from __future__ import annotations

import atexit
import base64
import io
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import proxy_bypass

from wds_datapipes.io.raw_streams import RawStream, move_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: The maximum number of connections that a process keeps open between requests; `IndexedSamples` uses this many.
MAX_IDLE = 32
#: The maximum number of seconds for which one is kept; servers and address translation in routers close them later.
MAX_IDLE_S = 15.0
#: The maximum number of headers in a response, and the maximum size of a header in bytes.
MAX_HEADERS, MAX_HEADER_BYTES = 100, 64 << 10
#: A size in ASCII digits, with a limited length; Python would accept other digits as well.
SIZE = re.compile(r"[0-9]{1,19}")
#: The maximum number of seconds that `Response.close` waits for a read in another thread to end.
MAX_READER_EXIT_S = 1.0


class TimedReader(RawStream):
    """Reads a socket within a deadline that several reads share.

    http.client limits each read of the socket separately, so a server that sends a byte now and then, or endless
    headers, would block its client forever.

    Args:
        sock: the socket.
        seconds: the limit, for all headers of a response, and for each part of its body.

    Attributes:
        is_paused: whether reading is paused.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock, self._seconds = sock, seconds
        self._hold = sock.makefile("rb", buffering=0)  # it keeps the socket open until it is closed
        self.is_paused = False
        self.restart()

    def restart(self) -> None:
        """Restart the timer."""
        self._end = time.monotonic() + self._seconds

    def readinto(self, buffer: Buffer, /) -> int | None:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        if self.is_paused:
            return None
        try:
            if (left := self._end - time.monotonic()) <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            return self._sock.recv_into(buffer)
        except TimeoutError:
            raise TimeoutError(
                f"the server has not sent its headers, or the next bytes, within {self._seconds:g} s"
            ) from None

    def _release(self) -> None:
        """Close the socket."""
        self._hold.close()


class TimedResponse(HTTPResponse):
    """A response of http.client that is read within a deadline.

    Attributes:
        source: reads the socket.
        reader: reads it with a buffer.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float, **options: Any) -> None:
        self.source = TimedReader(sock, timeout_s)
        self.reader: io.BufferedReader = io.BufferedReader(self.source)
        super().__init__(self, **options)  # type: ignore[arg-type]  # it only calls makefile

    def makefile(self, *_: object) -> io.BufferedReader:
        """Return the reader."""
        return self.reader

    def begin(self) -> None:
        """Read the status and the headers, and determine where the body ends.

        http.client reads headers with the e-mail parser, which takes a third of the CPU time of a request.
        """
        self.status = 100
        while 100 <= self.status < 200:
            version, self.status, self.reason = self._read_status()  # type: ignore[attr-defined]  # nothing public does
            self.fields = self._read_fields()
        self.code, self.version, self.reason = self.status, 11, self.reason.strip()
        connection, length = (self.fields.get(name, "").lower() for name in ("Connection", "Content-Length"))
        self.chunked = self.fields.get("Transfer-Encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.length = int(length) if SIZE.fullmatch(length) and not self.chunked else None
        if self._method == "HEAD" or self.status in (204, 304):  # type: ignore[attr-defined]  # nothing public has it
            self.length = 0
        is_kept = "keep-alive" in connection if version == "HTTP/1.0" else "close" not in connection
        self.will_close = not is_kept or (self.length is None and not self.chunked)

    def _read_fields(self) -> dict[str, str]:
        """Return the headers by capitalized name, such as ``"Etag"``; the first one counts if a name is repeated."""
        lines = iter(lambda: self.reader.readline(MAX_HEADER_BYTES).strip(b"\r\n"), b"")
        parts = [line.decode("iso-8859-1").partition(":") for line in islice(lines, MAX_HEADERS)]
        if len(parts) == MAX_HEADERS:
            raise HTTPException(f"the server sends {MAX_HEADERS} headers or more")
        return {name.title(): value.strip() for name, _, value in reversed(parts)}

    def read_buffered(self) -> memoryview:
        """Return the bytes in the buffer, without waiting for more."""
        self.source.is_paused = True
        data = self.reader.read(len(self.reader.peek()))
        self.source.is_paused = False
        return memoryview(data)


class Response(RawStream):
    """A response, whose body is streamed. If the body is read to its end, the next request uses the same connection.

    Args:
        connection: the connection, with a request sent.
        key: the key of the connection in the pool.

    Attributes:
        status: the HTTP status.
        headers: the headers by capitalized name, such as ``"Etag"``.

    Raises:
        OSError: the network failed.
        http.client.HTTPException: the response is not HTTP.
    """

    def __init__(self, connection: HTTPConnection, key: Hashable) -> None:
        self._connection: HTTPConnection | None = None  # without a response, `close` has nothing to do
        self._sock: socket.socket = connection.sock  # http.client forgets it if the response is the last one
        self._response = cast(TimedResponse, connection.getresponse())
        self.status, self.reason, self.headers = self._response.status, self._response.reason, self._response.fields
        #: The remaining bytes of the body; None if it is chunked, or ends when the connection is closed.
        self._left = self._response.length
        #: The part of it that came with the headers.
        self._first = memoryview(b"") if self._left is None else self._response.read_buffered()
        self._connection = connection
        self._key, self._process = key, os.getpid()
        self._reading, self._closing = threading.Lock(), threading.Lock()

    def readinto(self, buffer: Buffer, /) -> int:
        """Read the available bytes, at most ``len(buffer)``; 0 at the end.

        Raises:
            TimeoutError: no data arrive.
        """
        with self._reading:
            view = memoryview(buffer).cast("B")[: self._left]
            if not view:
                return 0
            if self._connection is None:
                raise ValueError("the response is closed")
            self._response.source.restart()
            if self._left is None:
                data = self._response.read1(len(view))
                view[: len(data)] = data
                return len(data)
            if self._first:
                count, self._first = move_bytes(self._first, view)
            else:
                count = self._response.source.readinto(view) or 0
                if not count:
                    raise EOFError(f"the response ends {self._left} bytes too early")
            self._left -= count
            return count

    def close(self) -> None:
        """End the request, even if another thread waits for the response."""
        # Otherwise, the connection belongs to the parent process, one of whose threads may hold the locks.
        if self._connection is None:
            return
        is_ours = os.getpid() == self._process
        with self._closing if is_ours else nullcontext():
            connection, self._connection = self._connection, None
        if connection is None:
            return
        super().close()
        is_reusable = False
        if is_ours:
            if self._reading.acquire(blocking=False):
                # Either the body was read to its end, or all of it came with the headers and nothing came after it.
                is_reusable = self._left == len(self._first) and not self._response.will_close
                self._reading.release()
            if not is_reusable:
                with suppress(OSError):  # it may be closed
                    self._sock.shutdown(socket.SHUT_RDWR)
                # This ends a read of another thread. Once closed, the socket's descriptor may be that of a new socket.
                if self._reading.acquire(timeout=MAX_READER_EXIT_S):
                    self._reading.release()
        self._response.close()
        if is_reusable:
            POOL.put(self._key, connection)
        else:
            connection.close()


IdleConnection: TypeAlias = tuple[Hashable, HTTPConnection, float]
"""The key of an idle connection, the connection, and the time since which it is idle."""


class ConnectionPool:
    """Keeps connections open between requests; it is thread-safe, and a forked process begins with an empty one.

    Connecting takes one or two round trips to the server, more with TLS, and as much CPU time as the request.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The oldest first.
        self._idle: list[IdleConnection] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> HTTPConnection | None:
        """Return the most recently used open connection, or None if there is none."""
        while True:
            with self._lock:
                found = next((entry for entry in reversed(self._idle) if entry[0] == key), None)
                if found is None:
                    return None
                self._idle.remove(found)
            _, connection, since = found
            if self._clock() - since <= MAX_IDLE_S and _is_quiet(connection.sock):
                return connection
            connection.close()

    def put(self, key: Hashable, connection: HTTPConnection) -> None:
        """Keep a connection whose last response was read to its end."""
        now = self._clock()
        entry = (key, connection, now)
        self._change(lambda idle: [each for each in [*idle, entry][-MAX_IDLE:] if now - each[2] <= MAX_IDLE_S])

    def clear(self, key: Hashable = None) -> None:
        """Close all kept connections, or those with a key."""
        self._change(lambda idle: [each for each in idle if key not in (None, each[0])])

    def _change(self, choose: Callable[[list[IdleConnection]], list[IdleConnection]]) -> None:
        """Choose the connections to keep, and close the others."""
        with self._lock:
            before = self._idle
            self._idle = choose(before)
            dropped = [each for each in before if each not in self._idle]
        for _, connection, _ in dropped:
            connection.close()

    def forget(self) -> None:
        """Drop the connections of the parent process, which still uses them."""
        self._lock = threading.Lock()  # a thread that does not exist in this process may have held it
        self.clear()


def _is_quiet(sock: socket.socket) -> bool:
    """Whether a connection is open and has received no unrequested data."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0) and not (isinstance(sock, ssl.SSLSocket) and sock.pending())


#: The connections of this process.
POOL = ConnectionPool()
os.register_at_fork(after_in_child=POOL.forget)
atexit.register(POOL.clear)


REDIRECTS = {301, 302, 303, 307, 308}
MAX_REDIRECTS = 10
#: The statuses whose body is the file or a range of it.
WITH_CONTENT = {200, 203, 206}
#: Headers that only the original host receives.
SECRET = {"authorization", "cookie", "proxy-authorization"}
#: Characters of a URL that are not quoted; a percent sign counts as the beginning of a quoted character.
PLAIN = "%/:=&?~#+!$,;'@()*[]"
#: The client's name; some servers reject requests without one.
USER_AGENT = {"User-Agent": "wds-datapipes"}
CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}
#: The time limit in seconds for connecting; a slower host is down, or blocked by a firewall.
CONNECT_S = 10.0
#: The elements of an S3 error that are shown, and the maximum number of bytes searched for them.
ERROR_PARTS, ERROR_BYTES = re.compile(r"<(Code|Region)>([\w.-]{1,100})</"), 4 << 10
#: The message of http.client if a proxy rejects a connection.
TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (\d{3}) ?(.*)", re.DOTALL)


class HttpStatusError(Exception):
    """A server has returned an error.

    Attributes:
        status: the HTTP status.
        message: the server's description of the status, and the code of the error, if the body has one.
        headers: the headers of the response.
        region: the region of the requested bucket, if a store responds that it is elsewhere.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str], body: str = "") -> None:
        parts = dict(ERROR_PARTS.findall(body))
        self.message = f"{message} ({parts['Code']})" if "Code" in parts else message
        self.status, self.headers, self.region = status, headers, parts.get("Region")
        super().__init__(f"{status}, {self.message}")


class Access(NamedTuple):
    """How servers are reached.

    Attributes:
        timeout_s: the time limit in seconds for all headers of a response, and for each part of its body; also for
            connecting, with at most `CONNECT_S`.
        context: the TLS context with the trusted authorities.
        proxies: the proxies by scheme, as `urllib.request.getproxies` returns them from the environment.
    """

    timeout_s: float
    context: ssl.SSLContext
    proxies: Mapping[str, str]


def send_request(url: str, headers: Mapping[str, str], access: Access, method: str = "GET") -> Response:
    """Send a request; follow redirects, and use a proxy.

    Args:
        url: ``http:`` or ``https:``; user and password in it are sent as HTTP Basic authentication.
        headers: the headers to send. Secret ones are only sent to the host of ``url``.
        access: how the servers are reached.
        method: ``"GET"`` or ``"HEAD"``.

    Raises:
        FileNotFoundError: the file does not exist.
        HttpStatusError: the server returned another error, or redirects in circles.
        OSError: the network failed.
        http.client.HTTPException: the response is not HTTP.
    """
    current = urlsplit(url)
    sent = {**USER_AGENT, **headers}
    for _ in range(MAX_REDIRECTS + 1):
        if current.username is not None and not any(name.lower() == "authorization" for name in sent):
            sent["Authorization"] = _basic(current)
        response = _send_once(method, current, sent, access)
        if response.status not in REDIRECTS or not (location := response.headers.get("Location")):
            return _accept_response(response)
        response.close()
        next_url = urlsplit(urljoin(current.geturl(), location))
        if (next_url.scheme, next_url.hostname, _port(next_url)) != (current.scheme, current.hostname, _port(current)):
            sent = {name: value for name, value in sent.items() if name.lower() not in SECRET}
        current = next_url
    raise HttpStatusError(response.status, f"it redirects {MAX_REDIRECTS} times", response.headers)


def _send_once(method: str, url: SplitResult, headers: Mapping[str, str], access: Access) -> Response:
    if url.scheme not in CONNECTIONS or not url.hostname:
        raise InvalidURL(
            f"the URL or a redirect has the scheme {url.scheme!r} or no host; only http and https are supported"
        )
    target = quote(url.path or "/", safe=PLAIN) + (f"?{quote(url.query, safe=PLAIN)}" if url.query else "")
    proxy = _proxy_of(url, access.proxies)
    host, port = (url.hostname, _port(url)) if proxy is None else (str(proxy.hostname), proxy.port or 80)
    sent, tunnel = dict(headers), None
    if proxy is not None:
        proxy_headers = {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy)}
        if url.scheme == "https":
            tunnel = (url.hostname, _port(url), proxy_headers)
        else:
            target = f"http://{url.netloc.rpartition('@')[2]}{target}"
            sent |= proxy_headers
    secure = {"context": access.context} if url.scheme == "https" else {}
    key = (url.scheme, url.hostname, _port(url), proxy, *secure.values())
    limit_s = min(access.timeout_s, CONNECT_S)

    def request(connection: HTTPConnection) -> Response:
        response_class = partial(TimedResponse, timeout_s=access.timeout_s)
        connection.response_class = response_class  # type: ignore[assignment]  # it is called like one
        try:
            if connection.sock is None:
                _connect(connection)
            connection.sock.settimeout(limit_s)
            connection.request(method, target, headers=sent)
            # A server that waits for each acknowledgement would otherwise wait for 40 ms.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            return Response(connection, key)
        except BaseException:
            connection.close()
            raise

    if (kept := POOL.take(key)) is not None:
        try:
            return request(kept)
        except OSError as error:
            POOL.clear(key)
            if isinstance(error, TimeoutError):
                raise
            # The server has closed the connection, as it may at any time between two requests.
    connection = CONNECTIONS[url.scheme](host, port, timeout=limit_s, **secure)
    if tunnel is not None:
        connection.set_tunnel(*tunnel)
    return request(connection)


def _connect(connection: HTTPConnection) -> None:
    try:
        connection.connect()
    except OSError as error:
        if (refused := TUNNEL_REFUSED.match(str(error))) is None:
            raise
        raise HttpStatusError(int(refused[1]), f"{refused[2].strip()} (of the proxy)", {}) from None


def _accept_response(response: Response) -> Response:
    if response.status in WITH_CONTENT:
        return response
    body = b""
    if "xml" in response.headers.get("Content-Type", ""):
        with suppress(OSError, EOFError):
            body = response.read(ERROR_BYTES)
    response.close()
    if response.status == 404:
        raise FileNotFoundError(404, response.reason)
    raise HttpStatusError(response.status, response.reason, response.headers, body.decode(errors="replace"))


def _proxy_of(url: SplitResult, proxies: Mapping[str, str]) -> SplitResult | None:
    """Return the proxy for a URL, unless ``no_proxy`` of the environment names its host."""
    text = proxies.get(url.scheme) or proxies.get("all")
    if not text or proxy_bypass(str(url.hostname)):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise InvalidURL(
            f"the environment variable {url.scheme}_proxy, or all_proxy, names a proxy of the scheme {proxy.scheme!r}, "
            f"but only http proxies are supported. Set no_proxy={url.hostname} to bypass it"
        )
    return proxy


def _basic(url: SplitResult) -> str:
    words = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
    return f"Basic {base64.b64encode(words.encode()).decode()}"


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
