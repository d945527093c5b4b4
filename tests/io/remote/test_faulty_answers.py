"""Wrong or endless responses of web servers cause an error that describes the response, and yield no sample."""

from __future__ import annotations

import gzip
import itertools
import random
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from faults import Fault, FaultProxy
from nginx_server import Nginx

from wds_datapipes import ShardList
from wds_datapipes.errors import (
    CorruptShardError,
    MissingSidecarError,
    ShardError,
    ShardOpenError,
    SidecarError,
    TruncatedShardError,
)
from wds_datapipes.index.format.builder import build_index
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.remote import known_stores
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.io.sidecars import read_sidecar
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("pauses", "nothing_left", "shard")

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{number}", "bin": random.Random(number).randbytes(3000)} for number in range(6)
]
WANT = [sample["__key__"] for sample in SAMPLES]
#: The offset of the third sample.
PLACE = 2 * 3584


@pytest.fixture(scope="module")
def shard(nginx: Nginx) -> bytes:
    folder = nginx.files / "answers"
    folder.mkdir()
    return Path(build_shard(folder / "a.tar", SAMPLES)).read_bytes()


def address(proxy: FaultProxy) -> str:
    return f"http://127.0.0.1:{proxy.port}/answers/a.tar"


def keys(url: str, folder: Path | None = None, **options: Any) -> list[str]:
    pipe: Any = ShardList(url)
    if folder is not None:
        pipe = pipe.cache_wds_shards(folder)
    return [sample["__key__"] for sample in pipe.load_wds_shards(**options).group_samples()]


def outcome(ask: Callable[[str], object], url: str) -> object:
    """Return the result of a reader, or the error that it raises."""
    try:
        return ask(url)
    except (ShardError, SidecarError) as error:
        return error


# 206


def parts(shard: bytes) -> dict[str, Fault]:
    """Wrong responses with status 206, whose body begins at a sample, so that a lost sample would go unnoticed."""
    size, rest = len(shard), shard[PLACE:]

    def fault(told: str | None, body: bytes = rest, **headers: str) -> Fault:
        return Fault(sent_status=206, headers={"Content-Range": told, **headers}, body=body)

    boundary = b"--x\r\nContent-Range: bytes 0-9/10\r\n\r\n0123456789\r\n--x--\r\n"
    return {
        "another begin": fault(f"bytes {PLACE}-{size - 1}/{size}"),
        "a later begin": fault(f"bytes {PLACE + 1024}-{size - 1}/{size}", shard[PLACE + 1024 :]),
        "none": fault(None),
        "not understood": fault("bytes 0-"),
        "another unit": fault(f"blocks 0-{size - 1}/{size}"),
        "no part": fault(f"bytes */{size}"),
        "of unknown size": fault(f"bytes {PLACE}-{size - 1}/*"),
        "of unknown size from 0": fault(f"bytes 0-{PLACE - 1}/*", shard[:PLACE]),
        "multipart": fault(None, boundary, **{"Content-Type": "multipart/byteranges; boundary=x"}),
        "multipart with a range": fault("bytes 0-9/10", boundary, **{"Content-Type": "multipart/byteranges"}),
        "of another length": fault(f"bytes 0-{size - 1}/{size}"),
        "compressed": fault(f"bytes 0-{size - 1}/{size}", gzip.compress(shard), **{"Content-Encoding": "gzip"}),
        "of more digits than numbers have": fault(f"bytes 0-{'9' * 30}/{'9' * 30}"),
        "all of it": fault(f"bytes 0-{size - 1}/{size}", shard),
    }


NAMES = list(parts(bytes(PLACE + 1)))


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_never_mistaken_for_the_file(proxy: FaultProxy, shard: bytes, name: str, tmp_path: Path) -> None:
    fault = parts(shard)[name]
    for on_error in ("raise", "skip"):
        proxy.faults[:] = [fault] * 20
        told = r"the server sends a part of the file \(status 206, (Content-Range: '|no Content-Range)"
        if on_error == "skip":
            assert keys(address(proxy), on_error=on_error, read_ahead=0) == []
            continue
        with pytest.raises(ShardOpenError, match=rf"/answers/a\.tar cannot be opened: .*{told}"):
            keys(address(proxy), read_ahead=0)
        if name != "all of it":  # a copy is requested in parts
            with pytest.raises(ShardError, match=rf"/answers/a\.tar .*{told}"):
                keys(address(proxy), tmp_path / "copies")
        with pytest.raises(MissingSidecarError, match=rf"/answers/a\.tar cannot be opened: .*{told}"):
            read_sidecar(address(proxy))
    assert list(tmp_path.rglob("*.tar")) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_first_part_is_an_error(
    proxy: FaultProxy, shard: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_stores, "NEAR_S", -1.0)  # otherwise the whole shard might be requested
    proxy.faults[:] = [parts(shard)[name]] * 20
    if name == "all of it":  # as requested
        assert keys(address(proxy)) == WANT
        return
    with pytest.raises(
        ShardOpenError, match=r"/answers/a\.tar cannot be opened: .*the server sends a part of the file"
    ):
        keys(address(proxy))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_part_is_never_appended(proxy: FaultProxy, shard: bytes, name: str) -> None:
    proxy.faults[:] = [Fault(at=PLACE + 700, how="reset"), *[parts(shard)[name]] * 20]
    if name in ("all of it", "another begin"):  # before the next byte, and skipped up to it
        assert keys(address(proxy)) == WANT
        return
    with pytest.raises(ShardError, match=rf"/answers/a\.tar .*(after {PLACE + 700}|after \d+) bytes") as found:
        keys(address(proxy))
    if name == "a later begin":
        assert f"the store sent the bytes from {PLACE + 1024} on instead of the next ones" in str(found.value)


@pytest.mark.parametrize("name", NAMES)
def test_headers_of_a_wrong_part_are_noticed(proxy: FaultProxy, shard: bytes, name: str) -> None:
    good = build_index(address(proxy))
    for before in range(3):
        proxy.faults[:] = [*[None] * before, *[parts(shard)[name]] * 30]
        found = outcome(build_index, address(proxy))
        assert found.has_same_layout(good) if isinstance(found, ShardIndex) else "/answers/a.tar" in str(found)


@pytest.mark.parametrize("status", [201, 202, 204, 205, 207, 226, 299, 300, 304])
def test_a_status_without_the_file_is_not_an_empty_file(proxy: FaultProxy, status: int) -> None:
    proxy.faults[:] = [Fault(status=status)] * 9
    with pytest.raises(ShardOpenError, match=rf"a\.tar cannot be opened: HTTP status {status}"):
        keys(address(proxy))


# Content codings


def test_a_content_coding_is_decoded(proxy: FaultProxy, shard: bytes) -> None:
    for name in ("gzip", "x-gzip", "GZIP"):
        half = len(shard) // 2
        for body in (gzip.compress(shard), gzip.compress(shard[:half]) + gzip.compress(shard[half:])):
            proxy.faults[:] = [Fault(body=body, headers={"Content-Encoding": name})]
            assert keys(address(proxy)) == WANT


@pytest.mark.parametrize("name", ["br", "zstd", "deflate", "gzip, gzip", "nonsense"])
def test_an_undecodable_content_coding_is_an_error(proxy: FaultProxy, shard: bytes, name: str) -> None:
    proxy.faults[:] = [Fault(body=zlib.compress(shard), headers={"Content-Encoding": name})] * 9
    with pytest.raises(ShardOpenError, match=naming("content encoding", f"'{name}'")):
        keys(address(proxy))


def test_truncated_compressed_data_are_an_error(proxy: FaultProxy, shard: bytes) -> None:
    body = gzip.compress(shard)
    for cut in (1, 10, len(body) // 2, len(body) - 9, len(body) - 1):
        proxy.faults[:] = [Fault(body=body[:cut], headers={"Content-Encoding": "gzip"})] * 9
        with pytest.raises(TruncatedShardError, match=r"a\.tar"):
            keys(address(proxy), retries=1)
    proxy.faults[:] = [Fault(body=body[:50] + b"xx" + body[52:], headers={"Content-Encoding": "gzip"})] * 9
    with pytest.raises(CorruptShardError, match=r"The gzip data of \S+a\.tar .* are damaged: Error -3"):
        keys(address(proxy), retries=1)


# Endless answers

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def forever(begin: bytes, *pieces: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: itertools.chain([begin], itertools.cycle(pieces))


ENDLESS: dict[str, tuple[Callable[[], Iterable[bytes]], float]] = {
    "nothing at all": (forever(b"", b""), 0.01),
    "a status line in drips": (forever(b"HTTP/1.1 200 ", b"O"), 0.01),
    "a header in drips": (forever(OK + b"X-A: ", b"a"), 0.01),
    "headers in drips": (forever(OK, b"X", b": ", b"a", b"\r\n"), 0.05),
    "status lines without end": (forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), 0.0),
    "early hints in drips": (forever(b"", b"HTTP/1.1 100 Continue\r\n", b"X: a\r\n", b"\r\n"), 0.05),
    "a header without end": (forever(OK + b"X-A: ", b"a" * 4096), 0.0),
    "headers without end": (forever(OK, b"X-A: a\r\n"), 0.0),
    "the size of a chunk in drips": (forever(CHUNKED, b"0"), 0.01),
    "a chunk's extension in drips": (forever(CHUNKED + b"5;a=", b"a"), 0.01),
    "a body in drips": (forever(CHUNKED, b"1\r\na\r\n"), 0.01),
    "trailers in drips": (forever(CHUNKED + b"0\r\n", b"X: a\r\n"), 0.01),
    "trailers without end": (forever(CHUNKED + b"0\r\n", b"X: a\r\n"), 0.0),
    "redirects in drips": (forever(b"HTTP/1.1 302 Found\r\nLocation: /b\r\n", b"X", b": a\r\n"), 0.05),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_response_is_abandoned(proxy: FaultProxy, name: str, tmp_path: Path) -> None:
    pieces, pause_s = ENDLESS[name]
    asks: list[Callable[[str], object]] = [
        lambda url: keys(url, retries=0, timeout_s=0.3),
        lambda url: keys(url, tmp_path / "copies", retries=0, timeout_s=0.3),
        lambda url: file_facts(url, retries=0, timeout_s=0.3),
        lambda url: read_sidecar(url, {"retries": 0, "timeout_s": 0.3}),
    ]
    for ask in asks:
        proxy.faults[:] = [Fault(wire=pieces, pause_s=pause_s)] * 9
        found = outcome(ask, address(proxy))
        # The size is requested by HEAD, whose answers are correct here, and a body may be empty.
        assert not isinstance(found, Exception) or "/answers/a.tar" in str(found)
    if "body" not in name and "trailers" not in name:  # nothing was read, and the next answer is correct
        proxy.faults[:] = [Fault(wire=pieces, pause_s=pause_s)]
        assert keys(address(proxy), timeout_s=0.3) == WANT
