"""HTTP requests: redirects, proxies and credentials."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import lru_cache
from http.client import HTTPException, InvalidURL, RemoteDisconnected
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import proxy_bypass

from urllib3.exceptions import HTTPError

from wds_datapipes.io.remote.http_answer import Answer
from wds_datapipes.io.remote.http_connection import Connection, Proxy, Route, close_idle, take_idle
from wds_datapipes.io.timeouts import ResolvedTimeouts
from wds_datapipes.redaction.storage_options import raise_alone

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
#: The error of http.client for a proxy that does not forward to a server: the status and its description.
REFUSED = re.compile(r"Tunnel connection failed: (\d{3}) ?(.*)")


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


class Request:
    """A request that was sent; it is sent again if it is redirected. `answer` returns the answer.

    Args:
        url: ``http:`` or ``https:``; user and password in it are sent as HTTP Basic authentication.
        headers: the headers to send. Secret headers are sent only to the host of ``url``.
        access: how to reach the servers.
        method: ``"GET"`` or ``"HEAD"``.

    Raises:
        OSError: the network failed.
        http.client.HTTPException: the proxy does not answer with HTTP.
    """

    def __init__(self, url: str, headers: Mapping[str, str], access: Access, method: str = "GET") -> None:
        self._place, self._headers, self._access, self._method = (
            _place_of(url),
            {**USER_AGENT, **headers},
            access,
            method,
        )
        self._connection: Connection | None = self._send()

    def answer(self) -> Answer:
        """Return the answer, following redirects.

        Raises:
            FileNotFoundError: the file does not exist.
            HttpStatusError: the server returned another error, or redirects in circles.
            OSError: the network failed.
            http.client.HTTPException: the answer is not HTTP.
        """
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._receive()
            if answer.status not in REDIRECTS or not (location := answer.headers.get("Location")):
                return _accept(answer)
            current = self._place
            try:
                following = _place_of(urljoin(current.url.geturl(), location))
            except BaseException:
                answer.close()
                raise
            if following.server[1] != current.server[1] and SIGNED.search(current.target):
                # The signature is that of a request to this host; S3 redirects requests for buckets of other regions.
                raise _status_error(answer)
            answer.close()
            if following.server != current.server:
                self._headers = {name: value for name, value in self._headers.items() if name.lower() not in SECRET}
            self._place = following
        raise HttpStatusError(answer.status, f"it redirects {MAX_REDIRECTS} times", answer.headers)

    def close(self) -> None:
        """Drop a request whose answer is not needed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _receive(self) -> Answer:
        """Receive an answer, on a new connection if the server has closed an idle one, which it may do at any time."""
        connection, self._connection = self._connection or self._send(), None
        while True:
            try:
                return Answer(connection, self._method, self._access.timeouts)
            except (OSError, RemoteDisconnected) as error:
                if isinstance(error, TimeoutError) or not connection.kept_until:
                    raise
            close_idle(connection.route)
            connection = self._send()

    def _send(self) -> Connection:
        """Send the request, and return the connection that receives the answer."""
        place, limits, sent = self._place, self._access.timeouts, self._headers
        if place.authorization is not None and not any(name.lower() == "authorization" for name in sent):
            self._headers = sent = {**sent, "Authorization": place.authorization}
        proxy, target = _proxy_of(place.url, self._access.proxies), place.target
        if not any(name.lower() == "host" for name in sent):
            sent = {"Host": place.host, **sent}
        if proxy is not None and place.url.scheme == "http":
            target, sent = f"http://{place.host}{target}", {**sent, **proxy.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        if lines.count("\r") + lines.count("\n") != 2 * len(sent):
            raise InvalidURL(f"one of the headers {', '.join(sent)} has a line break")
        request = f"{self._method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")
        route = Route(place.server, self._access.context, proxy)
        while True:
            connection = take_idle(route) or _connect(route, limits.connect_s)
            try:
                connection.sock.settimeout(limits.connect_s)
                connection.sock.sendall(request)
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError) or not connection.kept_until:
                    raise
            else:
                return connection


def _connect(route: Route, limit_s: float) -> Connection:
    try:
        return route.connect(limit_s)
    except HTTPError as error:
        raise_alone(_cause_of(error))
    except OSError as error:
        if refused := REFUSED.search(str(error)):
            raise HttpStatusError(int(refused[1]), f"{refused[2]} (of the proxy)", {}) from None
        raise


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


def _cause_of(error: Exception) -> Exception:
    """Return the error of the system or of http.client behind one of urllib3, which may contain the URL."""
    while isinstance(error, HTTPError):
        causes = (error.__cause__, *error.args)
        if (cause := next((each for each in causes if isinstance(each, Exception)), None)) is None:
            break
        error = cause
    return error


def _accept(answer: Answer) -> Answer:
    if answer.status in WITH_CONTENT:
        return answer
    raise _status_error(answer)


def _status_error(answer: Answer) -> Exception:
    """Close a response without the file, and return its error."""
    body, count = memoryview(bytearray(ERROR_BYTES)), 0
    with closing(answer), suppress(OSError, EOFError, HTTPException):
        while count < ERROR_BYTES and (more := answer.readinto(body[count:])):
            count += more
    if answer.status == 404:
        return FileNotFoundError(404, answer.reason)
    text = bytes(body[:count]).decode(errors="replace") if "xml" in answer.headers.get("Content-Type", "") else ""
    return HttpStatusError(answer.status, answer.reason, answer.headers, text)


def _proxy_of(url: SplitResult, proxies: Mapping[str, str]) -> Proxy | None:
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
    return Proxy(proxy.hostname, proxy.port or 80, "" if proxy.username is None else _basic(proxy))


def _basic(url: SplitResult) -> str:
    words = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
    return f"Basic {base64.b64encode(words.encode()).decode()}"
