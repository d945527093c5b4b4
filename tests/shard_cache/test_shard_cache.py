"""Local copies of shards: fetched once, complete or absent, and within the limit of their total size."""

import contextlib
import errno
import hashlib
import io
import itertools
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from error_facts import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_datapipes import ShardList
from wds_datapipes.counters import Counters
from wds_datapipes.errors import CacheError, ShardOpenError, TruncatedShardError, WdsError
from wds_datapipes.index.format.manifest import Manifest
from wds_datapipes.io import daemon_threads
from wds_datapipes.io.file_lock import lock_file
from wds_datapipes.io.openers import open_url, register_opener
from wds_datapipes.io.part_share import CommonParts, PartShare
from wds_datapipes.io.prefetch import open_ahead
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.shard_cache import download
from wds_datapipes.shard_cache.cached_shards import CachedShard, cache_wds_shards, warm_cache
from wds_datapipes.shard_cache.download import CacheFullError, DownloadRequest
from wds_datapipes.shard_cache.entry import FOLDER_LOCK, Entry, entries
from wds_datapipes.shard_cache.eviction import Passes, reserve_space, used_bytes
from wds_datapipes.shard_cache.store import CacheFolder
from wds_datapipes.testing import build_shard
from wds_datapipes.types import ShardInfo

pytestmark = pytest.mark.usefixtures("nothing_left")


def wanted(url: str, size: int | None = None, sha256: str | None = None) -> DownloadRequest:
    return DownloadRequest(url, FileFacts(size), sha256, {})


def read(folder: CacheFolder, url: str, **known: Any) -> bytes:
    copy = folder.open(wanted(url, **known))
    assert copy is not None
    with copy:
        return copy.read()


def kept(folder: CacheFolder) -> dict[str, int]:
    """Return the existing copies by the end of their names, with their sizes."""
    return {each.path.name.partition("-")[2]: each.path.stat().st_size for each in entries(folder.path)}


def left_over(folder: CacheFolder) -> set[str]:
    """Return the files other than whole copies, their facts, and the lock of the folder."""
    names = {each.name for each in folder.path.iterdir()} - {"folder.lock"}
    for each in entries(folder.path):
        names -= {each.path.name, each.facts_path.name}
    return names


class Store:
    """A store in memory, whose shards have the scheme ``store:``."""

    def __init__(self) -> None:
        self.shards: dict[str, bytes] = {}
        self.opened: list[str] = []
        self.gate: Callable[[str], object] = lambda name: None

    def open(self, url: str, /, **_options: object) -> Any:
        name = url.removeprefix("store:")
        self.opened.append(name)
        if name not in self.shards:
            raise ShardOpenError(f"There is no {url}")
        self.gate(name)
        return io.BytesIO(self.shards[name])


@pytest.fixture
def store() -> Store:
    found = Store()
    register_opener("store", found.open, replace=True)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "copies")


def test_a_shard_is_fetched_once(folder: CacheFolder, store: Store) -> None:
    store.shards["a.tar"] = os.urandom(3_000_000)
    for _ in range(3):
        assert read(folder, "store:a.tar") == store.shards["a.tar"]
    assert store.opened == ["a.tar"]
    (entry,) = entries(folder.path)
    facts = entry.facts()
    assert facts is not None
    assert facts.url == "store:a.tar"
    assert facts.bytes == 3_000_000
    assert facts.sha256 == hashlib.sha256(store.shards["a.tar"]).hexdigest()
    assert left_over(folder) == set()


def test_downloads_of_a_process_share_their_parts(
    folder: CacheFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[PartShare] = []

    def recorded(url: str, max_bytes: int, share: PartShare, /, **options: Any) -> BinaryIO:
        shares.append(share)
        return open_ahead(url, max_bytes, share, **options)

    monkeypatch.setattr(download, "open_ahead", recorded)
    for name in "ab":
        store.shards[name] = b"content"
        read(folder, f"store:{name}")
    assert shares[0] is not shares[1]
    assert shares[0].common is shares[1].common


def test_a_forked_process_has_its_own_parts_which_all_of_its_threads_share(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    store.shards |= {"a": b"content", "b": b"content", "c": b"content"}
    found, barrier = list[CommonParts](), threading.Barrier(2)
    begin, begin_share = CommonParts.__init__, PartShare.__init__

    def begin_together(common: CommonParts, count: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            barrier.wait(60)
        begin(common, count)

    def record(share: PartShare, common: CommonParts) -> None:
        found.append(common)
        begin_share(share, common)

    monkeypatch.setattr(CommonParts, "__init__", begin_together)
    monkeypatch.setattr(PartShare, "__init__", record)
    read(CacheFolder(tmp_path / "a"), "store:a", size=7)

    def check() -> None:
        with ThreadPoolExecutor(2) as threads:
            deque(threads.map(lambda name: read(CacheFolder(tmp_path / name), f"store:{name}", size=7), "bc"), maxlen=0)
        parent, one, other = found
        assert one is other is not parent

    assert forked(check) == 0


def test_an_empty_shard_is_kept_too(folder: CacheFolder, store: Store) -> None:
    store.shards["a.tar"] = b""
    assert read(folder, "store:a.tar") == read(folder, "store:a.tar") == b""
    assert store.opened == ["a.tar"] * 2  # its size is unknown, so it is fetched once more


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/",
        "pipe:curl -H 'Authorization: secret' https://host",
        "s3://bucket/a\nsecret/..",
        "s3://bucket/" + "secret" * 100 + "/0.tar",
    ],
)
def test_names_of_copies_are_plain_and_contain_no_secret(tmp_path: Path, url: str) -> None:
    name = Entry.of(tmp_path, url).path.name
    assert re.fullmatch(r"[0-9a-f]{32}-[A-Za-z0-9._-]{1,80}", name)
    assert "secret" not in name


def read_copies(folder: CacheFolder, url: str, whole: bytes) -> None:
    for _ in range(5):
        with cast(BinaryIO, folder.open(wanted(url))) as copy:
            assert copy.read() == whole


def test_processes_fetch_a_shard_once_and_take_over_from_a_killed_one(folder: CacheFolder, tmp_path: Path) -> None:
    # The first process never finishes; the others fetch the remaining shards.
    command = (
        f"pipe:echo >> {tmp_path}/fetched; "
        f"if mkdir {tmp_path}/first 2> {tmp_path}/log; then echo $$ > {tmp_path}/pid; "
        f"printf part; sleep 600; fi; cat {tmp_path}/a.tar"
    )
    whole = Path(build_shard(tmp_path / "a.tar", [{"__key__": "a", "txt": "text"}])).read_bytes()
    forks = multiprocessing.get_context("fork")
    stuck, *others = (forks.Process(target=read_copies, args=(folder, command, whole)) for _ in range(5))
    stuck.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert stuck.is_alive()
        time.sleep(0.01)
    for other in others:
        other.start()
    stuck.kill()
    for process in (stuck, *others):
        process.join()
    assert [other.exitcode for other in others] == [0] * 4
    assert len((tmp_path / "fetched").read_text()) == 2
    assert left_over(folder) == set()


class Model:
    """Return the existing copies, least recently used first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.sizes: dict[str, int] = {}

    def use(self, name: str, size: int) -> None:
        if name not in self.sizes:
            if size > self.max_bytes:
                return
            while self.sizes and sum(self.sizes.values()) + size > self.max_bytes:
                del self.sizes[next(iter(self.sizes))]
        self.sizes[name] = self.sizes.pop(name, size)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    uses=st.lists(st.sampled_from("abcdef"), max_size=25),
    max_bytes=st.integers(1, 30_000),
    clock=st.lists(st.integers(0, 2**61), min_size=1),
)
def test_the_least_recently_used_copy_is_evicted_whatever_the_clock_says(
    tmp_path_factory: pytest.TempPathFactory, store: Store, uses: list[str], max_bytes: int, clock: list[int]
) -> None:
    folder = CacheFolder(tmp_path_factory.mktemp("copies"), max_bytes)
    store.shards = {name: os.urandom(1000 * 2**number) for number, name in enumerate("abcdef")}
    model = Model(max_bytes)
    times = itertools.cycle(clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: next(times))
        for name in uses:
            model.use(name, len(store.shards[name]))
            try:
                assert read(folder, f"store:{name}") == store.shards[name]
            except CacheFullError:
                assert len(store.shards[name]) > max_bytes
            assert kept(folder) == {name: model.sizes[name] for name in sorted(model.sizes)}
            assert used_bytes(folder.path) == sum(model.sizes.values()) <= max_bytes


def test_a_copy_gets_its_name_while_no_other_process_counts_the_sizes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.shards["a.tar"] = b"a" * 100
    folder, rename, locked = CacheFolder(tmp_path, max_bytes=100), Path.replace, list[bool]()

    def observed(source: Path, target: Path) -> Path:
        if target.name.endswith(".tar"):
            with lock_file(tmp_path / FOLDER_LOCK, wait=False, keep_file=True) as descriptor:
                locked.append(descriptor is None)
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", observed)
    assert read(folder, "store:a.tar") == store.shards["a.tar"]
    assert locked == [True]


def test_only_copies_and_downloads_count_while_a_copy_is_finished(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the facts being written would leave no space for another download in a cache of exactly two copies."""
    store.shards["a.tar"] = b"a" * 100
    rename, used = Path.replace, list[int]()

    def observed(source: Path, target: Path) -> Path:
        used.append(used_bytes(tmp_path))
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", observed)
    assert read(CacheFolder(tmp_path, max_bytes=100), "store:a.tar") == store.shards["a.tar"]
    assert used == [100, 100]  # when its facts and then the copy get their names


def hits_of_belady(uses: list[int], copies: int) -> int:
    """Return the maximum number of hits with any eviction order, given that all uses are known."""
    kept, hits = set[int](), 0
    for at, shard in enumerate(uses):
        hits += shard in kept
        if shard not in kept and len(kept) == copies:
            later = uses[at + 1 :]
            kept.remove(max(kept, key=lambda each: later.index(each) if each in later else len(uses)))
        kept.add(shard)
    return hits


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(passes=st.lists(st.permutations(range(6)), min_size=2, max_size=4), copies=st.integers(1, 6))
def test_a_pass_has_at_most_one_hit_less_than_with_all_uses_known(
    tmp_path_factory: pytest.TempPathFactory, store: Store, passes: list[list[int]], copies: int
) -> None:
    known, counters = Passes(), Counters()
    folder = CacheFolder(tmp_path_factory.mktemp("copies"), copies * 1024, priority=known.priority)
    store.shards = {str(shard): bytes(1024) for shard in range(6)}
    for each in passes:
        known.begin(folder.path)
        for shard in each:
            with cast(
                BinaryIO, folder.open(DownloadRequest(f"store:{shard}", FileFacts(1024), None, {"counters": counters}))
            ):
                pass
    uses = [shard for each in passes for shard in each]
    assert counters.figures()["cache_hits"] >= hits_of_belady(uses, copies) - (len(passes) - 1)


def test_copies_that_two_passes_did_not_use_are_evicted_first(folder: CacheFolder, store: Store) -> None:
    store.shards = {name: bytes(1024) for name in "wxyzabcd"}
    for name in "wxyz":  # of another dataset
        read(folder, f"store:{name}", size=1024)
    known = Passes()
    small = CacheFolder(folder.path, 4096, priority=known.priority)
    found = []
    for _ in range(3):
        known.begin(folder.path)
        for name in "abcd":
            read(small, f"store:{name}", size=1024)
        found.append("".join(sorted(kept(folder))))
    assert found == ["dxyz", "cdyz", "abcd"]


def test_copies_in_use_are_not_evicted(folder: CacheFolder, store: Store) -> None:
    store.shards = {name: name.encode() * 1000 for name in "abc"}
    small = CacheFolder(folder.path, 2500)
    first, second = (folder.open(wanted(f"store:{name}")) for name in "ab")
    assert first is not None
    assert second is not None
    with second:
        with first:
            with pytest.raises(CacheFullError):
                read(small, "store:c")
            assert kept(folder) == {"a": 1000, "b": 1000}
            assert read(folder, "store:c") == store.shards["c"]  # which has no limit
            assert first.read() == store.shards["a"]
        assert read(small, "store:c") == store.shards["c"]
    assert left_over(folder) == set()


def test_a_running_fetch_counts_with_its_whole_size(folder: CacheFolder, store: Store) -> None:
    store.shards = {"a": b"a" * 1000, "b": b"b" * 1000}
    begun, resume_from = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "a":
            begun.set()
            resume_from.wait(600)

    store.gate = hold
    small = CacheFolder(folder.path, 1500)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(small.open, wanted("store:a", size=1000))
        assert begun.wait(600)
        with pytest.raises(CacheFullError):
            read(small, "store:b", size=1000)
        resume_from.set()
        copy = first.result(60)
        assert copy is not None
        copy.close()
    assert read(small, "store:b", size=1000) == store.shards["b"]
    assert kept(small) == {"b": 1000}


def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.write(data)


DAMAGES: dict[str, Callable[[Entry], object]] = {
    "cut off": lambda entry: os.truncate(entry.path, 500),
    "longer": lambda entry: os.truncate(entry.path, 1500),
    "overwritten": lambda entry: overwrite(entry.path, b"b"),
    "nothing known": lambda entry: entry.facts_path.unlink(),
    "damaged facts": lambda entry: overwrite(entry.facts_path, b"["),
    "other facts": lambda entry: entry.facts_path.write_text('{"format": "other"}'),
    "facts that lack": lambda entry: entry.facts_path.write_text('{"format": "wds-datapipes copy", "version": 1}'),
    "a list": lambda entry: entry.facts_path.write_text("[]"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_copy_is_fetched_again(
    folder: CacheFolder, store: Store, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.shards["a"] = b"a" * 1000
    read(folder, "store:a")
    DAMAGES[kind](folder.entry("store:a"))
    assert read(folder, "store:a") == read(folder, "store:a") == store.shards["a"]
    assert store.opened == ["a", "a"]
    assert re.search(r"The copy \S+ is not used: .*\. Downloading it again", caplog.text)
    assert left_over(folder) == set()
    os.utime(folder.entry("store:a").path)  # it is compared by its digest
    assert read(folder, "store:a") == store.shards["a"]
    assert store.opened == ["a", "a"]


def test_a_reader_of_a_damaged_copy_keeps_its_data(folder: CacheFolder, store: Store) -> None:
    store.shards["a"] = b"a" * 1000
    copy = folder.open(wanted("store:a"))
    assert copy is not None
    with copy:
        folder.entry("store:a").facts_path.unlink()
        assert read(folder, "store:a") == store.shards["a"]
        assert copy.read() == store.shards["a"]
    assert store.opened == ["a", "a"]


def test_a_short_download_is_retried_once_and_then_reported(folder: CacheFolder, store: Store) -> None:
    store.shards["a"] = b"a" * 1000
    with pytest.raises(TruncatedShardError, match=naming("store:a", "1001 bytes", 1000)):
        read(folder, "store:a", size=1001)
    assert store.opened == ["a", "a"]
    assert kept(folder) == {}
    assert left_over(folder) == set()
    assert read(folder, "store:a", size=1000) == store.shards["a"]


@pytest.mark.parametrize("error", [ShardOpenError("gone"), KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_failed_fetch_leaves_nothing(folder: CacheFolder, store: Store, error: BaseException) -> None:
    class Failing(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, _: Any) -> int:
            raise error

    register_opener("failing", lambda url, /, **_options: Failing(), replace=True)  # type: ignore[arg-type]  # it reads
    with pytest.raises((KeyboardInterrupt, OSError)):
        read(folder, "failing:a")
    assert kept(folder) == {}
    assert left_over(folder) == set()


def test_an_unusable_folder_is_reported(tmp_path: Path, store: Store) -> None:
    store.shards["a"] = b"a"
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"The cache \S+file cannot be used: Not a directory"):
        read(CacheFolder(tmp_path / "file"), "store:a")
    with pytest.raises(CacheError, match=r"The cache \S+below cannot be used: Not a directory"):
        read(CacheFolder(tmp_path / "file" / "below"), "store:a")


def shards_of(source: list[str], folder: CacheFolder, prefetch: int = 1) -> Generator[str, None, None]:
    return cache_wds_shards(source, folder, prefetch=prefetch, known={})


def test_the_next_shards_are_fetched_while_one_is_open(folder: CacheFolder, store: Store) -> None:
    store.shards = {name: name.encode() * 1000 for name in "abcd"}
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(
            contextlib.closing(shards_of([f"store:{name}" for name in "abcd"], folder, prefetch=2))
        )
        first = next(found)
        assert store.opened == []
        with open_url(first) as stream:
            until(lambda: len(kept(folder)) == 3)
            assert stream.read() == store.shards["a"]
        assert store.opened == ["a", "b", "c"]
        with open_url(next(found)) as stream:
            assert stream.read() == store.shards["b"]
            until(lambda: len(kept(folder)) == 4)
    assert store.opened == ["a", "b", "c", "d"]
    assert left_over(folder) == set()


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_prefetched_copy_stays_until_it_is_read(folder: CacheFolder, store: Store) -> None:
    store.shards = {name: bytes(1024) for name in "abc"}
    small = CacheFolder(folder.path, 2048)
    with contextlib.closing(shards_of(["store:a", "store:b", "store:b"], small, prefetch=2)) as found:
        with open_url(next(found)):
            until(lambda: len(kept(folder)) == 2)
        read(small, "store:c")  # the copy of b is older than that of a was, and stays
        assert kept(folder).keys() == {"b", "c"}
        for url in found:
            with open_url(url):
                assert kept(folder).keys() == {"b", "c"}
    assert store.opened == ["a", "b", "c"]
    with cast(BinaryIO, small.open(wanted("store:a"))):
        assert kept(folder).keys() == {"a", "c"}  # nothing pins the copy any more


@pytest.mark.parametrize("warms_up", [False, True])
def test_an_interruption_stops_downloads_and_leaves_no_thread_and_no_partial_file(
    folder: CacheFolder, store: Store, monkeypatch: pytest.MonkeyPatch, warms_up: bool
) -> None:
    store.shards = {"a": b"a" * 1000, "b": b"b" * 5_000_000, "c": b"c" * 1000}
    begun, stopped = threading.Event(), threading.Event()
    stop = daemon_threads._stop_threads

    def stop_and_tell(*arguments: Any) -> None:
        stop(*arguments)
        stopped.set()

    def hold(name: str) -> None:
        if name == "b":
            begun.set()
            assert stopped.wait(600)

    monkeypatch.setattr(daemon_threads, "_stop_threads", stop_and_tell)
    monkeypatch.setattr(daemon_threads, "GRACE_S", 0 if warms_up else 600)
    store.gate = hold
    urls = [f"store:{name}" for name in "abc"]
    found: Any = warm_cache(folder, urls, known={}, options={}, at_once=1) if warms_up else shards_of(urls, folder)
    with contextlib.nullcontext() if warms_up else open_url(next(found)):
        assert not warms_up or next(found).bytes == 1000
        assert begun.wait(600)
        found.close()  # as Ctrl-C does
    assert warms_up or "wds-cache" not in threads()
    until(lambda: "wds-cache" not in threads())
    assert store.opened == ["a", "b"]
    assert kept(folder) == {"a": 1000}
    assert left_over(folder) == set()


def test_a_failed_prefetch_is_an_error_when_its_shard_is_read(folder: CacheFolder, store: Store) -> None:
    store.shards = {"a": b"a" * 1000, "c": b"c" * 1000}
    found = shards_of(["store:a", "store:b", "store:c"], folder, prefetch=2)
    with contextlib.closing(found):
        with open_url(next(found)):
            until(lambda: set(kept(folder)) == {"a", "c"})
        with pytest.raises(ShardOpenError, match="There is no store:b"):
            open_url(next(found))
        with open_url(next(found)) as stream:
            assert stream.read() == store.shards["c"]


def test_a_shard_that_does_not_fit_is_read_from_its_source_with_one_warning(tmp_path: Path, store: Store) -> None:
    store.shards = {"a": b"a" * 1000, "b": b"b" * 1000}
    small = CacheFolder(tmp_path / "copies", 999)
    with contextlib.closing(shards_of(["store:a", "store:b"], small)) as found:
        with pytest.warns(UserWarning, match=naming("store:a", "999 bytes")), open_url(next(found)) as stream:
            assert stream.read() == store.shards["a"]
        with open_url(next(found)) as stream:
            assert stream.read() == store.shards["b"]
    assert left_over(small) == set()


def test_a_shard_in_another_process_still_opens_its_copy(folder: CacheFolder, store: Store) -> None:
    store.shards = {"a": b"a" * 1000}
    (url,) = shards_of(["store:a"], folder)
    again = pickle.loads(pickle.dumps(url))
    assert isinstance(again, CachedShard)
    assert (again, again.local_path) == ("store:a", str(folder.entry("store:a").path))
    for each in (url, again):
        with open_url(each) as stream:
            assert stream.read() == store.shards["a"]
    assert store.opened == ["a"]


def test_only_urls_are_copied(folder: CacheFolder) -> None:
    with pytest.raises(TypeError, match="its source must yield str, not int: 5"):
        list(shards_of([5], folder))  # type: ignore[list-item]  # that is the point
    assert list(shards_of([Path("a.tar")], folder)) == ["a.tar"]  # type: ignore[list-item]  # as load_wds_shards takes


def test_old_stray_files_are_removed_and_copies_of_any_name_stay(tmp_path: Path) -> None:
    copies = [Entry.of(tmp_path, f"http://host/{name}") for name in ("a.tar", "b.json", "c.lock", "d.part")]
    strays = [tmp_path / f"{'0' * 32}.json", tmp_path / f"{'0' * 32}.json.7-ab.part"]
    for entry in copies:
        entry.path.write_bytes(b"12345")
        entry.facts_path.write_text("{}")
    foreign = tmp_path / "another.program.lock"
    for path in (*strays, foreign, *(entry.path for entry in copies)):
        path.touch()
        os.utime(path, (1, 1))
    assert reserve_space(tmp_path, None, 5, 25)
    assert not any(path.exists() for path in strays)
    assert foreign.exists()
    assert all(entry.path.exists() and entry.facts_path.exists() for entry in copies)
    assert reserve_space(tmp_path, None, 5, 20)
    assert sum(entry.path.exists() for entry in copies) == 3


def test_stray_facts_are_not_removed_while_those_of_a_new_copy_are_written(
    folder: CacheFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the shard would be downloaded again, with a warning."""
    store.shards["a.tar"] = b"content"
    facts, unlink = folder.entry("store:a.tar").facts_path, Path.unlink
    facts.parent.mkdir()
    facts.touch()
    os.utime(facts, (1, 1))
    thread = threading.Thread(target=read, args=(folder, "store:a.tar"), kwargs={"size": 7})

    def observed(path: Path, *args: Any, **options: Any) -> None:
        if path == facts and thread.ident is None:
            thread.start()
            thread.join(0.5)  # it waits
        unlink(path, *args, **options)

    monkeypatch.setattr(Path, "unlink", observed)
    assert reserve_space(folder.path, None, 0, 100)
    thread.join()
    assert read(folder, "store:a.tar", size=7) == b"content"
    assert store.opened == ["a.tar"]


PRESIGNED = {
    "S3": "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=k{n}%2Fs3&X-Amz-Date=2026{n}&X-Amz-Expires={n}&"
    "X-Amz-Security-Token=t{n}&X-Amz-SignedHeaders=host&X-Amz-Signature={n}",
    "S3, earlier": "AWSAccessKeyId=k{n}&Expires=17{n}&x-amz-security-token=t{n}&Signature=a{n}%3D",
    "Google": "X-Goog-Algorithm=a&X-Goog-Credential=k{n}&X-Goog-Date={n}&X-Goog-Expires={n}&X-Goog-Signature={n}",
    "Google, earlier": "GoogleAccessId=k&Expires={n}&Signature={n}",
    "Azure": "sp=r&st=2026{n}&se=2027{n}&spr=https&sv=2022-11-02&sr=b&sig={n}%3D",
    "Azure, delegated": "skoid=1&sktid=2&skt={n}&ske={n}&sks=b&skv=2022&sv=2022&st={n}&se={n}&sr=b&sp=r&sig={n}",
    "CloudFront": "Expires={n}&Signature={n}&Key-Pair-Id=K{n}",
    "CloudFront, with a policy": "Policy=p{n}&Signature={n}&Key-Pair-Id=K",
    "Alibaba": "OSSAccessKeyId=k&Expires={n}&Signature={n}",
}


@pytest.mark.parametrize("signature", PRESIGNED.values(), ids=PRESIGNED)
@pytest.mark.parametrize("rest", ["", "versionId=3", "part=1&se=2&sv=1&expires=3"])
def test_presigned_urls_of_a_shard_share_its_copy(tmp_path: Path, signature: str, rest: str) -> None:
    first, second = (f"https://host/a.tar?{signature.format(n=n)}" for n in (1, 2))
    names = {Entry.of(tmp_path, url).digest for url in ("https://host/a.tar", first, second)}
    assert len(names) == 1
    if rest.startswith("v"):
        names.add(Entry.of(tmp_path, f"{first}&{rest}").digest)
        names.add(Entry.of(tmp_path, f"https://host/a.tar?{rest}&{signature.format(n=3)}").digest)
    elif rest:  # parameters with such names are part of a signature only beside one
        names |= {Entry.of(tmp_path, f"https://host/a.tar?{rest}&x={n}").digest for n in range(2)}
        names.add(Entry.of(tmp_path, "https://host/a.tar?part=1&se=3&sv=1&expires=3&x=0").digest)
    assert len(names) == {"": 1, "v": 2, "p": 4}[rest[:1]]


def test_a_presigned_shard_is_fetched_once_and_compared_with_its_manifest(tmp_path: Path, store: Store) -> None:
    names = [f"a.tar?X-Amz-Date={number}&X-Amz-Signature={number}" for number in range(2)]
    store.shards.update(dict.fromkeys(names, Path(build_shard(tmp_path / "a.tar", [{"__key__": "a"}])).read_bytes()))
    manifest = Manifest([ShardInfo("store:a.tar", 1, 1024, "0" * 64)])
    for name in names:
        assert len(list(ShardList([f"store:{name}"]).cache_wds_shards(tmp_path / "copies").load_wds_shards())) == 0
    assert store.opened == names[:1]
    with pytest.raises(WdsError, match=r"1024 bytes|its SHA-256 is"):
        list(ShardList([f"store:{names[1]}"]).cache_wds_shards(tmp_path / "b", manifest=manifest).load_wds_shards())


def test_urls_that_a_function_names_alike_share_a_copy(tmp_path: Path, store: Store) -> None:
    shard = Path(build_shard(tmp_path / "a.tar", [{"__key__": "a", "txt": "a"}])).read_bytes()
    names = [f"a.tar?ticket={number}" for number in range(3)]
    store.shards.update(dict.fromkeys(names, shard))

    def read_all(**options: Any) -> list[str]:
        pipe = ShardList([f"store:{name}" for name in names]).cache_wds_shards(tmp_path / "copies", **options)
        return [sample["__key__"] for sample in pipe.load_wds_shards().group_samples()]

    assert read_all(url_to_name=lambda url: url.partition("?")[0]) == ["a"] * 3
    assert store.opened == names[:1]
    assert read_all() == ["a"] * 3
    assert store.opened == [names[0], *names]
    with pytest.raises(TypeError, match=naming("url_to_name", "None", "store:a.tar")):
        read_all(url_to_name=lambda url: None)
    with pytest.raises(TypeError, match=naming("url_to_name", "'a'")):
        read_all(url_to_name="a")


def test_a_lower_limit_holds_although_all_copies_exist(tmp_path: Path, store: Store) -> None:
    for number in range(4):
        name = f"{number}.tar"
        store.shards[name] = Path(build_shard(tmp_path / name, [{"__key__": name, "txt": "a"}])).read_bytes()
    size = len(store.shards["0.tar"])
    urls = [f"store:{name}" for name in store.shards]
    for most in (4, 2, 1):
        list(ShardList(urls).cache_wds_shards(tmp_path / "c", max_bytes=most * size, prefetch=0).load_wds_shards())
        assert used_bytes(tmp_path / "c") <= most * size


def test_a_failed_write_of_facts_leaves_nothing(
    folder: CacheFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.shards["a.tar"] = b"1234"
    real = Path.replace

    def replace(self: Path, target: Any) -> Any:
        if self.name.endswith(".json.part"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(CacheError, match="Input/output error"):
        read(folder, "store:a.tar", size=4)
    assert left_over(folder) == set()
