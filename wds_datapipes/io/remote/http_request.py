"""HTTP requests: redirects, proxies and TLS, and responses whose bodies are streamed."""

from __future__ import annotations

import base64
import os
import re
import socket
import ssl
from collections.abc import Hashable, Mapping
from contextlib import closing, suppress
from functools import lru_cache
from http.client import BadStatusLine, HTTPException, InvalidURL
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import proxy_bypass

from wds_datapipes.errors import plural
from wds_datapipes.io.remote.http_connection import POOL, Connection
from wds_datapipes.io.remote.request_steps import Steps
from wds_datapipes.io.timeouts import ResolvedTimeouts

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
PORTS = {"http": 80, "https": 443}
#: The elements of an S3 error that are shown, and the maximum number of bytes searched for them.
ERROR_PARTS, ERROR_BYTES = re.compile(r"<(Code|Region)>([\w.-]{1,100})</"), 4 << 10
#: A query that signs a request, host name included, as S3 and Google Cloud Storage require it.
SIGNED = re.compile(r"(?i)[?&]x-(?:amz|goog)-signature=")
#: The end of the headers, and the end of a line.
HEAD_END, LINE_END = re.compile(rb"\r?\n\r?\n"), re.compile(rb"\r?\n")
#: The first line of a response: the minor version, the status and its description.
STATUS_LINE = re.compile(r"HTTP/1\.(\d)\s+([1-9]\d\d)(?:\s+(.*?))?\s*", re.ASCII)
#: A size in ASCII digits, with a limited length; Python would accept other digits as well.
SIZE = re.compile(r"[0-9]{1,19}")
#: The size of a chunk, and its extensions.
CHUNK = re.compile(rb"\s*([0-9a-fA-F]{1,16})\s*(?:;.*)?", re.DOTALL)


class Response:
    """A response with a streamed body. After the body is read to its end, another request can use the connection.

    Args:
        connection: the connection, with a request sent.
        key: the key of the connection in the pool.
        timeouts: the time limits for all headers, for each part of the body, and for the connection to be idle.

    Attributes:
        status: the HTTP status.
        headers: the headers by capitalized name, such as ``"Etag"``; the first one counts if a name is repeated.
    """

    def __init__(self, connection: Connection, key: Hashable, timeouts: ResolvedTimeouts) -> None:
        self._connection: Connection | None = connection
        self._key, self._timeouts, self._process = key, timeouts, os.getpid()

    def receive_head(self, connection: Connection, method: str) -> Steps[None]:
        """Receive the status and the headers and determine where the body ends.

        http.client reads headers with the e-mail parser, which takes a third of the CPU time of a request.
        """
        connection.limit(self._timeouts.response_s)
        self.status = 100
        while 100 <= self.status < 200:
            (is_old, self.status, self.reason), lines = yield from _receive_lines(connection)
        fields = [line.partition(":") for line in lines]
        self.headers = {name.title(): value.strip() for name, _, value in reversed(fields)}
        option, length = (self.headers.get(name, "").lower() for name in ("Connection", "Content-Length"))
        has_body = method != "HEAD" and self.status not in (204, 304)
        self._is_chunked = has_body and self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        has_size = has_body and not self._is_chunked and SIZE.fullmatch(length)
        #: The remaining bytes of the body or of a chunk; None before the first chunk, or if the body ends when the
        #: connection is closed.
        self._left = int(length) if has_size else None if has_body else 0
        self._is_kept = self._left is not None and ("keep-alive" in option if is_old else "close" not in option)

    def read_steps(self, view: memoryview) -> Steps[int]:
        """Read the available bytes, at most ``len(view)``; 0 at the end.

        Raises:
            TimeoutError: no data arrive.
        """
        if (connection := self._connection) is None:
            raise ValueError("the response is closed")
        connection.limit(self._timeouts.response_s)
        if self._is_chunked and not self._left:
            yield from self._begin_chunk(connection)
        view = view[: self._left]
        if not view:
            return 0
        count = yield from connection.receive(view)
        if self._left is not None:
            if not count:
                raise EOFError(f"the response ends {plural(self._left, 'byte')} too early")
            self._left -= count
        return count

    def _begin_chunk(self, connection: Connection) -> Steps[None]:
        if self._left is not None:
            yield from connection.receive_until(LINE_END)  # of the previous chunk
        line = yield from connection.receive_until(LINE_END)
        if (found := CHUNK.fullmatch(line)) is None:
            raise HTTPException(f"the size of a chunk is {line[:100]!r}")
        self._left = int(found[1], 16)
        if not self._left:
            self._is_chunked = False
            while (yield from connection.receive_until(LINE_END)):
                pass

    def abort(self) -> None:
        """Abort a read in another thread, which then closes the response."""
        if (connection := self._connection) is not None:
            with suppress(OSError):  # it may be closed
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the request."""
        if (connection := self._connection) is None:
            return
        if os.getpid() == self._process:  # otherwise, the parent process may still use the connection
            # Either the body was read to its end, or all of it came with the headers and nothing came after it.
            if self._is_kept and self._left == len(connection.received):
                self._connection = None
                POOL.put(self._key, connection, self._timeouts.idle_s)
                return
            self.abort()
        self._connection = None
        connection.close()


def _receive_lines(connection: Connection) -> Steps[tuple[tuple[bool, int, str], list[str]]]:
    """Receive the headers of a response; return whether it is HTTP/1.0, its status and reason, and the other lines."""
    line, *lines = str((yield from connection.receive_until(HEAD_END)), "latin-1").split("\n")
    if (found := STATUS_LINE.fullmatch(line)) is None:
        raise BadStatusLine(repr(line[:100]))
    return (found[1] == "0", int(found[2]), found[3] or ""), lines


class HttpStatusError(Exception):
    """A server has returned an error.

    Attributes:
        status: the HTTP status.
        message: the server's description of the status, and the code of the error, if the body has one.
        headers: the headers of the response.
        region: the region of the requested bucket, if the store reports that it is in another region.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str], body: str = "") -> None:
        parts = dict(ERROR_PARTS.findall(body))
        self.message = f"{message} ({parts['Code']})" if "Code" in parts else message
        self.status, self.headers = status, headers
        self.region = parts.get("Region") or (headers.get("X-Amz-Bucket-Region") if status in REDIRECTS else None)
        super().__init__(f"{status}, {self.message}")


class Access(NamedTuple):
    """Access to servers.

    Attributes:
        timeouts: the time limits: that for connecting also holds for the answer of a proxy to it, and for TLS to begin;
            that for a response for all its headers, and for each part of its body.
        context: the TLS context with the trusted authorities.
        proxies: the proxies by scheme, as `urllib.request.getproxies` returns them from the environment.
    """

    timeouts: ResolvedTimeouts
    context: ssl.SSLContext
    proxies: Mapping[str, str]


def request_steps(url: str, headers: Mapping[str, str], access: Access, method: str = "GET") -> Steps[Response]:
    """Send a request and return its response, following redirects and using a proxy if necessary.

    Args:
        url: ``http:`` or ``https:``; user and password in it are sent as HTTP Basic authentication.
        headers: the headers to send. Secret headers are sent only to the host of ``url``.
        access: how to reach the servers.
        method: ``"GET"`` or ``"HEAD"``.

    Raises:
        FileNotFoundError: the file does not exist.
        HttpStatusError: the server returned another error, or redirects in circles.
        OSError: the network failed.
        http.client.HTTPException: the response is not HTTP.
    """
    current, sent = _place_of(url), {**USER_AGENT, **headers}
    for _ in range(MAX_REDIRECTS + 1):
        if current.authorization is not None and not any(name.lower() == "authorization" for name in sent):
            sent["Authorization"] = current.authorization
        response = yield from _send_once(method, current, sent, access)
        if response.status not in REDIRECTS or not (location := response.headers.get("Location")):
            return (yield from _accept_response(response))
        try:
            following = _place_of(urljoin(current.url.geturl(), location))
        except BaseException:
            response.close()
            raise
        if following.server[1] != current.server[1] and SIGNED.search(current.target):
            # The signature is that of a request to this host; S3 redirects requests for buckets of other regions.
            raise (yield from _status_error(response))
        response.close()
        if following.server != current.server:
            sent = {name: value for name, value in sent.items() if name.lower() not in SECRET}
        current = following
    raise HttpStatusError(response.status, f"it redirects {MAX_REDIRECTS} times", response.headers)


class Place(NamedTuple):
    """The place where a URL is requested.

    Attributes:
        url: the URL.
        server: its scheme, host name and port.
        host: the value of the header of this name.
        target: the path and the query, quoted.
        authorization: HTTP Basic authentication, if the URL contains a user.
    """

    url: SplitResult
    server: tuple[str, str, int]
    host: str
    target: str
    authorization: str | None


@lru_cache(maxsize=512)
def _place_of(text: str) -> Place:
    """Return where a URL is requested; cached, because many ranges of a file are requested."""
    url = urlsplit(text)
    if url.scheme not in PORTS or not url.hostname:
        raise InvalidURL(
            f"the URL or a redirect has the scheme {url.scheme!r} or no host; only http and https are supported"
        )
    host = url.netloc.rpartition("@")[2].removesuffix(f":{PORTS[url.scheme]}").encode("idna").decode()
    target = quote(url.path or "/", safe=PLAIN) + (f"?{quote(url.query, safe=PLAIN)}" if url.query else "")
    server = url.scheme, url.hostname, url.port or PORTS[url.scheme]
    return Place(url, server, host, target, None if url.username is None else _basic(url))


def _send_once(method: str, place: Place, headers: Mapping[str, str], access: Access) -> Steps[Response]:
    proxy, sent, target = _proxy_of(place.url, access.proxies), dict(headers), place.target
    if not any(name.lower() == "host" for name in sent):
        sent = {"Host": place.host, **sent}
    if proxy is not None and place.url.scheme == "http":
        target, sent = f"http://{place.host}{target}", {**sent, **_proxy_headers(proxy)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    if lines.count("\r") + lines.count("\n") != 2 * len(sent):
        raise InvalidURL(f"one of the headers {', '.join(sent)} has a line break")
    key = place.server, proxy, access.context
    limit_s = access.timeouts.connect_s

    def exchange(connection: Connection) -> Steps[Response]:
        try:
            connection.limit(limit_s)
            yield from connection.send(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
            response = Response(connection, key, access.timeouts)
            yield from response.receive_head(connection, method)
        except BaseException:
            connection.close()
            raise
        return response

    if (kept := POOL.take(key)) is not None:
        try:
            return (yield from exchange(kept))
        except OSError as error:
            POOL.clear(key)
            if isinstance(error, TimeoutError):
                raise
            # A server may close an idle connection at any time.
    yield None
    return (yield from exchange((yield from _connect(place, proxy, access.context, limit_s))))


def _connect(place: Place, proxy: SplitResult | None, context: ssl.SSLContext, limit_s: float) -> Steps[Connection]:
    scheme, host, port = place.server
    address = (host, port) if proxy is None else (str(proxy.hostname), proxy.port or 80)
    connection = Connection(socket.create_connection(address, limit_s))
    try:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.limit(limit_s)
        if scheme == "https":
            if proxy is not None:
                server = place.host if place.host.endswith(f":{port}") else f"{place.host}:{port}"
                yield from _open_tunnel(connection, server, proxy)
            yield from connection.secure(context, host)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_tunnel(connection: Connection, server: str, proxy: SplitResult) -> Steps[None]:
    """Let a proxy forward all bytes to a server.

    Raises:
        HttpStatusError: the proxy refuses.
    """
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": server, **_proxy_headers(proxy)}.items())
    yield from connection.send(f"CONNECT {server} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
    (_, status, reason), _ = yield from _receive_lines(connection)
    if not 200 <= status < 300:
        raise HttpStatusError(status, f"{reason} (of the proxy)", {})


def _accept_response(response: Response) -> Steps[Response]:
    if response.status in WITH_CONTENT:
        return response
    raise (yield from _status_error(response))


def _status_error(response: Response) -> Steps[Exception]:
    """Close a response without the file, and return its error."""
    body, count = memoryview(bytearray(ERROR_BYTES)), 0
    with closing(response), suppress(OSError, EOFError):
        if "xml" in response.headers.get("Content-Type", ""):
            count = yield from response.read_steps(body)
    if response.status == 404:
        return FileNotFoundError(404, response.reason)
    text = bytes(body[:count]).decode(errors="replace")
    return HttpStatusError(response.status, response.reason, response.headers, text)


def _proxy_of(url: SplitResult, proxies: Mapping[str, str]) -> SplitResult | None:
    """Return the proxy for a URL; None if the environment variable ``no_proxy`` names its host."""
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


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    return {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy)}


def _basic(url: SplitResult) -> str:
    words = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
    return f"Basic {base64.b64encode(words.encode()).decode()}"
