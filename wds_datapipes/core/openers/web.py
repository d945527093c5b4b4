"""Files on web servers: one request streams the whole body, or a part of it."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from fsspec.asyn import sync  # type: ignore[import-untyped]  # it carries no types
from fsspec.config import conf  # type: ignore[import-untyped]  # the same

from wds_datapipes.core.openers.patience import status_of
from wds_datapipes.core.openers.request import get
from wds_datapipes.core.openers.steady import Opened, version_of
from wds_datapipes.core.optional import require

__all__ = ["CONTENT_RANGE", "WebOrigin", "ask_web", "open_web", "version_of_response", "with_authorities"]

#: ``bytes 512-1023/4096``: the first byte, the last one, and the size of the file.
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
#: All that a plain request knows of.
PLAIN_OPTIONS = {"headers", "ca_file"}
#: No size has more digits; other digits than these, Python knows as well.
SIZE = re.compile(r"[0-9]{1,19}")


def with_authorities(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return storage options as fsspec takes them: ``ca_file`` is ours, as what aiohttp takes cannot be pickled.

    Raises:
        ValueError: the file cannot be read, or holds no certificate.
    """
    options = dict(options)
    path = options.pop("ca_file", None)
    if path is not None:
        try:
            options["ssl"] = _trusting(os.fspath(path))
        except (OSError, TypeError) as error:  # that of ssl.SSLError, too
            raise ValueError(
                f"storage_options['ca_file'] has to be a file with certificates in the PEM format: {error}"
            ) from error
    return options


@lru_cache(maxsize=16)
def _trusting(path: str | None) -> ssl.SSLContext:
    """Return what trusts the authorities of the system and those in a file; the same one, as each has connections."""
    trusting = ssl.create_default_context()
    if path is not None:
        trusting.load_verify_locations(path)
    return trusting


def open_web(
    filesystem: Any, path: str, options: Mapping[str, Any], timeout_s: float, *, part: str | None = None
) -> Any:
    """Open one request that streams the whole body, or ``part`` of it, such as ``"512-1023"`` or ``"512-"``.

    What needs no more than headers and certificates is asked for by the standard library, which is several times as
    fast; all else that fsspec can do, and bodies that were compressed for the way, are left to it.
    """
    # A server that compresses on the way would count other bytes.
    headers = {**options.get("headers", {}), "Accept-Encoding": "identity"}
    if part is not None:
        headers["Range"] = f"bytes={part}"
    if options.keys() <= PLAIN_OPTIONS and not any(conf.get(scheme) for scheme in ("http", "https")):
        authorities = options.get("ca_file")
        answer = get(path, headers, timeout_s, _trusting(None if authorities is None else os.fspath(authorities)))
        if not is_encoded(answer.r.headers):
            return answer
        answer.close()
    # The given size keeps fsspec from asking for it by a request of its own. aiohttp's own limit is five minutes for
    # the whole body, and a shard is often open for longer.
    timeout = options.get("timeout", _timeout(timeout_s))
    return filesystem.open(path, "rb", block_size=0, size=1, timeout=timeout, headers=headers)


def is_encoded(headers: Any) -> bool:
    """Whether a body was compressed for the way."""
    return bool(headers.get("Content-Encoding", "identity").lower() != "identity")


def ask_web(filesystem: Any, path: str, options: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return what fsspec knows of a file, and raise what has really failed, which it calls a file that is not there."""
    try:
        asked = {} if "timeout" in options else {"timeout": _timeout(timeout_s)}
        # Not by `info`, which takes a timeout for its own.
        found: dict[str, Any] = sync(filesystem.loop, partial(filesystem._info, path, **asked))
    except FileNotFoundError as error:
        if error.__cause__ is None or status_of(error.__cause__) == 404:
            raise
        raise error.__cause__ from None
    return found


def _timeout(timeout_s: float) -> Any:
    aiohttp = require("aiohttp", extra="http", purpose="read shards over HTTP")
    return aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)


class WebOrigin:
    """A file on a web server, from any byte on.

    Args:
        filesystem: fsspec's, for HTTP.
        path: the URL, as it wants it.
        options: the storage options.
        timeout_s: the seconds without a byte after which the server has failed.
    """

    def __init__(self, filesystem: Any, path: str, options: Mapping[str, Any], timeout_s: float) -> None:
        self._filesystem, self._path, self._options, self._timeout_s = filesystem, path, options, timeout_s

    def open_at(self, start: int) -> Opened:
        """Open the file at a byte; a server that knows no ranges sends it from the beginning."""
        part = f"{start}-" if start else None
        file = open_web(self._filesystem, self._path, self._options, self._timeout_s, part=part)
        response = file.r
        headers = response.headers
        sent = CONTENT_RANGE.fullmatch(headers.get("Content-Range", "")) if response.status == 206 else None
        if sent is not None:
            total = sent[3]
            return Opened(file, int(sent[1]), None if total == "*" else int(total), version_of_response(response))
        # What was compressed for the way is another number of bytes each time, for all one knows.
        if is_encoded(headers):
            return Opened(file, 0, None, ())
        length = headers.get("Content-Length", "")
        return Opened(file, 0, int(length) if SIZE.fullmatch(length) else None, version_of_response(response))


def version_of_response(response: Any) -> tuple[str, ...]:
    """Return what is another if the file is."""
    return version_of(*(response.headers.get(name) for name in ("ETag", "Last-Modified")))
