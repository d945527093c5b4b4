"""Reading samples of local and remote shards by their indexes: requests, faults of servers, and closing."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import psutil
import pytest
from error_facts import naming
from faults import Fault, FaultProxy
from hypothesis import given, settings
from hypothesis import strategies as st
from nginx_server import Nginx
from numbered_shards import write_numbered

from wds_datapipes import IndexedSamples
from wds_datapipes.counters import Counters
from wds_datapipes.errors import CacheError, ChangedShardError, ShardError, ShardOpenError, UnsupportedSidecarError
from wds_datapipes.index import AccessOptions, EpochOptions, IndexOptions, Manifest, build_indexes, read_index
from wds_datapipes.index.format.index_copies import DatasetIndexes
from wds_datapipes.index.format.index_file import index_url
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.read.assemble import PlannedSamples
from wds_datapipes.index.read.dataset_reader import DatasetReader
from wds_datapipes.index.read.fetch import PlannedRanges, ShardRanges
from wds_datapipes.index.read.open_shards import OpenShards
from wds_datapipes.index.read.plan import LOCAL, REMOTE, plan_reading
from wds_datapipes.index.read.sample_reader import SampleReader
from wds_datapipes.io import daemon_threads, timeouts
from wds_datapipes.io.daemon_threads import close_result
from wds_datapipes.io.read_limits import DEFAULT_LIMITS
from wds_datapipes.io.remote import known_stores
from wds_datapipes.io.remote.http_connection import close_idle
from wds_datapipes.io.request_threads import FIRST_THREADS, MAX_TOGETHER, Pace, RequestThreads
from wds_datapipes.shard_cache.download import CacheFullError
from wds_datapipes.shard_cache.eviction import Passes
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.testing import build_shard

T = TypeVar("T")

LIMIT_S = 300.0
#: How long a thread is given to do what it must not do.
MOMENT_S = 0.5
SIZES = (30, 1, 20)
SAMPLES: list[list[dict[str, Any]]] = [
    [
        {
            "__key__": f"{shard}-{number:02}",
            "jpg": random.Random(number).randbytes(number % 4 * 50_000),
            "json": f"[{shard}, {number}]".encode(),
        }
        for number in range(size)
    ]
    for shard, size in enumerate(SIZES)
]


def reader_of(urls: list[str], access: AccessOptions, **options: Any) -> SampleReader:
    return SampleReader(urls, DatasetIndexes(urls, SIZES, access).read, access, **options)


def fields_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name[:2] != "__" or name == "__key__"}


@pytest.fixture(scope="module")
def shards(nginx: Nginx, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Write shards, and return their folder on the server and that of their indexes."""
    folder, indexes = nginx.files / "by-address", tmp_path_factory.mktemp("indexes")
    folder.mkdir()
    for number, samples in enumerate(SAMPLES):
        build_shard(folder / f"{number}.tar", samples)
    build_indexes([str(folder / f"{number}.tar") for number in range(3)], index_dir=indexes)
    return "by-address", indexes


def urls_of(port: int, folder: str = "by-address") -> list[str]:
    return [f"http://127.0.0.1:{port}/{folder}/{number}.tar" for number in range(3)]


def local_urls(nginx: Nginx) -> list[str]:
    return [f"{nginx.files}/by-address/{number}.tar" for number in range(3)]


def dataset(port: int, shards: tuple[str, Path], access: Any = None, **options: Any) -> IndexedSamples:
    """Return the samples of shards on a server, whose indexes have already been built."""
    folder, indexes = shards
    manifest = Manifest(build_indexes(urls_of(port, folder), index_dir=indexes))
    opened = AccessOptions(index_dir=indexes, **(access or {}))
    return IndexedSamples(manifest, access=opened, **{"order": "sequential", **options}).set_seed(5)


def large_shard(folder: Path, value: int) -> Path:
    """Write a shard of three parts; two of them are read ahead."""
    folder.mkdir(exist_ok=True)
    return Path(
        build_shard(
            folder / f"{value}.tar", [{"__key__": f"{n:03}", "bin": bytes([value]) * 50_000} for n in range(100)]
        )
    )


def large_dataset(port: int, folder: str, indexes: Path, cache_dir: Path | None = None) -> IndexedSamples:
    manifest = Manifest(build_indexes([f"http://127.0.0.1:{port}/{folder}/1.tar"], index_dir=indexes))
    access = AccessOptions(index_dir=indexes, cache_dir=cache_dir, read_ahead=4_200_000)
    return IndexedSamples(manifest, access=access, order="sequential")


EVERY = [(shard, number) for shard in range(3) for number in range(SIZES[shard])]


@pytest.mark.parametrize("is_remote", [False, True])
@settings(max_examples=25)
@given(
    wanted=st.lists(st.sampled_from(EVERY), max_size=60),
    open_shards=st.integers(1, 3),
    fields=st.sampled_from([None, ["json"], ["JPG"], ["no"]]),
    read_ahead=st.sampled_from([1, 300_000, 32 << 20]),
)
def test_samples_are_those_that_were_written(
    nginx: Nginx,
    shards: tuple[str, Path],
    is_remote: bool,
    wanted: list[tuple[int, int]],
    open_shards: int,
    fields: list[str] | None,
    read_ahead: int,
) -> None:
    urls = urls_of(nginx.http) if is_remote else local_urls(nginx)
    access = AccessOptions(index_dir=shards[1], open_shards=open_shards, read_ahead=read_ahead)
    with reader_of(urls, access, fields=fields) as reader:
        chunk: Any = np.array(wanted, int).reshape(-1, 2).T
        found: list[Any] = list(reader.stream([chunk]))
    names = None if fields is None else {"__key__", *(field.lower() for field in fields)}
    expected = [
        {name: value for name, value in SAMPLES[shard][number].items() if names is None or name in names}
        for shard, number in wanted
    ]
    assert [list(fields_of(sample).items()) for sample in found] == [list(sample.items()) for sample in expected]
    assert [sample["__url__"] for sample in found] == [urls[shard] for shard, _ in wanted]


def test_few_files_are_open_at_a_time_and_none_at_the_end(
    nginx: Nginx, shards: tuple[str, Path], nothing_left: None
) -> None:
    urls = local_urls(nginx)
    with reader_of(urls, AccessOptions(index_dir=shards[1], open_shards=2)) as reader:
        for shard in (0, 1, 2, 0, 2):
            assert len(list(reader.stream([(np.array([shard]), np.array([0]))]))) == 1
            found = [file.path for file in psutil.Process().open_files() if file.path.endswith(".tar")]
            assert len(found) <= 2
            assert urls[shard] in found


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "a.tar.gz", [{"__key__": "a", "cls": "1"}])
    with pytest.raises(UnsupportedSidecarError, match=naming("gzip")):
        list(IndexedSamples(Manifest(build_indexes([url]))))


def test_fields_of_an_index_that_keeps_capital_letters_are_matched_exactly(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "a.tar", [{"__key__": "a", "TXT": "one", "txt": "two"}])
    manifest = Manifest(build_indexes([url], options=IndexOptions(lowercase=False)))
    (sample,) = IndexedSamples(manifest, fields=["TXT"])
    assert fields_of(sample) == {"__key__": "a", "TXT": b"one"}


def test_neighbouring_samples_are_requested_at_once_and_several_requests_wait_for_the_server(
    proxy: FaultProxy, shards: tuple[str, Path]
) -> None:
    samples = dataset(proxy.port, shards)
    proxy.asked.clear()
    proxy.awaited = FIRST_THREADS  # no other is sent before the first answer
    proxy.met.clear()
    found = [fields_of(sample) for sample in samples]
    assert found == [sample for shard in SAMPLES for sample in shard]
    size = sum(len(sample["jpg"]) for shard in SAMPLES for sample in shard)
    # Each shard ends with a shorter request; none is sent to open it.
    assert len(proxy.asked) <= size // (512 << 10) + 3
    assert proxy.met.is_set()
    assert len(set(proxy.asked)) == len(proxy.asked)  # none is sent again after waiting in vain


SMALL: list[list[dict[str, Any]]] = [
    [{"__key__": f"{shard}-{n:04}", "txt": b"%d" % n} for n in range(2000)] for shard in range(2)
]


@pytest.fixture(scope="module")
def small_shards(nginx: Nginx) -> list[str]:
    """Write two shards of 2 MB."""
    folder = nginx.files / "small"
    folder.mkdir()
    return [build_shard(folder / f"{shard}.tar", samples) for shard, samples in enumerate(SMALL)]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_window_of_small_samples_is_read_in_long_pieces(
    proxy: FaultProxy, small_shards: list[str], is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = [f"http://127.0.0.1:{proxy.port}/small/{shard}.tar" for shard in range(2)]
    manifest = Manifest(build_indexes(remote if is_remote else small_shards, index_dir=tmp_path))
    sizes = [Path(url).stat().st_size for url in small_shards]
    read, spans = ShardRanges.read, list[int]()

    def count(ranges: ShardRanges, start: int, end: int, *sent: Any) -> bytes:
        spans.append(end - start)
        return read(ranges, start, end, *sent)

    monkeypatch.setattr(ShardRanges, "read", count)
    orders: tuple[Any, ...] = ("window", "global")
    for order in orders:
        for read_ahead, most in ((2 * sum(sizes) + 10_000, 1.0), (sum(sizes), 2.5)):
            access = AccessOptions(index_dir=tmp_path, read_ahead=read_ahead)
            samples = IndexedSamples(manifest, order=order, access=access).set_seed(3)
            spans.clear()
            found = sorted(map(fields_of, samples), key=lambda sample: str(sample["__key__"]))
            assert found == [*chain(*SMALL)]
            assert 0 < sum(spans) <= most * sum(sizes)  # all of a group, whose samples come from all shards
            assert len(spans) <= 60  # of 4,000 samples


def test_the_gaps_between_samples_of_a_request_are_not_held(
    proxy: FaultProxy, small_shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have many times as many bytes as the samples, and so exceed ``read_ahead``."""
    request, answers = RequestThreads.request, list[Future[Any]]()

    def recorded(threads: RequestThreads, send: Any) -> Future[Any]:
        answers.append(request(threads, send))
        return answers[-1]

    monkeypatch.setattr(RequestThreads, "request", recorded)
    manifest = Manifest(build_indexes([f"http://127.0.0.1:{proxy.port}/small/0.tar"], index_dir=tmp_path))
    access = AccessOptions(index_dir=tmp_path)
    found = list(IndexedSamples(manifest, order="sequential", select=slice(None, None, 20), access=access))
    assert [fields_of(sample) for sample in found] == SMALL[0][::20]
    assert len(answers) < 10
    assert sum(len(piece) for answer in answers for piece in answer.result()) <= 2 * len(found) * 1024


def test_a_forked_process_cannot_read_on_but_its_parent_can(
    proxy: FaultProxy, shards: tuple[str, Path], forked: Callable[..., int | None]
) -> None:
    samples = iter(dataset(proxy.port, shards, {"read_ahead": 300_000}))
    next(samples)

    def read_on() -> None:
        with pytest.raises(ShardError, match="cannot be read on in a forked process"):
            next(samples)

    assert forked(read_on) == 0
    assert len(list(samples)) == sum(SIZES) - 1


def test_read_ahead_limits_the_bytes_requested_ahead(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    large_shard(nginx.files / tmp_path.name, 1)
    manifest = Manifest(build_indexes([f"http://127.0.0.1:{proxy.port}/{tmp_path.name}/1.tar"], index_dir=tmp_path))
    access = AccessOptions(index_dir=tmp_path, read_ahead=1_000_000)
    orders: tuple[Any, ...] = ("sequential", "global")
    for order in orders:
        samples = IndexedSamples(manifest, order=order, access=access).set_seed(3)
        proxy.asked.clear()
        for done, _ in enumerate(samples, 1):
            ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "") for _, asked in proxy.asked]
            ahead = sum(int(each[2]) - int(each[1]) + 1 for each in ranges if each) - done * 50_000
            assert ahead < 2_500_000, (order, done)


@pytest.mark.parametrize("order", ["sequential", "global"])
def test_only_the_wanted_fields_are_requested(proxy: FaultProxy, shards: tuple[str, Path], order: str) -> None:
    samples = dataset(proxy.port, shards, fields=["json"], order=order)
    proxy.asked.clear()
    assert sorted(sample["json"] for sample in samples) == sorted(
        sample["json"] for shard in SAMPLES for sample in shard
    )
    ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "") for _, asked in proxy.asked]
    assert all(ranges)
    assert sum(int(each[2]) - int(each[1]) + 1 for each in ranges if each) < 50_000  # of 3.7 MB


@pytest.mark.usefixtures("pauses")
def test_reading_continues_after_connections_break(proxy: FaultProxy, shards: tuple[str, Path]) -> None:
    samples = dataset(proxy.port, shards)
    proxy.faults[:] = [None, None, *[Fault(at=100_000, how="reset"), Fault(status=503)] * 3]
    while proxy.faults:  # an epoch meets as many of them as it makes requests: that depends on which shard fails
        assert [fields_of(sample) for sample in samples] == [sample for shard in SAMPLES for sample in shard]


def test_a_shard_that_is_replaced_in_an_epoch_raises_and_no_sample_is_mixed(nginx: Nginx, tmp_path: Path) -> None:
    folder = nginx.files / tmp_path.name
    first = large_shard(folder, 1)
    samples = iter(large_dataset(nginx.http, tmp_path.name, tmp_path))
    found = [next(samples)]
    second = large_shard(folder, 2)
    os.utime(second, (1e9, 1e9))  # nginx derives the ETag from the size and the second of the last change
    second.replace(first)
    with pytest.raises(ChangedShardError, match="was replaced while it was read"):
        found.extend(samples)
    assert 0 < len(found) < 100
    assert all(sample["bin"] == bytes([1]) * 50_000 for sample in found)


def member(shards: tuple[str, Path], shard: int, number: int) -> range:
    """The bytes of the last field of a sample."""
    entry = read_index(f"{shards[1]}/{shard}.tar.wdsidx")[number].entries[-1]
    return range(entry.offset, entry.offset + entry.size)


def test_an_error_is_raised_at_its_sample_even_if_others_were_requested_with_it(
    proxy: FaultProxy, shards: tuple[str, Path]
) -> None:
    place = member(shards, 0, 20)
    passed = iter(dataset(proxy.port, shards))
    proxy.unreadable = {"/by-address/0.tar": place}
    assert [fields_of(next(passed)) for _ in range(20)] == SAMPLES[0][:20]
    with pytest.raises(ShardError, match=r"/by-address/0\.tar cannot be opened at byte \d+: HTTP status 410") as failed:
        next(passed)
    if hasattr(failed.value, "__notes__"):
        assert any("of the sample '0-20', at byte" in text for text in failed.value.__notes__)


def test_other_shards_are_requested_once_if_samples_cannot_be_read(proxy: FaultProxy, shards: tuple[str, Path]) -> None:
    def asked_for(shard: int) -> int:
        return sum(path == f"/by-address/{shard}.tar" for path, _ in proxy.asked)

    for order in ("sequential", "window"):
        options: dict[str, Any] = {"order": order, "remainder": "keep", "on_error": "skip"}
        samples = dataset(proxy.port, shards, **options)
        proxy.asked.clear()
        proxy.unreadable = {}
        whole = [fields_of(sample) for sample in samples]
        count = asked_for(2)
        samples = dataset(proxy.port, shards, **options)
        proxy.asked.clear()
        proxy.unreadable = {"/by-address/0.tar": range(member(shards, 0, 2).start, member(shards, 0, 25).stop)}
        found = [fields_of(sample) for sample in samples]
        lost = {f"0-{number:02}" for number in range(2, 26)}
        assert found == [sample for sample in whole if sample["__key__"] not in lost]
        assert asked_for(2) == count


def test_samples_are_read_from_copies_of_shards(proxy: FaultProxy, shards: tuple[str, Path], tmp_path: Path) -> None:
    for order in ("sequential", "window", "global"):
        samples = dataset(proxy.port, shards, {"cache_dir": tmp_path}, order=order)
        found = list(samples)
        assert {Path(sample["__local_path__"]).parent for sample in found} == {tmp_path}
        by_key = sorted(map(fields_of, found), key=lambda sample: str(sample["__key__"]))
        assert by_key == [sample for shard in SAMPLES for sample in shard]
    whole = [path for path, asked in proxy.asked if asked is None or asked.startswith("bytes=0-")]
    assert sorted(whole) == [f"/by-address/{number}.tar" for number in range(3)]


def test_samples_of_shards_that_do_not_fit_into_the_cache_are_requested(
    nginx: Nginx, shards: tuple[str, Path], tmp_path: Path
) -> None:
    sizes = [(nginx.files / "by-address" / f"{number}.tar").stat().st_size for number in range(3)]
    samples = dataset(nginx.http, shards, {"cache_dir": tmp_path, "cache_bytes": max(sizes) + 1})
    with pytest.warns(
        UserWarning, match=r"has no space for.* Raise the limit: max_bytes, or cache_bytes of"
    ):  # shards stay open
        found = list(samples)
    # Several are opened at once, so any of them may come first.
    cached = {int(sample["__key__"][0]) for sample in found if "__local_path__" in sample}
    requested = {int(sample["__key__"][0]) for sample in found if "__local_path__" not in sample}
    assert cached
    assert requested == {0, 1, 2} - cached != set()
    assert [fields_of(sample) for sample in found] == [sample for shard in SAMPLES for sample in shard]
    figures = samples.counters.figures()
    assert (figures["cache_hits"], figures["cache_misses"], figures["cache_misses_bytes"]) == (
        0,
        3,
        sum(sizes[number] for number in cached),
    )
    assert figures[f"fetched_bytes/http://127.0.0.1:{nginx.http}"] >= figures["cache_misses_bytes"]


def test_copies_that_are_no_longer_read_are_evicted_for_others(
    nginx: Nginx, shards: tuple[str, Path], tmp_path: Path
) -> None:
    sizes = [(nginx.files / "by-address" / f"{number}.tar").stat().st_size for number in range(3)]
    access = AccessOptions(index_dir=shards[1], cache_dir=tmp_path, cache_bytes=sizes[0] + sizes[2], read_ahead=1)
    wanted = ((0, range(30)), (2, range(10)), (2, range(10, 20)), (1, range(1)))
    chunks = [(np.full(len(numbers), shard), np.array(numbers)) for shard, numbers in wanted]
    with reader_of(urls_of(nginx.http), access) as reader:
        found: list[Any] = list(reader.stream(chunks))
    assert all("__local_path__" in sample for sample in found)  # and there was no warning


def test_a_cache_smaller_than_what_is_read_at_a_time_is_refused(
    nginx: Nginx, shards: tuple[str, Path], tmp_path: Path
) -> None:
    sizes = [(nginx.files / "by-address" / f"{number}.tar").stat().st_size for number in range(3)]
    needs = {"sequential": max(sizes), "window": sum(sizes) * 2 // 3, "global": sum(sizes)}
    for order, need in needs.items():
        options = {"order": order, "epoch": EpochOptions(window_shards=2)}
        dataset(nginx.http, shards, {"cache_dir": tmp_path, "cache_bytes": max(need, *sizes)}, **options)
        with pytest.raises(ValueError, match=r"cache_bytes=\d+ is too small: reading [123] of 3 shards"):
            dataset(nginx.http, shards, {"cache_dir": tmp_path, "cache_bytes": max(need, *sizes) - 1}, **options)


def test_epochs_keep_the_copies_that_they_still_need(nginx: Nginx, shards: tuple[str, Path], tmp_path: Path) -> None:
    sizes = [(nginx.files / "by-address" / f"{number}.tar").stat().st_size for number in range(3)]
    access = {"cache_dir": tmp_path, "cache_bytes": sum(sizes) - 1, "open_shards": 1}
    samples = dataset(nginx.http, shards, access)
    whole = [sample for shard in SAMPLES for sample in shard]
    hits = []
    for _ in range(3):
        before = samples.counters.figures()["cache_hits"]
        assert [*map(fields_of, samples)] == whole
        hits.append(samples.counters.figures()["cache_hits"] - before)
    assert hits == [0, 1, 1]  # the least recently used copy is always the one that is needed next


@pytest.mark.parametrize("fault", [Fault(at=1000, how="stall"), Fault(status=503, headers={"Retry-After": "30"})])
def test_closing_aborts_requests_and_leaves_no_thread(
    nginx: Nginx, proxy: FaultProxy, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_stores, "NEAR_S", -1.0)  # otherwise the server might be near
    before = set(threading.enumerate())
    large_shard(nginx.files / tmp_path.name, 1)
    samples = iter(large_dataset(proxy.port, tmp_path.name, tmp_path))
    proxy.faults[:], proxy.faults_from = [fault] * 100, 4_050_000
    assert len([*islice(samples, 41)]) == 41  # the first part, and the last one is requested
    while len(proxy.faults) == 100:
        time.sleep(0.01)
    del samples
    wait_for_read_ahead(before)


@pytest.mark.parametrize("fault", [None, Fault(at=1000, how="reset"), Fault(at=1000, how="close"), Fault(status=503)])
def test_requests_that_are_sent_together_are_each_answered_or_repeated(
    proxy: FaultProxy, shards: tuple[str, Path], fault: Fault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "together", 8)
    whole = sorted((sample for shard in SAMPLES for sample in shard), key=lambda sample: str(sample["__key__"]))
    proxy.faults[:] = [None, fault, None, fault, fault] * 4
    for order in ("global", "global"):  # the second time, with connections that are kept
        found = [fields_of(sample) for sample in dataset(proxy.port, shards, order=order)]
        assert sorted(found, key=lambda sample: str(sample["__key__"])) == whole


def test_a_near_store_is_read_over_few_connections(
    nginx: Nginx, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 64 hosts of 64 workers, each connection of a process is one of 4,096."""
    monkeypatch.setattr(known_stores, "NEAR_S", LIMIT_S)
    (folder := nginx.files / tmp_path.name).mkdir()
    build_shard(folder / "1.tar", [{"__key__": f"{n:04}", "bin": bytes(200_000)} for n in range(200)])
    close_idle()
    before = proxy.accepted
    samples = large_dataset(proxy.port, tmp_path.name, tmp_path)
    assert sum(1 for _ in samples) == 200
    assert proxy.accepted - before <= 1 + FIRST_THREADS * MAX_TOGETHER


@pytest.mark.parametrize(
    ("fault", "kind", "found"),
    [
        (Fault(no_range=True), ShardOpenError, "can only be read sequentially"),
        (Fault(path="/by-address/1.tar"), ChangedShardError, r"ends before byte \d+, where reading should continue"),
    ],
)
def test_the_first_range_shows_a_server_without_ranges_and_a_shorter_shard(
    proxy: FaultProxy, shards: tuple[str, Path], fault: Fault, kind: type[ShardError], found: str
) -> None:
    proxy.faults[:] = [fault] * 10
    proxy.asked.clear()
    counters = Counters()
    with reader_of(urls_of(proxy.port), AccessOptions(index_dir=shards[1]), counters=counters) as reader:
        (item,) = reader.stream([(np.array([0]), np.array([29]))])
    assert isinstance(item, kind)
    assert re.search(found, str(item))
    assert len(proxy.asked) == 2  # the sample is read once more, without others
    assert not [name for name in counters.figures() if name.startswith("retries")]


def test_a_shard_that_fails_to_open_ahead_of_an_epoch_is_opened_again(
    proxy: FaultProxy, shards: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it fails after the epoch has begun."""
    opened, begun, calls = OpenShards._open, threading.Event(), list[int]()

    def fail_once(shards: OpenShards, shard: int) -> ShardRanges:
        calls.append(shard)
        if len(calls) == 1:
            begun.wait()
            raise CacheError("there is no space yet")
        return opened(shards, shard)

    monkeypatch.setattr(OpenShards, "_open", fail_once)
    access = AccessOptions(index_dir=shards[1])
    with reader_of(urls_of(proxy.port), access) as reader:
        following = reader_of(urls_of(proxy.port), access)
        reader.shards.open_next(following.shards, [2], following.close)
        with following:
            following.shards.begin(Counters())
            begun.set()
            items = [*following.stream([(np.full(20, 2), np.arange(20))])]
    assert [fields_of(item) for item in items if isinstance(item, dict)] == SAMPLES[2]
    assert calls == [2, 2]


def test_two_threads_may_close_the_shards_of_the_next_epoch_at_the_same_time(
    proxy: FaultProxy, shards: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two shards of this epoch may lack the space that copies for the next epoch take."""
    with reader_of(urls_of(proxy.port), AccessOptions(index_dir=shards[1])) as reader:
        closed = list[int]()

        def close(shard: int, opened: Future[ShardRanges]) -> None:
            closed.append(shard)
            reader.shards.close()  # as another thread may do now
            opened.add_done_callback(close_result)

        monkeypatch.setattr("wds_datapipes.index.read.open_shards._close", close)
        reader.shards.open_soon([0, 1])
        reader.shards.close()
    assert closed == [0, 1]


@pytest.fixture
def crowded(nginx: Nginx, tmp_path: Path) -> Callable[[], SampleReader]:
    """Return a function that returns readers of three shards, whose common cache holds the first or the others."""
    folder = nginx.files / tmp_path.name
    folder.mkdir()
    build_indexes(write_numbered(folder, [100, 20, 20]))
    size = (folder / "0.tar").stat().st_size
    assert 2 * (folder / "1.tar").stat().st_size <= size
    access = AccessOptions(index_dir=folder, cache_dir=tmp_path / "copies", cache_bytes=size)
    urls = urls_of(nginx.http, folder.name)
    return lambda: SampleReader(urls, DatasetIndexes(urls, [100, 20, 20], access).read, access)


def test_threads_wait_until_another_one_has_closed_the_shards_of_the_next_epoch(
    crowded: Callable[[], SampleReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, one would find no space after another one has begun to make some, and warn."""
    full, warned, opened = threading.Semaphore(0), threading.Event(), CacheFolder.open

    def open_copy(*args: Any, **options: Any) -> BinaryIO | None:
        try:
            return opened(*args, **options)
        except CacheFullError:
            full.release()
            raise

    def close(_: int, ranges: Future[ShardRanges]) -> None:
        full.acquire(timeout=LIMIT_S)
        full.acquire(timeout=LIMIT_S)
        warned.wait(MOMENT_S)  # in vain
        ranges.add_done_callback(close_result)

    with crowded() as reader, crowded() as following:
        reader.shards.open_next(following.shards, [0], following.close)
        assert following.shards[0].path is not None
        monkeypatch.setattr(CacheFolder, "open", open_copy)
        monkeypatch.setattr(CacheFolder, "warn_uncached", lambda *_: warned.set())
        monkeypatch.setattr("wds_datapipes.index.read.open_shards._close", close)
        reader.shards.open_soon([1, 2])
        assert all(reader.shards[shard].path is not None for shard in (1, 2))
        monkeypatch.undo()
    assert not warned.is_set()


def test_shards_of_the_next_epoch_are_closed_before_the_end_of_this_one_or_not_at_all(
    crowded: Callable[[], SampleReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_threads, "GRACE_S", 0.0)
    begun, ended = threading.Event(), threading.Event()
    with crowded() as reader, crowded() as following:

        def close() -> None:
            begun.set()
            ended.wait(MOMENT_S)  # in vain
            following.close()

        reader.shards.open_next(following.shards, [0], close)
        assert following.shards[0].path is not None
        reader.shards.open_soon([1])
        assert begun.wait(LIMIT_S)
        reader.close()
        ended.set()
        assert following.shards.is_closed


def test_a_forked_process_can_close_shards_while_a_thread_of_its_parent_makes_space(
    crowded: Callable[[], SampleReader], forked: Callable[[Callable[[], object]], int | None]
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def close() -> None:
        begun.set()
        ended.wait(LIMIT_S)

    def close_in_child() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # ends the process if it waits
        reader.close()

    with crowded() as reader, crowded() as following:
        reader.shards.open_next(following.shards, [0], close)
        assert following.shards[0].path is not None
        reader.shards.open_soon([1])
        assert begun.wait(LIMIT_S)
        code = forked(close_in_child)
        ended.set()
    assert code == 0


def test_a_shard_for_which_there_is_no_space_when_its_reader_is_closed_is_no_reason_to_warn(
    crowded: Callable[[], SampleReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_threads, "GRACE_S", 0.0)
    full, closed, opened = threading.Event(), threading.Event(), CacheFolder.open

    def open_copy(*args: Any, **options: Any) -> BinaryIO | None:
        try:
            return opened(*args, **options)
        except CacheFullError:
            full.set()
            closed.wait(LIMIT_S)
            raise

    with crowded() as reader, crowded() as other:
        assert other.shards[0].path is not None
        monkeypatch.setattr(CacheFolder, "open", open_copy)
        reader.shards.open_soon([1])
        assert full.wait(LIMIT_S)
        reader.close()
        closed.set()
    for thread in threading.enumerate():
        if thread.name == "wds-open":
            thread.join(LIMIT_S)
    assert reader.shards.counters.figures()["cache_misses"] == 0


def test_a_shard_that_is_still_needed_is_not_closed_for_another(nginx: Nginx, shards: tuple[str, Path]) -> None:
    """Otherwise its copy could be evicted for that of the other one, and be downloaded again."""
    with reader_of(urls_of(nginx.http), AccessOptions(index_dir=shards[1], open_shards=2)) as reader:
        first, _ = reader.shards[0], reader.shards[1]
        reader.shards.open_soon([0, 2])
        assert reader.shards[0] is first


def test_a_server_that_never_answers_holds_up_only_its_own_samples(
    proxy: FaultProxy, shards: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", LIMIT_S)
    silent, released = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def release() -> None:
        while not proxy.asked:
            time.sleep(0.01)
        released.set()
        silent.close()

    # Nothing answers the handshake of TLS.
    urls = [f"https://127.0.0.1:{silent.getsockname()[1]}/0.tar", *urls_of(proxy.port)[1:]]
    access = AccessOptions(index_dir=shards[1], storage_options={"retries": 0, "timeout_s": LIMIT_S})
    with silent, ThreadPoolExecutor(1) as thread, reader_of(urls, access) as reader:
        thread.submit(release)
        found: list[Any] = []
        for item in reader.stream([(np.repeat([0, 2], 20), np.tile(np.arange(20), 2))]):
            assert released.is_set()
            found.append(item)
    assert all(isinstance(item, ShardOpenError) for item in found[:20])
    assert [*map(fields_of, found[20:])] == SAMPLES[2]


@given(st.lists(st.tuples(st.integers(0, 29), st.booleans()), min_size=1, max_size=40), st.integers(0, 39))
def test_a_request_reads_samples_of_one_group(
    nginx: Nginx, shards: tuple[str, Path], wanted: list[tuple[int, bool]], first: int
) -> None:
    numbers, groups = np.array([number for number, _ in wanted]), np.cumsum([begins for _, begins in wanted])
    url = local_urls(nginx)[0]
    requested = list[tuple[int, int]]()

    class Requests(RequestThreads):
        def request(self, send: Any) -> Future[Any]:
            requested.append((group, send.args[0]))
            return super().request(send)

    threads = Requests("wds-read-ahead")
    ranges, limits = ShardRanges(url, read_index(index_url(url, shards[1]))), DEFAULT_LIMITS
    plans = [plan_reading(ranges.index, numbers, groups=groups, limit=limit) for limit in (REMOTE, LOCAL)]
    planned = [
        PlannedRanges(ranges, plan, None if number else threads, is_ascending=False)
        for number, plan in enumerate(plans)
    ]
    for group in np.unique(groups).tolist():
        for _ in planned[0].request(group):
            pass
    plan = plans[0]
    # A request comes before those that only later samples need.
    due = dict.fromkeys((plan.groups[request], request) for request in (plan.requests[each] for each in plan.ranges))
    assert requested == [(group, plan.starts[plan.firsts[request]]) for group, request in due]
    for plan, own in zip(plans, planned, strict=True):
        samples = PlannedSamples(plan, own, ranges, limits, {}).assemble(min(first, len(numbers)))
        assert [*map(fields_of, samples)] == [SAMPLES[0][number] for number in numbers[first:].tolist()]
    threads.close()
    ranges.close()


def read_ahead_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    started = [thread for thread in threading.enumerate() if thread not in before]
    return [thread for thread in started if thread.name.startswith("wds-read-ahead")]


def wait_for_read_ahead(before: set[threading.Thread]) -> None:
    """Wait until all threads that read ahead have ended, except those of other tests."""
    while read_ahead_threads(before):
        gc.collect()
        time.sleep(0.01)


def test_threads_of_a_map_style_dataset_end_with_it(nginx: Nginx, shards: tuple[str, Path]) -> None:
    before = set(threading.enumerate())
    samples = dataset(nginx.http, shards).map_style()
    assert [fields_of(samples[number]) for number in range(SIZES[0])] == SAMPLES[0]
    assert read_ahead_threads(before)
    del samples
    wait_for_read_ahead(before)


def test_a_join_does_not_read_ahead_past_samples_without_a_counterpart(
    nginx: Nginx, shards: tuple[str, Path], tmp_path: Path
) -> None:
    url = build_shard(tmp_path / "0.tar", [{"__key__": key, "txt": "x"} for key in ("0-07", "alone")])
    build_indexes([url])
    sizes = list(zip(urls_of(nginx.http), SIZES, strict=True))
    remote = IndexedShards({"": sizes}, access=AccessOptions(index_dir=shards[1], read_ahead=1))
    samples = IndexedShards({"": [(url, 2)]}, join=[(remote, "keep")])
    wanted = [0, 0, *[1] * 9, 0, 1]
    asked = 0

    def chunks() -> Iterator[tuple[Any, Any]]:
        nonlocal asked
        for number in chain(wanted, repeat(1)):
            asked += 1
            assert asked < 100, "it reads ahead without a limit"
            yield np.array([0]), np.array([number])

    with DatasetReader(samples) as reader:
        items: list[Any] = list(islice(reader.stream(chunks()), len(wanted)))
    assert [item.get("json") for item in items] == [None if number else b"[0, 7]" for number in wanted]
    assert asked <= len(wanted) + 4


def test_shards_of_the_next_epoch_make_space_also_for_those_of_other_datasets(nginx: Nginx, tmp_path: Path) -> None:
    """A cache may hold the copies of several joined datasets."""
    folder = nginx.files / tmp_path.name
    folder.mkdir()
    lengths, keys, urls = (10_000, 50_000, 100_000), "aba", urls_of(nginx.http, folder.name)
    for number, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        build_shard(folder / f"{number}.tar", [{"__key__": key, f"{number // 2}.bin": bytes(length)}])
    build_indexes([str(folder / f"{number}.tar") for number in range(3)])
    size = sum((folder / f"{number}.tar").stat().st_size for number in (0, 2))
    access = AccessOptions(index_dir=folder, cache_dir=tmp_path / "copies", cache_bytes=size)
    joined = IndexedShards({"": [(urls[2], 1)]}, access=access)
    samples = IndexedShards({"": [(url, 1) for url in urls[:2]]}, join=[(joined, "keep")], access=access)
    first, second = ((np.array([shard]), np.array([0])) for shard in (0, 1))
    with DatasetReader(samples) as reader, DatasetReader(samples) as following:
        reader.open_next(following, first, Passes())
        (item,) = following.stream([first])
        assert isinstance(item, dict)
        assert {"0.bin", "1.bin"} <= item.keys()
        (item,) = reader.stream([second])
        assert isinstance(item, dict)
        assert "__local_path__" in item
        assert following.is_closed
