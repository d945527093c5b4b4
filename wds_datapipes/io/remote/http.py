"""HTTP client: streams a file, or a range of it, in a single request."""

from __future__ import annotations

import os
import re
import ssl
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from datetime import timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPMessage
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import getproxies

from fsspec.config import conf  # type: ignore[import-untyped]  # it carries no types

from wds_datapipes.errors import TruncatedShardError
from wds_datapipes.io.compression.decompress import Decompressor, buffer_stream
from wds_datapipes.io.compression.formats import GZIP
from wds_datapipes.io.read_limits import DEFAULT_LIMITS
from wds_datapipes.io.remote import http_listing
from wds_datapipes.io.remote.http_request import HttpStatusError, Response, send_request
from wds_datapipes.io.remote.resuming_stream import OpenedSource, RawReader, etag_of, is_strong_etag, version_of
from wds_datapipes.io.remote.retry import is_transient
from wds_datapipes.io.remote.throughput import MonitoredFile, ThroughputMonitor
from wds_datapipes.redaction import redact

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wds_datapipes.io.remote.filesystem import RemotePath


#: ``bytes 512-1023/4096``: the first byte, the last one, and the size of the file.
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
#: ``bytes */4096``: the same header if the file does not contain the range.
NO_RANGE = re.compile(r"bytes \*/([0-9]{1,19})")
#: A size in ASCII digits, with a limited length; Python would accept other digits as well.
SIZE = re.compile(r"[0-9]{1,19}")
#: Content encodings of gzip, which some servers apply although the client accepts none.
GZIP_CODINGS = {"gzip", "x-gzip"}
#: The number of bytes decompressed at once.
STEP_BYTES = 256 << 10
#: The maximum size of a directory page in bytes.
LARGEST_PAGE = 64 << 20
#: The maximum length of a header in errors.
SHOWN = 100


class UnexpectedResponseError(Exception):
    """A server has sent an unexpected response, which retrying would not change."""


class SentPart(NamedTuple):
    """The range of a file in a response."""

    first: int
    last: int
    #: The size of the whole file, if the server reports it.
    total: int | None


def is_web(scheme: str) -> bool:
    """Whether the URLs of a scheme are files on web servers."""
    return scheme in ("http", "https")


class HttpFile:
    """The body of a response: a file, or the requested range.

    Args:
        response: the response.
        requested: the requested range; None for the whole file.
        url: the file.

    Attributes:
        part: the range; None for the whole file.
        size: the size of the whole file, if the server reports it.
        version: identifies the version of the file.
        etag: the ETag of the file, if the server sends one.
        headers: those of the response.

    Raises:
        UnexpectedResponseError: the response is neither the file nor the requested range.
    """

    def __init__(self, response: Response, requested: str | None, url: str) -> None:
        self._response, self.headers = response, response.headers
        self._body: RawReader = response
        self.etag = self.headers.get("ETag")
        self.version = version_of(*(self.headers.get(name) for name in ("ETag", "Last-Modified")))
        length = self.headers.get("Content-Length", "")
        self.size = int(length) if SIZE.fullmatch(length) else None
        self.part: SentPart | None = None
        encoding = _content_encoding(response)
        if response.status == 206:
            self._set_part(requested, encoding)
        elif encoding in GZIP_CODINGS:  # some servers apply it although the client accepts none
            # The size of the compressed body may differ with each response.
            self.size, self.version, self.etag = None, (), None
            self._body = Decompressor(buffer_stream(response), GZIP, url, DEFAULT_LIMITS)
        elif encoding != "identity":
            raise UnexpectedResponseError(
                f"the server sends the file with the content encoding {encoding[:SHOWN]!r}, which was not requested"
            )

    def readinto(self, buffer: Buffer, /) -> int:
        """Read the available bytes, at most ``len(buffer)``; 0 at the end."""
        try:
            return self._body.readinto(buffer)
        except TruncatedShardError:  # the request is repeated
            raise EOFError("the gzip-encoded response is truncated") from None

    def close(self) -> None:
        """End the request."""
        self._response.close()

    def _set_part(self, requested: str | None, encoding: str) -> None:
        """Set the range from the headers of a response with status 206."""
        content_range, length = self.headers.get("Content-Range"), self.size
        found = f"Content-Range: {content_range[:SHOWN]!r}" if content_range is not None else "no Content-Range"
        if requested is None:
            raise UnexpectedResponseError(
                f"the server sends a part of the file (status 206, {found}), but the whole file was requested"
            )
        kind = self.headers.get("Content-Type", "")
        sent = CONTENT_RANGE.fullmatch((content_range or "").strip())
        if sent is None or kind.lower().startswith("multipart/") or encoding != "identity":
            found += f", Content-Type: {kind[:SHOWN]!r}, Content-Encoding: {encoding[:SHOWN]!r}"
            raise UnexpectedResponseError(
                f"the server does not send the requested bytes {requested} (status 206, {found})"
            )
        self.size = None if sent[3] == "*" else int(sent[3])
        self.part = SentPart(int(sent[1]), int(sent[2]), self.size)
        if length not in (None, self.part.last + 1 - self.part.first):
            raise UnexpectedResponseError(f"the server sends {length} bytes for the Content-Range {content_range!r}")


class HttpClient:
    """An HTTP client with the interface of an fsspec file system; paths are URLs.

    Args:
        scheme: the scheme of the URLs.
        options: the storage options: ``headers``, and ``ca_file`` with the certificates of trusted authorities.
        timeout_s: the time limit in seconds for the headers of a response, and for each part of its body.

    Raises:
        ValueError: there are other options, or the file cannot be read or contains no certificate.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout_s: float) -> None:
        options = {**conf.get(scheme, {}), **options}
        if unknown := options.keys() - {"headers", "ca_file"}:
            raise ValueError(
                f"web servers support the storage options headers and ca_file, not {', '.join(sorted(unknown))}. "
                "Set proxies in the environment, as in https_proxy"
            )
        self._headers: Mapping[str, str] = options.get("headers") or {}
        path = options.get("ca_file")
        try:
            self._tls_context = _ssl_context(None if path is None else os.fspath(path))
        except (OSError, TypeError) as error:  # includes ssl.SSLError
            raise ValueError(
                f"storage_options['ca_file'] must be a file with certificates in the PEM format: {error}"
            ) from error
        self._timeout_s = timeout_s
        self._proxies = getproxies()  # slow, since it looks at all variables of the environment

    def open(self, url: str, part: str | None = None, if_range: str | None = None) -> HttpFile:
        """Request a file, or the range ``part`` of it, such as ``"512-1023"`` or ``"512-"``.

        With ``if_range``, an ETag, the server sends the whole file if it has another one.

        Raises:
            UnexpectedResponseError: the response is neither the file nor that range.
            Exception: see `send_request`.
        """
        headers = {} if part is None else {"Range": f"bytes={part}"}
        response = self._request(url, headers if if_range is None else {**headers, "If-Range": if_range})
        try:
            return HttpFile(response, part, url)
        except BaseException:
            response.close()
            raise

    def info(self, url: str) -> dict[str, Any]:
        """Return the size, the ETag and the date of a file, if its server reports them."""
        try:
            response = self._request(url, {}, "HEAD")
            response.close()
            length = response.headers.get("Content-Length", "")
            if response.status == 200 and SIZE.fullmatch(length) and _content_encoding(response) == "identity":
                return _facts(url, int(length), response.headers)
        except HttpStatusError as error:  # some servers, and signed URLs, only support GET
            if is_transient(error):
                raise
        try:
            found = self.open(url, "0-0")
        except HttpStatusError as error:
            none = NO_RANGE.fullmatch(error.headers.get("Content-Range", ""))
            if error.status != 416 or none is None:
                raise
            return _facts(url, int(none[1]), error.headers)
        found.close()
        return _facts(url, found.size, found.headers)

    def cat_file(self, url: str, max_bytes: int = sys.maxsize) -> bytes:
        """Return a file as a whole.

        Raises:
            EOFError: the response is truncated.
            UnexpectedResponseError: the file is larger than ``max_bytes``.
        """
        file, data, step = self.open(url), bytearray(), memoryview(bytearray(STEP_BYTES))
        paced = MonitoredFile(file, ThroughputMonitor(redact(url), self._timeout_s))
        with closing(paced):
            while count := paced.readinto(step):
                data += step[:count]
                if len(data) > max_bytes:
                    raise UnexpectedResponseError(f"the server sends more than {max_bytes} bytes")
        if file.size not in (None, len(data)):
            raise EOFError(f"received {len(data)} of {file.size} bytes")
        return bytes(data)

    def ls(self, url: str, detail: bool = True) -> list[Any]:
        """Return the entries of a directory, from the links of its page."""
        found = http_listing.entries_of(self.cat_file(url, LARGEST_PAGE), url)
        return found if detail else [entry["name"] for entry in found]

    def glob(self, url: str) -> list[str]:
        """Return the files that match a pattern, from the pages of their directories."""
        return http_listing.matches(url, self.ls)

    def _request(self, url: str, more: Mapping[str, str], method: str = "GET") -> Response:
        # With content encoding, ranges would count compressed bytes.
        headers = {**self._headers, "Accept-Encoding": "identity", **more}
        return send_request(url, headers, self._timeout_s, self._tls_context, self._proxies, method)


def _content_encoding(response: Response) -> str:
    """Return the content encoding of a body."""
    return str(response.headers.get("Content-Encoding") or "identity").strip().lower()


def _facts(url: str, size: int | None, headers: HTTPMessage) -> dict[str, Any]:
    """Describe a file as fsspec's file systems do."""
    date = None
    with suppress(ValueError, TypeError, LookupError, OverflowError):
        date = parsedate_to_datetime(headers["Last-Modified"])
        date = date.replace(tzinfo=date.tzinfo or timezone.utc)  # it has none for -0000
    return {"name": url, "type": "file", "size": size, "ETag": headers.get("ETag"), "last_modified": date}


@lru_cache(maxsize=16)
def _ssl_context(path: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities of the system and those in a file; it is cached."""
    context = ssl.create_default_context()
    if path is not None:
        context.load_verify_locations(path)
    return context


class HttpStore:
    """A file on a web server, opened at any offset.

    Args:
        remote: the path of the file.
    """

    def __init__(self, remote: RemotePath) -> None:
        self._remote = remote
        self._etag: str | None = None
        self._sends_ranges = False

    def open_at(self, start: int, end: int | None = None) -> OpenedSource:
        """Open the file at an offset; a server without range support sends it from the beginning."""
        remote, client = self._remote, self._remote.filesystem
        if end is not None:
            file = client.open(remote.path, f"{start}-{end - 1}")
        else:
            file = client.open(remote.path, *((f"{start}-", self._etag) if start else ()))
        part, is_strong = file.part, is_strong_etag(file.etag)
        self._etag = file.etag if is_strong else None
        facts = file.version, etag_of({"ETag": file.etag}), is_strong
        self._sends_ranges = part is not None
        monitored = MonitoredFile(file, ThroughputMonitor(remote.name, remote.timeout_s, remote.counters))
        if part is None:
            return OpenedSource(monitored, 0, file.size, *facts)
        if part.total is None:
            file.close()
            raise UnexpectedResponseError(
                f"the server sends bytes {part.first} to {part.last} of a file whose size it does not report "
                "(Content-Range with a star), so it is unknown whether they are the last ones"
            )
        return OpenedSource(monitored, part.first, part.total, *facts, part.last + 1)

    def can_seek(self) -> bool:
        """Whether the server has sent a range."""
        return self._sends_ranges

    def close(self) -> None:
        """Do nothing: each range is a separate request."""
