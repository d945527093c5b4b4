"""Short texts: patterns of shards, and values of HTTP headers."""

from __future__ import annotations

import contextlib
import math
from unittest.mock import patch

from fuzz_loop import Finding, Target

from wds_datapipes.errors import SpecError
from wds_datapipes.io.openers import split_scheme
from wds_datapipes.io.remote import http
from wds_datapipes.io.remote.filesystem import RemotePath
from wds_datapipes.io.remote.retry import retry_after, status_of
from wds_datapipes.io.remote.source import UnexpectedResponseError
from wds_datapipes.shards import patterns
from wds_datapipes.shards.patterns import compile_rules, expand_braces, rewrite_url, split_patterns, substitute

#: The values of the variables in patterns.
VARIABLES = {"WDS_A": "x{0..3}", "WDS_B": "${A}${A}", "WDS_C": "${C}"}


def expand(data: bytes) -> None:
    """Expand a pattern without looking up files, and apply rules to the result."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(SpecError), patch.object(patterns, "MAX_SHARDS", 10_000):  # a million takes a while
        for part in split_patterns(text):
            for url in expand_braces(substitute(part, VARIABLES))[:1000]:
                split_scheme(url)
    variables = {"GOPEN_REWRITE": text[:50], "USE_AIS_FOR": text[-3:], "AIS_ENDPOINT": "http://x"}
    with contextlib.suppress(SpecError):
        rewrite_url(text[:200], compile_rules(None, variables))


class Refused(Exception):
    """The exception of a library when a server refuses."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.headers = {"Retry-After": text}
        self.status = text
        self.response = {"ResponseMetadata": {"HTTPStatusCode": text}}


class Response:
    """The answer of a server."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    is_first = False

    def answer(self) -> Response:
        """Return itself, as the answer to a request."""
        return self

    def close(self) -> None:
        """Do nothing: there is no connection."""


def headers(data: bytes) -> None:
    """Parse a server's headers about a body and about the time to wait."""
    text = data.decode("latin-1")
    first, _, second = text.partition("\n")
    waits = retry_after(Refused(first))
    if waits is not None and not (waits >= 0 and math.isfinite(waits)):
        raise Finding(f"a server asks to wait for {waits} s")
    status_of(Refused(text))
    remote = RemotePath("http://h/x")
    for status, answered in (
        (206, {"Content-Range": first, "Content-Length": second, "ETag": second}),
        (200, {"Content-Length": first, "Content-Encoding": second}),
    ):
        # The method would contact a server.
        answer = patch.object(http.HttpClient, "_request", return_value=Response(status, answered))
        with answer, contextlib.suppress(UnexpectedResponseError):
            opened = http.HttpStore(remote).open(512 if status == 206 else 0)
            if opened.start < 0 or (opened.size is not None and opened.size < 0):
                raise Finding(f"{answered} is {opened}")


PATTERN_TOKENS = [b"{", b"}", b"..", b",", b"::", b"${B}", b"${C}", b"\\", b"{0..999999999}", b"[", b"*", b"pipe:x"]
HEADER_TOKENS = [b"bytes ", b"0-1/2", b"*/5", b"-", b"/", b"/*", b"nan", b"inf", b"1e999", b"-1", b"\xb2", b"9" * 5000]
HEADER_TOKENS += [b"Fri, 31 Dec 9999 23:59:59 GMT", b"Mon, 01 Jan 0001 00:00:00 -2359", b"gzip"]


def pattern_seeds() -> list[bytes]:
    plain = b"s3://b/{train-{000..012},val-0}.tar"
    return [plain, b"a.tar::${A}.tar::http://[::1]/{a..c}.tar", b"x\\{a\\}{0..9..3}", b"gs://a=/m/;b=c"]


def header_seeds() -> list[bytes]:
    return [b"bytes 512-1023/4096\n512", b"120\nidentity", b"Wed, 21 Oct 2015 07:28:00 GMT\n", b"bytes 0-5/*\n6"]


TARGETS = [
    Target("patterns", expand, pattern_seeds, 200, PATTERN_TOKENS),
    Target("headers", headers, header_seeds, 200, HEADER_TOKENS),
]
