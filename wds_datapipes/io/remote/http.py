"""HTTP client: streams a file or a range of it with a single request."""

from __future__ import annotations

import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

from fsspec.config import conf  # type: ignore[import-untyped]  # it carries no types

from wds_datapipes.io.after_fork import at_fork
from wds_datapipes.io.remote.http_answer import SIZE, Answer
from wds_datapipes.io.remote.http_request import Access, HttpStatusError, Request
from wds_datapipes.io.remote.known_stores import known_store
from wds_datapipes.io.remote.retry import is_transient
from wds_datapipes.io.remote.source import (
    SHOWN,
    MonitoredFile,
    OpenedSource,
    SentRequest,
    UnexpectedResponseError,
    etag_of,
    is_strong_etag,
    version_of,
)
from wds_datapipes.io.timeouts import ResolvedTimeouts

if TYPE_CHECKING:
    from wds_datapipes.io.remote.filesystem import RemotePath


#: ``bytes 512-1023/4096``: the first byte, the last one, and the size of the file.
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
#: ``bytes */4096``: the header if the file does not contain the range.
NO_RANGE = re.compile(r"bytes \*/([0-9]{1,19})")
#: The header by which Google Cloud Storage identifies a version, because its ETags have no quotes.
GENERATION = "X-Goog-Generation"
#: Content encodings that some servers apply even though the client accepts none; reading decompresses shards anyway.
GZIP_CODINGS = {"gzip", "x-gzip"}


def opened_by(response: Answer, requested: str | None) -> OpenedSource:
    """Return the file, or the requested range of it, from a response.

    Args:
        response: the response, which is closed if this function raises.
        requested: the requested range, such as ``"512-1023"`` or ``"512-"``; None for the whole file.

    Raises:
        UnexpectedResponseError: the response is neither the file nor the requested range.
    """
    try:
        headers, encoding = response.headers, _content_encoding(response)
        etag, length = headers.get("Etag"), headers.get("Content-Length", "")
        size = int(length) if SIZE.fullmatch(length) else None
        version = version_of(*(headers.get(name) for name in ("Etag", "Last-Modified", GENERATION)))
        facts = version, etag_of({"ETag": etag}), is_strong_etag(etag) or GENERATION in headers
        # Some servers, such as that of rclone for S3, send a part with status 200.
        if response.status == 206 or (requested is not None and "Content-Range" in headers):
            first, last, total = _sent_part(headers, requested, encoding, size)
            return OpenedSource(response, first, total, *facts, last + 1, can_seek=True)
        if encoding in GZIP_CODINGS:  # its bytes may differ with each response
            return OpenedSource(response, 0, None, ())
        if encoding != "identity":
            raise UnexpectedResponseError(
                f"the server sends the file with the content encoding {encoding[:SHOWN]!r}, which was not requested"
            )
    except BaseException:
        response.close()
        raise
    return OpenedSource(response, 0, size, *facts)


def _sent_part(
    headers: Mapping[str, str], requested: str | None, encoding: str, length: int | None
) -> tuple[int, int, int | None]:
    """Return the first and last byte of a response with status 206, and the size of the file if it is known."""
    content_range = headers.get("Content-Range")
    found = f"Content-Range: {content_range[:SHOWN]!r}" if content_range is not None else "no Content-Range"
    if requested is None:
        raise UnexpectedResponseError(
            f"the server sends a part of the file (status 206, {found}), but the whole file was requested"
        )
    kind = headers.get("Content-Type", "")
    sent = CONTENT_RANGE.fullmatch((content_range or "").strip())
    if sent is None or kind.lower().startswith("multipart/") or encoding != "identity":
        found += f", Content-Type: {kind[:SHOWN]!r}, Content-Encoding: {encoding[:SHOWN]!r}"
        raise UnexpectedResponseError(f"the server does not send the requested bytes {requested} (status 206, {found})")
    first, last = int(sent[1]), int(sent[2])
    if length not in (None, last + 1 - first):
        raise UnexpectedResponseError(f"the server sends {length} bytes for the Content-Range {content_range!r}")
    return first, last, None if sent[3] == "*" else int(sent[3])


class HttpClient:
    """An HTTP client with the interface of an fsspec file system; paths are URLs.

    Args:
        scheme: the scheme of the URLs.
        options: the storage options: ``headers``, and ``ca_file`` with the certificates of trusted authorities.
        timeouts: the time limits.

    Raises:
        ValueError: there are other options, or the file cannot be read or contains no certificate.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any], timeouts: ResolvedTimeouts) -> None:
        options = {**conf.get(scheme, {}), **options}
        if unknown := options.keys() - {"headers", "ca_file"}:
            raise ValueError(
                f"web servers support the storage options headers and ca_file, not {', '.join(sorted(unknown))}. "
                "Set proxies in the environment, as in https_proxy"
            )
        self._headers: Mapping[str, str] = options.get("headers") or {}
        path = options.get("ca_file")
        try:
            with _tls_lock:
                context = _ssl_context(None if path is None else os.fspath(path))
        except (OSError, TypeError) as error:  # includes ssl.SSLError
            raise ValueError(
                f"storage_options['ca_file'] must be a file with certificates in the PEM format: {error}"
            ) from error
        self._access = Access(timeouts, context, getproxies())  # slow: it reads all environment variables

    def request(self, url: str, part: str | None = None, if_range: str | None = None) -> Request:
        """Request a file or the range ``part`` of it, such as ``"512-1023"`` or ``"512-"``.

        If the file no longer has the ETag ``if_range``, the server sends the whole file.

        Raises:
            Exception: see `Request`.
        """
        headers = {} if part is None else {"Range": f"bytes={part}"}
        headers |= {} if if_range is None else {"If-Range": if_range}
        return self._request(url, headers)

    def info(self, url: str) -> dict[str, Any]:
        """Return the size, ETag and date of a file, as far as its server reports them."""
        try:
            response = self._request(url, {}, "HEAD").answer()
            response.close()
            length = response.headers.get("Content-Length", "")
            if response.status == 200 and SIZE.fullmatch(length) and _content_encoding(response) == "identity":
                return _facts(url, int(length), response.headers)
        except HttpStatusError as error:  # some servers, and signed URLs, only support GET
            if is_transient(error):
                raise
        try:
            response = self._request(url, {"Range": "bytes=0-0"}).answer()
        except HttpStatusError as error:
            none = NO_RANGE.fullmatch(error.headers.get("Content-Range", ""))
            if error.status != 416 or none is None:
                raise
            return _facts(url, int(none[1]), error.headers)
        with closing(response):
            return _facts(url, opened_by(response, "0-0").size, response.headers)

    def ls(self, url: str, **_options: object) -> list[Any]:
        """Raise an error, because there is no common format for directory listings of web servers."""
        raise ValueError(
            f"web servers do not list files. Name those of {url} with braces, as in train-{{000..146}}.tar"
        )

    glob = ls

    def _request(self, url: str, more: Mapping[str, str], method: str = "GET") -> Request:
        # With content encoding, ranges would count compressed bytes.
        headers = {**self._headers, "Accept-Encoding": "identity", **more}
        return Request(url, headers, self._access, method)


def _content_encoding(response: Answer) -> str:
    """Return the content encoding of a body; some stores repeat aws-chunked, which was that of an upload."""
    codings = response.headers.get("Content-Encoding", "").lower().split(",")
    return ", ".join(each.strip() for each in codings if each.strip() not in ("", "aws-chunked")) or "identity"


def _facts(url: str, size: int | None, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata of a file in the form of fsspec's file systems."""
    date = None
    with suppress(ValueError, TypeError, LookupError, OverflowError):
        date = parsedate_to_datetime(headers.get("Last-Modified", ""))
        date = date.replace(tzinfo=date.tzinfo or timezone.utc)  # it has none for -0000
    return {"name": url, "type": "file", "size": size, "ETag": headers.get("Etag"), "last_modified": date}


#: Held while the certificates of the system are read, so that concurrent threads do not all read them. A forked process
#: must not inherit it from another thread.
_tls_lock = threading.Lock()
at_fork("certificates", before=_tls_lock.acquire, after_in_parent=_tls_lock.release, after_in_child=_tls_lock.release)


@lru_cache(maxsize=16)
def _ssl_context(path: str | None) -> ssl.SSLContext:
    """Return a cached TLS context that trusts the system's authorities and those in a file."""
    context = ssl.create_default_context()
    if path is not None:
        context.load_verify_locations(path)
    return context


class HttpStore:
    """A file on a web server, opened at any offset.

    Args:
        remote: the path of the file.
        sign: returns the client and the URL of a signed request; by default, requests are not signed.
    """

    def __init__(self, remote: RemotePath, sign: Callable[[], tuple[HttpClient, str]] | None = None) -> None:
        self._remote, self._sign = remote, sign
        self._etag: str | None = None

    def send(self, start: int, end: int | None = None) -> SentRequest:
        """Request the bytes from ``start`` up to ``end``; a server without range support sends the whole file."""
        since = time.perf_counter()
        client, url = (self._remote.filesystem, self._remote.path) if self._sign is None else self._sign()
        part = (f"{start}-{end - 1}",) if end is not None else (f"{start}-", self._etag) if start else ()
        request: Request = client.request(url, *part)
        receive = partial(self._receive, request, since, start, end, *part[:1])
        return SentRequest(receive, request.close, since)

    def open(self, start: int, end: int | None = None) -> OpenedSource:
        """Open the file at an offset; a server without range support sends it from the beginning."""
        return self.send(start, end).open()

    def _receive(
        self, request: Request, since: float, start: int, end: int | None, part: str | None = None
    ) -> OpenedSource:
        remote = self._remote
        with known_store(remote.store).limit.watch(since):
            answer = request.answer()
        if answer.is_first:
            remote.counters.count(f"connections/{remote.store}")
        opened = opened_by(answer, part)
        self._etag = next((fact for fact in opened.version[:1] if is_strong_etag(fact)), None)
        if end is not None and opened.stop is not None and opened.stop > end:
            opened.file.close()
            raise UnexpectedResponseError(
                f"the server sends bytes {opened.start} to {opened.stop - 1}, but {start} to {end - 1} were requested"
            )
        if opened.stop is not None and opened.size is None:
            opened.file.close()
            raise UnexpectedResponseError(
                f"the server sends bytes {opened.start} to {opened.stop - 1} of a file but not its size (the "
                "Content-Range ends in a star), so it is unknown whether more bytes follow"
            )
        return opened._replace(file=MonitoredFile(opened.file, remote))

    def open_first(self, count: int) -> OpenedSource:
        """Open the first ``count`` bytes if their version has a strong ETag, otherwise the whole file."""
        store = known_store(self._remote.store)
        if not store.lacks_etags:
            try:
                opened = self.open(0, count)
            except UnexpectedResponseError:  # such as a part with a content encoding
                pass
            except HttpStatusError as error:
                if error.status != 416:  # of an empty file
                    raise
            else:
                is_whole = opened.stop in (None, opened.size)
                if not opened.start and (is_whole or opened.is_strong):
                    return opened
                opened.file.close()
                store.lacks_etags = True
        return self.open(0)

    def close(self) -> None:
        """Do nothing, because each range is a separate request."""
