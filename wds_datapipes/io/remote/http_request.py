"""HTTP requests with the standard library: redirects, proxies, TLS, and connections that are used again."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPMessage, HTTPSConnection, InvalidURL
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import proxy_bypass

from wds_datapipes.io.remote.http_connection import POOL, Deadline, Response, TimedResponse

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


def send_request(
    url: str,
    headers: Mapping[str, str],
    timeout_s: float,
    context: ssl.SSLContext,
    proxies: Mapping[str, str],
    method: str = "GET",
) -> Response:
    """Send a request; follow redirects, and use a proxy.

    Args:
        url: ``http:`` or ``https:``; user and password in it are sent as HTTP Basic authentication.
        headers: the headers to send. Secret ones are only sent to the host of ``url``.
        timeout_s: the time limit in seconds for all headers of a response, and for each part of its body; also for
            connecting, with at most `CONNECT_S`.
        context: the TLS context with the trusted authorities.
        proxies: the proxies by scheme, as `urllib.request.getproxies` returns them from the environment.
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
        response = _send_once(method, current, sent, timeout_s, context, proxies)
        if response.status not in REDIRECTS or not (location := response.headers.get("Location")):
            return _accept_response(response)
        response.close()
        next_url = urlsplit(urljoin(current.geturl(), location))
        if (next_url.scheme, next_url.hostname, _port(next_url)) != (current.scheme, current.hostname, _port(current)):
            sent = {name: value for name, value in sent.items() if name.lower() not in SECRET}
        current = next_url
    raise HttpStatusError(response.status, f"it redirects {MAX_REDIRECTS} times", response.headers)


def _send_once(
    method: str,
    url: SplitResult,
    headers: Mapping[str, str],
    timeout_s: float,
    context: ssl.SSLContext,
    proxies: Mapping[str, str],
) -> Response:
    if url.scheme not in CONNECTIONS or not url.hostname:
        raise InvalidURL(
            f"the URL or a redirect has the scheme {url.scheme!r} or no host; only http and https are supported"
        )
    target = quote(url.path or "/", safe=PLAIN) + (f"?{quote(url.query, safe=PLAIN)}" if url.query else "")
    proxy = _proxy_of(url, proxies)
    host, port = (url.hostname, _port(url)) if proxy is None else (str(proxy.hostname), proxy.port or 80)
    sent, tunnel = dict(headers), None
    if proxy is not None:
        proxy_headers = {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy)}
        if url.scheme == "https":
            tunnel = (url.hostname, _port(url), proxy_headers)
        else:
            target = f"http://{url.netloc.rpartition('@')[2]}{target}"
            sent |= proxy_headers
    key = (url.scheme, url.hostname, _port(url), proxy, context if url.scheme == "https" else None)
    limit_s, deadline = min(timeout_s, CONNECT_S), Deadline(timeout_s)

    def request(connection: HTTPConnection) -> Response:
        connection.response_class = partial(TimedResponse, deadline=deadline)  # type: ignore[assignment]  # called so
        try:
            if connection.sock is None:
                _connect(connection)
            connection.sock.settimeout(limit_s)
            deadline.restart()
            connection.request(method, target, headers=sent)
            # A server that waits for each acknowledgement would otherwise wait for 40 ms.
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            return Response(connection, key, deadline)
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
            # The server closed the connection meanwhile, as it may at any time between two requests.
    more = {"context": context} if url.scheme == "https" else {}
    connection = CONNECTIONS[url.scheme](host, port, timeout=limit_s, **more)
    if tunnel is not None:
        connection.set_tunnel(*tunnel)
    return request(connection)


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
