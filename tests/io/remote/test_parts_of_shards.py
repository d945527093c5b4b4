"""Parts of distant shards: their sizes, and which shards come in parts."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from random import Random

import pytest
from shard_in_parts import log_of_calls
from site_server import Site

from wds_datapipes import ShardList, StatefulShards
from wds_datapipes.io.remote import known_stores
from wds_datapipes.io.remote.remote_parts import RemoteParts
from wds_datapipes.testing import build_shard

MIB = 1 << 20
SAMPLES = 18


@pytest.fixture(autouse=True)
def shard(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a distant server send a shard of 9 MiB, and identify its version."""
    monkeypatch.setattr(known_stores, "NEAR_S", -1.0)
    random = Random(0)
    samples: list[dict[str, str | bytes]] = [
        {"__key__": f"{number:02d}", "bin": random.randbytes(MIB // 2)} for number in range(SAMPLES)
    ]
    site.body = Path(build_shard(tmp_path / "a.tar", samples)).read_bytes()
    site.headers = {"ETag": '"one"'}


def read(site: Site, read_ahead: int) -> list[str | None]:
    """Read the shard twice; return the header with the range of each request of the second time."""
    for _ in range(2):  # the first time shows what the server supports
        site.asked.clear()
        assert sum(1 for _ in ShardList(site.url()).load_wds_shards(read_ahead=read_ahead).group_samples()) == SAMPLES
    return [headers.get("Range") for _, headers in site.asked]


@pytest.mark.parametrize(("limit", "size"), [(16, 1), (32, 1), (64, 2), (128, 4), (256, 8), (512, 8)])
def test_the_limit_of_bytes_ahead_determines_the_size_of_parts(site: Site, limit: int, size: int) -> None:
    assert site.body is not None
    ends = [*range(0, len(site.body), size * MIB), len(site.body)]
    assert sorted(map(str, read(site, limit * MIB))) == sorted(
        f"bytes={a}-{b - 1}" for a, b in itertools.pairwise(ends)
    )


@pytest.mark.parametrize("etag", ["", 'W/"one"'])
def test_a_shard_without_a_strong_etag_comes_by_one_request(site: Site, etag: str) -> None:
    site.headers = {"ETag": etag, "Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT"}
    assert read(site, 64 * MIB) == [None]


@pytest.mark.parametrize(
    "headers", [{"ETag": "CJ1EAE=", "X-Goog-Generation": "1"}, {"ETag": '"one"', "Content-Encoding": "aws-chunked"}]
)
def test_a_shard_of_any_store_comes_in_parts(site: Site, headers: dict[str, str]) -> None:
    site.headers = headers
    assert len(read(site, 64 * MIB)) == 5


@pytest.mark.parametrize("limit", [0, MIB])
def test_a_shard_with_little_room_comes_by_one_request(site: Site, limit: int) -> None:
    assert read(site, limit) == [None]


def test_a_compressed_shard_comes_in_parts(site: Site) -> None:
    assert site.body is not None
    site.body = gzip.compress(site.body, 1)
    parts = read(site, 64 * MIB)
    assert len(parts) == len(range(0, len(site.body), 2 * MIB)) > 1


def test_a_copy_is_downloaded_in_parts_of_1_mib(site: Site, tmp_path: Path) -> None:
    assert site.body is not None
    copies = ShardList(site.url()).cache_wds_shards(tmp_path / "copies").load_wds_shards().group_samples()
    assert sum(1 for _ in copies) == SAMPLES
    asked = {headers["Range"] for _, headers in site.asked if "Range" in headers}
    ends = [*range(0, len(site.body), MIB), len(site.body)]
    assert asked == {f"bytes={begin}-{end - 1}" for begin, end in itertools.pairwise(ends)}


def test_the_rest_of_a_shard_comes_in_parts_after_a_resume(site: Site) -> None:
    assert site.body is not None
    keys = [f"{number:02d}" for number in range(SAMPLES)]

    def loader() -> StatefulShards:
        return StatefulShards(ShardList(site.url()).load_wds_shards().group_samples())

    first = loader()
    assert [sample["__key__"] for sample in itertools.islice(first, 3)] == keys[:3]
    state = first.state_dict()
    site.asked.clear()
    (resumed := loader()).load_state_dict(state)
    assert [sample["__key__"] for sample in resumed] == keys[3:]
    begins = {
        int(headers["Range"].removeprefix("bytes=").partition("-")[0])
        for _, headers in site.asked
        if "Range" in headers
    }
    # Late requests of the first loader are for its own parts; that at 0 shows the format.
    rest = sorted(begin for begin in begins if begin % (2 * MIB))
    assert rest == [*range(rest[0], len(site.body), 2 * MIB)]
    assert len(rest) > 2


@pytest.mark.parametrize(("count", "before"), [(2, 2), (9, 2)])
def test_the_next_shard_is_requested_before_the_other_parts_of_a_small_one(
    site: Site, monkeypatch: pytest.MonkeyPatch, count: int, before: int
) -> None:
    """Its parts can begin only once the store has answered, which takes as long as all parts of a small shard."""
    log = log_of_calls(monkeypatch, RemoteParts, "__init__", "begin_next")
    urls = [site.url()] * count
    keys = [sample["__key__"] for sample in ShardList(urls).load_wds_shards().group_samples()]
    assert len(keys) == count * SAMPLES
    assert before <= log.index("begin_next") <= count  # more than `before` if the store answers meanwhile
    assert log.count("__init__") == count
