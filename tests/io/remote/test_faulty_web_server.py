"""A web server's faults in every region of a shard: the same samples, or an error with the shard and offset."""

from __future__ import annotations

import io
import json
import os
import random
import re
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults import Fault, FaultProxy, fault_proxy
from fsspec.asyn import get_loop  # type: ignore[import-untyped]  # it carries no types
from nginx_server import Nginx

from wds_datapipes import ShardList
from wds_datapipes.errors import ChangedShardError, ShardError, ShardReadError, TruncatedShardError
from wds_datapipes.io.openers import open_parts
from wds_datapipes.io.remote import known_stores, resuming_stream, source
from wds_datapipes.io.remote.remote_file import file_facts
from wds_datapipes.io.remote.resuming_stream import ResumingStream
from wds_datapipes.io.urls import store_of
from wds_datapipes.pipes.state.pipeline_state import load_state, save_state
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("pauses")
leaves_nothing = pytest.mark.usefixtures("nothing_left")

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"{number}", "bin": random.Random(number).randbytes(400 * number + 100), "cls": f"{number}"}
    for number in range(6)
]
WANT = [(sample["__key__"], sample["bin"], sample["cls"].encode()) for sample in SAMPLES]


def whole_shard(samples: list[dict[str, Any]] = SAMPLES) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return Path(build_shard(f"{folder}/a.tar", samples)).read_bytes()


def regions_of(shard: bytes) -> dict[str, int]:
    """The offsets at which a shard may be cut, by region."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as archive:
        member = [found for found in archive if found.name.endswith(".bin")][3]
        last = archive.getmembers()[-1]
    end = member.offset_data + member.size
    marker = last.offset_data + 512
    return {
        "before the first byte": 0,
        "behind the first byte": 1,
        "in the first header": 100,
        "behind the first header": 512,
        "at a header": member.offset,
        "in a header": member.offset + 257,
        "before the last byte of a header": member.offset + 511,
        "at data": member.offset_data,
        "in data": member.offset_data + member.size // 2,
        "before the last byte of data": end - 1,
        "at padding": end,
        "in padding": end + 7,
        "behind padding": end + -end % 512,
        "at the last header": last.offset,
        "at the end marker": marker,
        "in the end marker": marker + 300,
        "between the blocks of the end marker": marker + 512,
        "behind the end marker": marker + 1024,
        "before the last byte": len(shard) - 1,
        "behind the last byte": len(shard),
    }


SHARD = whole_shard()
#: The samples of another version of the shard, which has the same size and begins with the same bytes.
OTHER_SAMPLES = [
    {**each, "bin": bytes(len(each["bin"]))} if number > 2 else each for number, each in enumerate(SAMPLES)
]
OTHER = [(sample["__key__"], sample["bin"], sample["cls"].encode()) for sample in OTHER_SAMPLES]
OTHER_SHARD = whole_shard(OTHER_SAMPLES)
SIZE = len(SHARD)
REGIONS = regions_of(SHARD)


class Case(NamedTuple):
    """A fault and its expected result.

    Attributes:
        faults: the faults of the answers, one after the other, if the first one breaks at a byte.
        error: the error that is raised if it breaks there; None if none is.
        match: a pattern of the message.
    """

    faults: Callable[[int], list[Fault | None]]
    error: Callable[[int], type[ShardError] | None] = lambda at: None
    match: str = ""


def held(*then: Fault | None) -> Callable[[int], list[Fault | None]]:
    """The connection is reset after all sent data was read; these answers follow."""
    return lambda at: [Fault(at=at, how="held"), *then]


def once_read(error: type[ShardError]) -> Callable[[int], type[ShardError] | None]:
    """An error if something was read and something remains."""
    return lambda at: error if 0 < at < SIZE else None


def if_left(at: int) -> type[ShardError] | None:
    """An error if there is anything left to read."""
    return ShardReadError if at < SIZE else None


def if_short(at: int) -> type[ShardError] | None:
    """An error if something is missing: the store itself reports the end."""
    return TruncatedShardError if at < REGIONS["behind the end marker"] else None


REPLACED = r"/fault/a\.tar was replaced while it was read: after {at} bytes"
FAILED = r"Reading \w+://\S*fault/a\.tar failed after {at} bytes: "
CASES = {
    "reset": Case(lambda at: [Fault(at=at, how="reset")]),
    "close": Case(lambda at: [Fault(at=at, how="close")]),
    "reset once all was read": Case(held()),
    "again at the next byte": Case(held(Fault(at=1, how="close"), Fault(at=0, how="reset"))),
    "500": Case(held(Fault(status=500))),
    "503 with Retry-After": Case(held(Fault(status=503, headers={"Retry-After": "2"}))),
    "429 with a date": Case(held(Fault(status=429, headers={"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}))),
    "503 at first": Case(lambda at: [Fault(status=503), Fault(at=at, how="reset"), Fault(status=503)]),
    "no ranges by then": Case(held(Fault(no_range=True))),
    "the range begins before": Case(held(Fault(body=SHARD, headers={"Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}"}))),
    "another ETag": Case(held(Fault(headers={"ETag": '"other"'})), once_read(ChangedShardError), REPLACED),
    "another date": Case(
        held(Fault(headers={"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"})), once_read(ChangedShardError), REPLACED
    ),
    "no ETag by then": Case(held(Fault(headers={"ETag": None})), once_read(ChangedShardError), REPLACED),
    "another size": Case(
        held(Fault(headers={"Content-Range": f"bytes 0-{SIZE}/{SIZE + 1}"}, body=SHARD + b"\0")),
        once_read(ChangedShardError),
        REPLACED,
    ),
    "404": Case(held(Fault(status=404)), if_left, FAILED + "(HTTP status 404|there is no such file)"),
    "403": Case(held(Fault(status=403)), if_left, FAILED + "HTTP status 403"),
    "416": Case(held(Fault(status=416)), if_left, FAILED + "HTTP status 416"),
    "503 for good": Case(held(*[Fault(status=503)] * 9), if_left, FAILED + "HTTP status 503"),
    "too small a length": Case(lambda at: [Fault(body=SHARD[:at])], if_short, r"/fault/a\.tar"),
    "no length": Case(
        lambda at: [Fault(at=at, how="close", headers={"Content-Length": None, "Connection": "close"})],
        if_short,
        r"/fault/a\.tar",
    ),
}


@pytest.fixture(scope="module")
def proxy(nginx: Nginx) -> Iterator[FaultProxy]:
    (nginx.files / "fault").mkdir()
    (nginx.files / "fault" / "a.tar").write_bytes(SHARD)
    (nginx.files / "fault" / "b.tar").write_bytes(OTHER_SHARD)
    os.utime(nginx.files / "fault" / "b.tar", (1e9, 1e9))  # nginx derives the ETag from the size and the current second
    get_loop()  # keeps descriptors while the process runs
    with fault_proxy(("127.0.0.1", nginx.http)) as made:
        yield made


@pytest.fixture
def reached(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that makes the proxy reset a held connection after ``count`` bytes of the shard were read."""
    places = [0]
    readinto = ResumingStream.readinto

    def noted(stream: ResumingStream, buffer: bytearray) -> int:
        count = readinto(stream, buffer)
        if stream.offset >= places[0]:
            proxy.released.set()
        return count

    def hold(at: int) -> None:
        places[0] = at
        # The thread of an earlier answer, whose connection is kept, may not be waiting for its event yet.
        proxy.released.set()
        proxy.released = threading.Event()
        if not at:
            proxy.released.set()

    monkeypatch.setattr(ResumingStream, "readinto", noted)
    for (
        scheme
    ) in SCHEMES:  # a distant store, or a slow machine, would request parts, too, and meet the faults out of order
        known_stores.known_store(store_of(address(proxy, scheme)[0])).note_answer(0.0)
    yield hold
    proxy.faults.clear()  # a stream that ends early leaves some to the next test
    proxy.released.set()


#: Both are read by the same client. S3's requests are signed, and nginx does not check the signatures.
SCHEMES = ["http", "s3"]


def address(proxy: FaultProxy, scheme: str) -> tuple[str, dict[str, Any]]:
    """Return the URL of the shard, and the storage options."""
    site = f"http://127.0.0.1:{proxy.port}"
    if scheme == "http":
        return f"{site}/fault/a.tar", {}
    return "s3://fault/a.tar", {"storage_options": {"key": "access", "secret": "hunter2", "endpoint_url": site}}


def read(proxy: FaultProxy, *stages: Path, scheme: str = "http", **options: Any) -> list[tuple[str, bytes, bytes]]:
    url, storage = address(proxy, scheme)
    shards: Any = ShardList(url)
    for stage in stages:
        shards = shards.cache_wds_shards(stage)
    options = {"read_ahead": 0, **options}  # no parts
    samples = shards.load_wds_shards(retries=4, **options, **storage).group_samples()
    return [(sample["__key__"], sample["bin"], sample["cls"]) for sample in samples]


@leaves_nothing
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fault_changes_no_sample_or_is_an_error(
    proxy: FaultProxy, reached: Callable[[int], None], name: str, scheme: str
) -> None:
    case = CASES[name]
    for region, at in REGIONS.items():
        # An answer that does not fit its Content-Range is requested once more, without a range.
        proxy.faults[:] = case.faults(at) * (1 + (name == "too small a length"))
        reached(at)
        error = case.error(at)
        if error is None:
            assert read(proxy, scheme=scheme) == WANT, region
            continue
        with pytest.raises(ShardError) as found:
            read(proxy, scheme=scheme)
        assert type(found.value) is error, f"{region}: {found.value}"
        assert re.search(case.match.format(at=at), str(found.value)), f"{region}: {found.value}"


#: The last date that Python can represent.
LAST_DATE = "Fri, 31 Dec 9999 23:59:59 -0000"
#: Headers that do not prove that two files are the same.
DATE = {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}
WEAK: dict[str, dict[str, str | None]] = {
    "a weak ETag": {"ETag": 'W/"1"', **DATE},
    "a lower-case weak ETag": {"ETag": 'w/"1"', **DATE},
    "an ETag without quotes": {"ETag": "1", **DATE},
    "an empty ETag": {"ETag": '""', **DATE},
    "a date": {"ETag": None, **DATE},
    "a weak ETag and no size": {"ETag": 'W/"1"', **DATE, "Content-Length": None, "Connection": "close"},
    "nothing": {"ETag": None, "Last-Modified": None},
}


@leaves_nothing
@pytest.mark.parametrize("validator", WEAK)
@pytest.mark.parametrize("then", ["/fault/a.tar", "/fault/b.tar"])
def test_all_bytes_are_of_one_version_without_a_strong_validator(
    proxy: FaultProxy, reached: Callable[[int], None], tmp_path: Path, validator: str, then: str
) -> None:
    whole = {"Connection": "close", "Content-Length": str(SIZE)}
    headers = WEAK[validator]
    for region, at in REGIONS.items():
        for folder in ((), (tmp_path / f"{at}",)):
            # The connection breaks twice, the second time while the bytes already read are compared.
            proxy.faults[:] = [
                Fault(at=at, how="held", headers={**headers, **whole} if "no size" in validator else headers),
                Fault(at=at // 2, how="close", headers={**headers, **whole}),
                Fault(headers=headers, path=then),
            ]
            reached(at)
            if then == "/fault/a.tar" or at == SIZE:
                assert read(proxy, *folder) == WANT, region
            elif SHARD[:at] == OTHER_SHARD[:at]:
                assert read(proxy, *folder) == OTHER, region
            else:
                with pytest.raises(ChangedShardError, match=REPLACED.format(at=at)):
                    read(proxy, *folder)
                assert [path for path in tmp_path.rglob("*.tar") if path.read_bytes() not in (SHARD, OTHER_SHARD)] == []


@leaves_nothing
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_sends_single_bytes_is_given_up(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, pauses: list[float], scheme: str
) -> None:
    url, storage = address(proxy, scheme)
    parts = open_parts(url, **storage, timeout_s=1, retries=1)
    assert parts is not None
    for module in (source, resuming_stream):
        monkeypatch.setattr(module, "STALLED_BYTES_PER_S", 1 << 30)  # however fast this server is
    proxy.part_bytes = 1
    try:
        with parts.part(300, SIZE) as stream, pytest.raises(ShardReadError, match=r"received only \d+ bytes in"):
            [*iter(lambda: stream.read(SIZE), b"")]
    finally:
        proxy.part_bytes = sys.maxsize
    assert len(pauses) == 1


@leaves_nothing
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_sends_small_parts_needs_no_retry(
    proxy: FaultProxy, reached: Callable[[int], None], pauses: list[float], scheme: str
) -> None:
    url, storage = address(proxy, scheme)
    proxy.part_bytes = 700  # of 20,480
    try:
        parts = open_parts(url, **storage)
        assert parts is not None
        with parts.part(300, SIZE) as stream:
            assert b"".join(iter(lambda: stream.read(SIZE), b"")) == SHARD[300:]
        assert pauses == []
        proxy.faults[:] = [Fault(at=1000, how="held")]
        reached(1000)
        assert read(proxy, scheme=scheme) == WANT
        assert len(pauses) == 1
        # A server that sends none of the remaining bytes makes no progress.
        proxy.faults[:] = [None, None, *[Fault(body=b"", headers={"Content-Range": f"bytes 1000-999/{SIZE}"})] * 99]
        with parts.part(300, SIZE) as stream, pytest.raises(ShardError, match=r"/fault/a\.tar"):
            [*iter(lambda: stream.read(SIZE), b"")]
    finally:
        proxy.part_bytes = sys.maxsize


@leaves_nothing
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stalled_response_is_abandoned(proxy: FaultProxy, reached: Callable[[int], None], scheme: str) -> None:
    at = REGIONS["in data"]
    proxy.stalled.clear()
    proxy.faults[:] = [Fault(at=at, how="stall")]
    assert read(proxy, scheme=scheme, timeout_s=2) == WANT
    path, part = proxy.asked[-1]
    assert (path.partition("?")[0], part) == ("/fault/a.tar", f"bytes={at}-")
    proxy.stalled.set()


RESTORED = ["close", "again at the next byte", "503 at first"]


@leaves_nothing
@pytest.mark.parametrize("name", RESTORED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_resumed_epoch_continues_despite_faults(
    proxy: FaultProxy, reached: Callable[[int], None], name: str, scheme: str
) -> None:
    def pipeline() -> Any:
        url, storage = address(proxy, scheme)
        pipe = ShardList(url).load_wds_shards(retries=9, **storage).group_samples().shuffle_samples(3)
        pipe.set_seed(5)
        return pipe

    reached(0)
    whole = [sample["__key__"] for sample in pipeline()]
    items = iter(broken_off := pipeline())
    for _ in range(3):
        next(items)
    state = json.loads(json.dumps(save_state(broken_off)))
    items.close()
    for at in REGIONS.values():
        # The head of the shard is requested first, and then each part separately.
        proxy.faults[:] = [*CASES[name].faults(min(at, 512)), *CASES[name].faults(at), *CASES[name].faults(at)]
        reached(0)
        load_state(resumed := pipeline(), state)
        assert [sample["__key__"] for sample in resumed] == whole[3:]


@pytest.mark.parametrize("name", [*RESTORED, "no ranges by then", "another ETag", "503 for good", "too small a length"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_copy_is_complete_or_absent(
    proxy: FaultProxy, reached: Callable[[int], None], name: str, scheme: str, tmp_path: Path
) -> None:
    case = CASES[name]
    for region, at in REGIONS.items():
        folder = tmp_path / str(at)
        # A file shorter than the size that the server reports is fetched once more.
        proxy.faults[:] = case.faults(at) * (1 + (name == "too small a length"))
        reached(at)
        is_short = name == "too small a length" and at < SIZE
        if case.error(at) is None and not is_short:
            assert read(proxy, folder, scheme=scheme) == WANT, region
            assert b"".join(path.read_bytes() for path in folder.rglob("*.tar")) in (b"", SHARD)
        else:
            with pytest.raises(ShardError, match=r"/fault/a\.tar"):
                read(proxy, folder, scheme=scheme)
        assert [path for path in folder.rglob("*") if "part" in path.suffix] == []


@leaves_nothing
@pytest.mark.parametrize("zone", ["UTC", "JST-9"])
def test_a_date_without_a_time_zone_is_in_utc(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setattr(proxy, "hides_size", True)  # so that the facts are those of the answer to GET
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for date, seconds in ((DATE["Last-Modified"].replace("GMT", "-0000"), 784111777), (LAST_DATE, 253402300799)):
            proxy.faults[:] = [Fault(headers={"ETag": None, "Last-Modified": date})]
            facts = file_facts(f"http://127.0.0.1:{proxy.port}/fault/a.tar")
            assert round((facts.mtime_ns or 0) / 1e9) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()
