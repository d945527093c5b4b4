"""HTTP requests: redirects, proxies and credentials, and answers whose bodies are streamed."""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import lru_cache
from http.client import HTTPException, InvalidURL
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import proxy_bypass

from urllib3 import BaseHTTPResponse, Timeout
from urllib3.exceptions import HTTPError, ProtocolError

from wds_datapipes.io.remote.http_connection import Response, forget_connecting, has_connected, pool_of
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


class Answer:
    """A response of a server. After its body is read to its end, another request can use the connection.

    Args:
        pooled: the response of urllib3.
        idle_s: for how many seconds the connection is then kept.

    Attributes:
        status: the HTTP status.
        reason: the server's description of it.
        headers: the headers by capitalized name, such as ``"Etag"``; the first one counts if a name is repeated.
    """

    def __init__(self, pooled: BaseHTTPResponse, idle_s: float) -> None:
        self._pooled, self._idle_s, self._process = pooled, idle_s, os.getpid()
        # urllib3's response copies the body once more, and reads until a buffer is full.
        self._response: Response | None = pooled._original_response  # type: ignore[attr-defined]
        self.status, self.reason = self._response.status, self._response.reason
        self.headers = {name.title(): value.strip() for name, value in reversed(self._response.headers.items())}

    def readinto(self, view: memoryview) -> int:
        """Read the available bytes, at most ``len(view)``; 0 at the end.

        Raises:
            TimeoutError: no data arrive.
            EOFError: the connection has ended too early.
        """
        if (response := self._response) is None:
            raise ValueError("the response is closed")
        return response.readinto1(view)

    def abort(self) -> None:
        """Abort a read in another thread, which then closes the response."""
        if (response := self._response) is not None:
            response.incoming.abort()

    def close(self) -> None:
        """End the request."""
        response, self._response = self._response, None
        if response is None or os.getpid() != self._process:  # the parent process may still use the connection
            return
        if response.has_ended or response.drain():
            response.close()
            self._pooled.connection.idle_s = self._idle_s  # type: ignore[union-attr]  # it is a TimedConnection
            self._pooled.release_conn()
        else:
            self._pooled.close()


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


def request(url: str, headers: Mapping[str, str], access: Access, method: str = "GET") -> Answer:
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
        response = _send_once(method, current, sent, access)
        if response.status not in REDIRECTS or not (location := response.headers.get("Location")):
            return _accept(response)
        try:
            following = _place_of(urljoin(current.url.geturl(), location))
        except BaseException:
            response.close()
            raise
        if following.server[1] != current.server[1] and SIGNED.search(current.target):
            # The signature is that of a request to this host; S3 redirects requests for buckets of other regions.
            raise _status_error(response)
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


def _send_once(method: str, place: Place, headers: Mapping[str, str], access: Access) -> Answer:
    proxy, limits = _proxy_of(place.url, access.proxies), access.timeouts
    for name, value in headers.items():
        if "\r" in f"{name}{value}" or "\n" in f"{name}{value}":
            raise InvalidURL(f"the header {name!r} has a line break")
    through = ("",) if proxy is None else (f"http://{proxy.hostname}:{proxy.port or 80}", _proxy_headers(proxy))
    is_forwarded = proxy is not None and place.url.scheme == "http"
    target = f"http://{place.host}{place.target}" if is_forwarded else place.target
    pool = pool_of(place.server, access.context, *through)
    options: dict[str, Any] = {
        "headers": {"Host": place.host, **headers},
        "timeout": Timeout(connect=limits.connect_s, read=limits.response_s),
        "retries": False,
        "assert_same_host": False,
        "preload_content": False,
    }
    while True:
        forget_connecting()
        try:
            return Answer(pool.urlopen(method, target, **options), limits.idle_s)
        except HTTPError as error:
            # A server may close an idle connection at any time.
            if has_connected() or not isinstance(error, ProtocolError):
                raise_alone(_cause_of(error))


def _cause_of(error: Exception) -> Exception:
    """Return the error of the system or of http.client behind one of urllib3, which may contain the URL."""
    while isinstance(error, HTTPError):
        causes = (error.__cause__, *error.args)
        if (cause := next((each for each in causes if isinstance(each, Exception)), None)) is None:
            break
        error = cause
    if refused := REFUSED.search(str(error)):
        return HttpStatusError(int(refused[1]), f"{refused[2]} (of the proxy)", {})
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
