"""HTTP requests with the standard library: redirects, proxies, TLS, and a timeout for each step."""

from __future__ import annotations

import base64
import io
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPMessage, HTTPResponse, HTTPSConnection, InvalidURL
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HttpStatusError", "Response", "send_request"]

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
#: The message of http.client if a proxy rejects a connection.
TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (\d{3}) ?(.*)", re.DOTALL)


class HttpStatusError(Exception):
    """A server has returned an error.

    Attributes:
        status: the HTTP status.
        message: the server's description of the status.
        headers: the headers of the response.
    """

    def __init__(self, status: int, message: str, headers: HTTPMessage) -> None:
        super().__init__(f"{status}, {message}")
        self.status, self.message, self.headers = status, message, headers


class Deadline:
    """A deadline that several reads of a socket share.

    http.client limits each read of the socket separately, so a server that sends a byte now and then, or one header
    after another, would block its client forever.

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Restart the timer."""
        self._end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Return the remaining seconds.

        Raises:
            TimeoutError: no time is left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def error(self) -> TimeoutError:
        """Return the error to raise when no time is left."""
        return TimeoutError(f"the server has not sent its headers, or the next bytes, within {self._seconds:g} s")


class TimedReader(io.RawIOBase):
    """Reads a socket within a deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._source = sock.makefile("rb", buffering=0)  # it keeps the socket open until it is closed

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        self._sock.settimeout(self._deadline.left())
        try:
            return self._source.readinto(buffer)
        except TimeoutError:
            raise self._deadline.error() from None

    def close(self) -> None:
        """Close the socket."""
        if not self.closed:
            self._source.close()
            super().close()


class TimedSocket:
    """A socket for http.client, with a deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def makefile(self, *_: object) -> io.BufferedReader:
        """Return a reader of the socket."""
        return io.BufferedReader(TimedReader(self._sock, self._deadline))


class Response:
    """The body of a response, streamed.

    Attributes:
        status: the HTTP status.
        headers: the headers of the response.
    """

    def __init__(
        self, connection: HTTPConnection, sock: socket.socket, response: HTTPResponse, deadline: Deadline
    ) -> None:
        self.status, self.headers = response.status, response.headers
        self._connection, self._sock, self._response, self._deadline = connection, sock, response, deadline

    @property
    def reason(self) -> str:
        """The server's description of the status."""
        return self._response.reason

    def read(self, size: int, /) -> bytes:
        """Return the available bytes, at most ``size``; none at the end.

        Raises:
            TimeoutError: no data arrive.
        """
        self._deadline.restart()
        return self._response.read1(size)

    def close(self) -> None:
        """Close the connection, even if another thread waits for it."""
        with suppress(OSError):  # it may be closed
            self._sock.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._connection.close()


def send_request(
    url: str, headers: Mapping[str, str], timeout_s: float, context: ssl.SSLContext, *, method: str = "GET"
) -> Response:
    """Send a request; follow redirects, and use the proxy of the environment.

    Args:
        url: ``http:`` or ``https:``; user and password in it are sent as HTTP Basic authentication.
        headers: the headers to send. Secret ones are only sent to the host of ``url``.
        timeout_s: the time limit in seconds for all headers of a response, and for each part of its body; also for
            connecting, with at most `CONNECT_S`.
        context: the TLS context with the trusted authorities.
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
        response = _send_once(method, current, sent, timeout_s, context)
        if response.status not in REDIRECTS or not (location := response.headers.get("Location")):
            return _accept_response(response)
        response.close()
        next_url = urlsplit(urljoin(current.geturl(), location))
        if (next_url.scheme, next_url.hostname, _port(next_url)) != (current.scheme, current.hostname, _port(current)):
            sent = {name: value for name, value in sent.items() if name.lower() not in SECRET}
        current = next_url
    raise HttpStatusError(response.status, f"it redirects {MAX_REDIRECTS} times", response.headers)


def _send_once(
    method: str, url: SplitResult, headers: Mapping[str, str], timeout_s: float, context: ssl.SSLContext
) -> Response:
    if url.scheme not in CONNECTIONS or not url.hostname:
        raise InvalidURL(
            f"the URL or a redirect has the scheme {url.scheme!r} or no host; only http and https are supported"
        )
    target = quote(url.path or "/", safe=PLAIN) + (f"?{quote(url.query, safe=PLAIN)}" if url.query else "")
    proxy = _proxy_of(url)
    host, port = (url.hostname, _port(url)) if proxy is None else (str(proxy.hostname), proxy.port or 80)
    more = {"context": context} if url.scheme == "https" else {}
    connection = CONNECTIONS[url.scheme](host, port, timeout=min(timeout_s, CONNECT_S), **more)
    deadline = Deadline(timeout_s)

    def response(sock: socket.socket, **options: Any) -> HTTPResponse:
        return HTTPResponse(TimedSocket(sock, deadline), **options)  # type: ignore[arg-type]  # only makefile is needed

    connection.response_class = response  # called like the class
    sent = dict(headers)
    if proxy is not None:
        proxy_headers = {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy)}
        if url.scheme == "https":
            connection.set_tunnel(url.hostname, _port(url), proxy_headers)
        else:
            target = f"http://{url.netloc.rpartition('@')[2]}{target}"
            sent |= proxy_headers
    try:
        _connect(connection)
        deadline.restart()
        connection.request(method, target, headers=sent)
        sock: socket.socket = connection.sock  # the response may detach it
        return Response(connection, sock, connection.getresponse(), deadline)
    except BaseException:
        connection.close()
        raise


def _connect(connection: HTTPConnection) -> None:
    try:
        connection.connect()
    except OSError as error:
        if (refused := TUNNEL_REFUSED.match(str(error))) is None:
            raise
        raise HttpStatusError(int(refused[1]), f"{refused[2].strip()} (of the proxy)", HTTPMessage()) from None


def _accept_response(response: Response) -> Response:
    if response.status in WITH_CONTENT:
        return response
    response.close()
    if response.status == 404:
        raise FileNotFoundError(404, response.reason)
    raise HttpStatusError(response.status, response.reason, response.headers)


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """Return the proxy for a URL from the environment: ``https_proxy``, ``no_proxy`` and the like."""
    proxies = getproxies()
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
