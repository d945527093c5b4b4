"""A shard in parts: the same members as one stream, whatever breaks, or an error with the shard, the byte and why."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults import Fault, FaultProxy, fault_proxy
from fsspec.asyn import get_loop  # type: ignore[import-untyped]  # it carries no types
from hypothesis import given, settings
from hypothesis import strategies as st
from nginx_server import Nginx
from shard_in_parts import (
    OTHER_SHARD,
    PART,
    SAMPLES,
    SHARD,
    SIZE,
    address,
    members_of,
    read,
    small_parts,
    threads,
    until,
)

from wds_datapipes.errors import ChangedShardError, ShardError, ShardOpenError, ShardReadError, TruncatedShardError
from wds_datapipes.io.remote.resuming_stream import ResumingStream
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("pauses")
leaves_nothing = pytest.mark.usefixtures("nothing_left")

WANT = [sample["bin"] for sample in SAMPLES]
#: S3's requests are signed, and nginx does not check the signatures.
SCHEMES = ["http", "s3"]
#: The offset of the end marker.
END = sum(512 + -(-len(data) // 512) * 512 for data in WANT)
STARTS = range(0, SIZE, PART)
#: A part in the middle.
MIDDLE = STARTS[len(STARTS) // 2]
#: More time than a busy machine needs for a response.
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def server(nginx: Nginx) -> Iterator[FaultProxy]:
    folder = nginx.files / "parts"
    folder.mkdir()
    (folder / "a.tar").write_bytes(SHARD)
    (folder / "b.tar").write_bytes(OTHER_SHARD)
    os.utime(folder / "b.tar", (1e9, 1e9))  # nginx derives the ETag from the size and the date
    build_shard(folder / "small.tar", SAMPLES[:2])
    build_shard(folder / "none.tar", [])
    (folder / "empty.tar").touch()
    get_loop()  # of fsspec: keeps descriptors while the process runs
    with fault_proxy(("127.0.0.1", nginx.http)) as made:
        yield made


@pytest.fixture
def proxy(server: FaultProxy) -> Iterator[FaultProxy]:
    """Return the server without requests and faults, and let it be read in parts."""
    server.asked.clear()
    with small_parts():
        yield server
    assert server.faults_at == {} or not any(server.faults_at.values())
    server.faults_at.clear()
    server.released.set()
    for thread in threads():
        thread.join()


def parts_asked(proxy: FaultProxy) -> list[tuple[str, int, int]]:
    """Return the paths of the requests, and the first byte and the last one, in order."""
    found = []
    for path, part in proxy.asked:
        assert part is not None
        first, last = part.removeprefix("bytes=").split("-")
        found.append((path.partition("?")[0], int(first), int(last)))
    return sorted(found)


@settings(max_examples=25)
@given(
    names=st.lists(st.sampled_from(["a", "a", "b", "small", "none", "empty"]), min_size=1, max_size=5),
    read_ahead=st.sampled_from([1, 3 * PART, 150_000, 1 << 20, 64 << 20]),
    part=st.sampled_from([512, 1000, PART, SIZE // 3, SIZE - 1, SIZE, SIZE + 1]),
    open_shards=st.sampled_from([1, 2, 4]),
    scheme=st.sampled_from(SCHEMES),
)
def test_parts_of_any_size_change_no_member_and_each_byte_is_requested_once(
    server: FaultProxy, names: list[str], read_ahead: int, part: int, open_shards: int, scheme: str
) -> None:
    places = [address(server, scheme, f"{name}.tar") for name in names]
    urls, options = [url for url, _ in places], places[0][1]

    def outcome(**more: Any) -> list[Any]:
        pipe = members_of(urls, open_shards=open_shards, on_error="skip", **more, **options).group_samples()
        return [(sample["__key__"], sample["bin"]) for sample in pipe]

    begun = len(server.asked)
    with small_parts(part):
        found = outcome(read_ahead=read_ahead)
    asked = server.asked[begun:]
    assert found == outcome(read_ahead=0)
    for name in {"a", "b"} & set(names):
        ranges = Counter(ranged for path, ranged in asked if path.partition("?")[0] == f"/parts/{name}.tar")
        in_parts: list[str | None] = [
            f"bytes={at}-{(min(at + part, SIZE) if at else part) - 1}" for at in range(0, SIZE, part)
        ]
        if None in ranges:  # with less memory than two parts
            in_parts = [None]
        needed = in_parts[: -(-END // part)]  # the rest behind the end marker may be left
        assert {ranges[each] for each in needed} == {names.count(name)}
        assert max(ranges.values()) == names.count(name)
        assert ranges.keys() <= {*in_parts}


@settings(max_examples=30)
@given(
    breaks=st.dictionaries(
        st.sampled_from(STARTS[:-1]), st.tuples(st.integers(0, PART), st.sampled_from(["", "500", "503", "drop"]))
    ),
    scheme=st.sampled_from(SCHEMES),
    read_ahead=st.sampled_from([3 * PART, 64 << 20]),
)
def test_a_part_that_breaks_resumes_at_the_very_byte(
    server: FaultProxy, breaks: dict[int, tuple[int, str]], scheme: str, read_ahead: int
) -> None:
    """All parts may break at the same time, each at any byte, and the store may then refuse or drop a request."""
    wanted = {*STARTS}
    for start, (at, then) in breaks.items():
        status = {"500": [Fault(status=500)], "503": [Fault(status=503)], "drop": [Fault(how="close")], "": []}[then]
        server.faults_at.setdefault(start, []).append(Fault(at=at, how="close"))
        if at < PART:
            wanted.add(start + at)
            server.faults_at.setdefault(start + at, []).extend(status)
    begun = len(server.asked)
    with small_parts():
        assert read(server, scheme, read_ahead=read_ahead) == WANT
    server.faults_at.clear()
    firsts = {int(ranged.removeprefix("bytes=").split("-")[0]) for _, ranged in server.asked[begun:] if ranged}
    assert wanted - firsts <= {*STARTS[-(-END // PART) :]}
    assert firsts <= wanted


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy) -> Iterator[Callable[[int], None]]:
    """Return a function that lets the proxy reset a held connection once the bytes before an offset were read."""
    offsets = [0]
    readinto = ResumingStream.readinto

    def noted(stream: ResumingStream, buffer: bytearray) -> int:
        count = readinto(stream, buffer)
        if stream.start <= offsets[0] < stream.start + PART and stream.offset >= offsets[0]:
            proxy.released.set()
        return count

    def hold(offset: int) -> None:
        offsets[0] = offset
        proxy.released = threading.Event()
        if not offset % PART:  # no byte of the part
            proxy.released.set()

    monkeypatch.setattr(ResumingStream, "readinto", noted)
    yield hold
    proxy.released.set()


#: The offsets in a part at which it breaks.
OFFSETS = [0, 1, 100, PART // 2, PART - 1]


@leaves_nothing
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("start", [STARTS[0], MIDDLE, STARTS[-(-END // PART) - 1]])
def test_a_reset_at_any_byte_resumes_there(
    proxy: FaultProxy, held: Callable[[int], None], start: int, scheme: str
) -> None:
    for at in OFFSETS:
        proxy.asked.clear()
        proxy.faults_at[start] = [Fault(at=at, how="held")]
        held(start + at)
        assert read(proxy, scheme) == WANT
        firsts = Counter(first for _, first, _ in parts_asked(proxy))
        assert firsts == Counter([*STARTS, start + at])


@leaves_nothing
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_part_that_stalls_or_ends_early_resumes_there(proxy: FaultProxy, scheme: str) -> None:
    proxy.stalled.clear()
    cut: dict[str, str | None] = {"Content-Range": f"bytes {MIDDLE + PART}-{MIDDLE + PART + 699}/{SIZE}"}
    proxy.faults_at.update(
        {
            STARTS[0]: [Fault(at=700, how="stall")],
            MIDDLE: [Fault(at=0, how="stall")],
            MIDDLE + PART: [Fault(body=SHARD[MIDDLE + PART :][:700], headers=cut)],
        }
    )
    assert read(proxy, scheme, timeout_s=TIMEOUT_S) == WANT
    proxy.stalled.set()
    resumed = [700, MIDDLE, MIDDLE + PART + 700]
    assert Counter(first for _, first, _ in parts_asked(proxy)) == Counter([*STARTS, *resumed])


OTHER_DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
MIDDLE_RANGE = f"bytes {MIDDLE}-{MIDDLE + PART - 1}"
PART_BODY = SHARD[MIDDLE : MIDDLE + PART]


def differs(found: str) -> str:
    return f"its ETag, date or size differs: {found} instead of "


def range_of(start: int, stop: int) -> Fault:
    """Send other bytes than those of the part, and say which."""
    return Fault(body=SHARD[start:stop], headers={"Content-Range": f"bytes {start}-{stop - 1}/{SIZE}"})


#: What a server may send instead of a part, and what the error must say about it.
LIES: dict[str, tuple[Fault, str]] = {
    "another version": (Fault(path="/parts/b.tar"), differs(rf'"\S+", Sun, 09 Sep 2001 01:46:40 GMT, {SIZE:,} bytes')),
    "another ETag": (Fault(headers={"ETag": '"other"'}), differs(f'"other", .* GMT, {SIZE:,} bytes')),
    "no ETag": (Fault(headers={"ETag": None}), differs(rf"\w+, .* GMT, {SIZE:,} bytes")),
    "a weak ETag": (Fault(headers={"ETag": 'W/"1"'}), differs(f'W/"1", .* GMT, {SIZE:,} bytes')),
    "another date": (Fault(headers={"Last-Modified": OTHER_DATE}), differs(f'"\\S+", {OTHER_DATE}, {SIZE:,} bytes')),
    "another size": (
        Fault(headers={"Content-Range": f"{MIDDLE_RANGE}/{SIZE + 1}"}),
        differs(f'"\\S+", .* GMT, {SIZE + 1:,} bytes'),
    ),
    "nothing": (Fault(headers={"ETag": None, "Last-Modified": None}), differs(f"no ETag or date, {SIZE:,} bytes")),
    "no size": (Fault(headers={"Content-Range": f"{MIDDLE_RANGE}/*"}), r"not its size .*star"),
    "no Content-Range": (Fault(headers={"Content-Range": None}), "no Content-Range"),
    "the whole file": (Fault(no_range=True), "a different range, which begins at byte 0"),
    "a longer part": (
        range_of(MIDDLE, MIDDLE + PART + 9),
        f"sends bytes {MIDDLE} to {MIDDLE + PART + 8}, but {MIDDLE} to {MIDDLE + PART - 1} were requested",
    ),
    "a part from before": (
        range_of(MIDDLE - 9, MIDDLE + PART),
        f"a different range, which begins at byte {MIDDLE - 9}",
    ),
    "a part from behind": (
        range_of(MIDDLE + 9, MIDDLE + PART),
        f"a different range, which begins at byte {MIDDLE + 9}",
    ),
    "more than it says": (Fault(body=PART_BODY + b"!"), rf"sends {PART + 1} bytes for the Content-Range"),
    "less than it says": (Fault(body=PART_BODY[:-1]), rf"sends {PART - 1} bytes for the Content-Range"),
    "a coding": (Fault(headers={"Content-Encoding": "br"}), "Content-Encoding: 'br'"),
    "several parts": (Fault(headers={"Content-Type": "multipart/byteranges; boundary=a"}), "multipart"),
    "the file has shrunk": (Fault(status=416), f"ends before byte {MIDDLE}"),
    "the file is gone": (Fault(status=404), "(404|there is no such file)"),
    "no access": (Fault(status=403), "HTTP status 403, Forbidden"),
}


@leaves_nothing
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_bytes_than_those_of_the_part_are_an_error(
    proxy: FaultProxy, held: Callable[[int], None], lie: str, scheme: str
) -> None:
    """Whether the part begins with it or resumes with it, the samples before it are those of the shard."""
    fault, says = LIES[lie]
    for begun in ([], [Fault(at=0, how="close")]):
        proxy.faults_at[MIDDLE] = [*begun, fault]
        found: list[bytes] = []
        url, options = address(proxy, scheme)
        with pytest.raises(ShardError) as raised:
            found.extend(member.data for member in members_of([url], **options))
        assert found == WANT[: len(found)]
        assert re.search(rf"/parts/a\.tar .*\bbyte {MIDDLE}\b", str(raised.value))
        assert re.search(says, str(raised.value))
        refused = ShardReadError if begun else ShardOpenError
        assert type(raised.value) is (refused if fault.status in (403, 404) else ChangedShardError)


#: What a server may answer to the first request, and the number of requests; 0 if it has answered with a part.
FIRST_ANSWERS: dict[str, tuple[list[Fault | None], type[ShardError] | None, int]] = {
    "the whole file": ([Fault(no_range=True)], None, 1),
    "a weak ETag": ([Fault(headers={"ETag": 'W/"1"'})], None, 2),
    "no ETag": ([Fault(headers={"ETag": None})], None, 2),
    "no size": ([Fault(headers={"Content-Range": f"bytes 0-{PART - 1}/*"})], None, 2),
    "a longer part": ([range_of(0, PART + 9)], None, 2),
    "another part": ([range_of(9, PART)], None, 2),
    "more than it says": ([Fault(body=SHARD[: PART + 9])], None, 2),
    "a coding": ([Fault(headers={"Content-Encoding": "br"})], None, 2),
    "a shorter part": ([range_of(0, PART - 9)], None, 0),
    "a single byte": ([range_of(0, 1)], None, 0),
    "its own end": ([Fault(headers={"Content-Range": f"bytes 0-{PART - 1}/{PART}"})], TruncatedShardError, 1),
    "less than the size": ([Fault(headers={"Content-Range": f"bytes 0-{PART - 1}/{PART + 1}"})], ChangedShardError, 0),
    "more than the size": ([Fault(headers={"Content-Range": f"bytes 0-{PART - 1}/{SIZE + 1}"})], ChangedShardError, 0),
    "another version after no byte": ([Fault(at=0, how="close"), Fault(path="/parts/b.tar")], ChangedShardError, 0),
    "the whole file after no byte": ([Fault(at=0, how="close"), Fault(no_range=True)], ChangedShardError, 0),
}


@leaves_nothing
@pytest.mark.parametrize("answer", FIRST_ANSWERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_answer_decides_whether_a_shard_has_parts(proxy: FaultProxy, answer: str, scheme: str) -> None:
    faults, error, requests = FIRST_ANSWERS[answer]
    proxy.faults_at[0] = [*faults]
    if error is None:
        assert read(proxy, scheme) == WANT
    else:
        with pytest.raises(ShardError, match=r"/parts/a\.tar") as raised:
            read(proxy, scheme)
        assert type(raised.value) is error
    assert requests in (0, len(proxy.asked))


@leaves_nothing
def test_a_shard_that_is_replaced_while_its_parts_are_read(proxy: FaultProxy, nginx: Nginx) -> None:
    path = nginx.files / "parts" / "replaced.tar"
    for other in (OTHER_SHARD, OTHER_SHARD + bytes(PART), OTHER_SHARD[:MIDDLE], OTHER_SHARD[:-1]):
        path.write_bytes(SHARD)
        url, _ = address(proxy, name=path.name)
        members = iter(members_of([url], read_ahead=3 * PART))
        found = [next(members).data]
        (path.parent / "other").write_bytes(other)
        os.utime(path.parent / "other", (1e9, 1e9))
        (path.parent / "other").replace(path)
        with pytest.raises(ChangedShardError, match=r"/parts/replaced\.tar (was replaced while|ends before byte)"):
            found.extend(member.data for member in members)
        assert found == WANT[: len(found)]


@leaves_nothing
def test_parts_that_are_not_read_count_as_no_retries(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    proxy.stalled.clear()
    proxy.faults_at.update({start: [Fault(at=1, how="stall")] for start in STARTS[1:4]})
    url, _ = address(proxy)
    members = iter(members_of([url], read_ahead=4 * PART))
    try:
        for _ in range(3):  # of the first part
            next(members)
        until(lambda: len(proxy.asked) == 4)
        del members
    finally:
        proxy.stalled.set()
    assert caplog.messages == []
    assert pauses == []
