"""Reading ahead changes no item or error, uses bounded memory, and ends its threads."""

from __future__ import annotations

import gc
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.io import prefetch
from wds_datapipes.io.remote import fsspec_file, known_stores, part_fetch, remote_parts
from wds_datapipes.io.urls import store_of
from wds_datapipes.shards.loading import TarOptions, load_wds_shards
from wds_datapipes.testing import build_shard

LIMIT_S, GRACE_S = 300.0, remote_parts.GRACE_S
KIB = 1 << 10
#: The number of samples in a shard, of 1 KiB each.
SIZES = {"a": 40, "b": 1, "c": 300, "d": 0, "e": 120}


class Watched(fsspec.AbstractFileSystem):  # type: ignore[misc]  # it carries no types
    """A store in memory that records what is read from it."""

    protocol = "watched"
    #: The files.
    files: dict[str, bytes] = {}  # noqa: RUF012  all instances are one store
    #: The number of bytes read from each file.
    read: dict[str, int] = {}  # noqa: RUF012  the same
    #: Files that cannot be read before their event is set.
    gates: dict[str, threading.Event] = {}  # noqa: RUF012  the same
    #: Files that cannot be opened before their event is set.
    doors: dict[str, threading.Event] = {}  # noqa: RUF012  the same

    def _open(self, path: str, *_args: Any, **_options: Any) -> WatchedFile:
        if path in Watched.doors:
            Watched.doors[path].wait(LIMIT_S)
        return WatchedFile(path)


class WatchedFile(io.BytesIO):
    def __init__(self, name: str) -> None:
        if name not in Watched.files:
            raise FileNotFoundError(name)
        super().__init__(Watched.files[name])
        self._name = name

    def read(self, size: int | None = -1, /) -> bytes:
        if self._name in Watched.gates:
            Watched.gates[self._name].wait(LIMIT_S)
        data = super().read(size)
        Watched.read[self._name] = Watched.read.get(self._name, 0) + len(data)
        return data

    def close(self) -> None:
        if self._name in Watched.gates:
            Watched.gates[self._name].set()
        super().close()


fsspec.register_implementation("watched", Watched, clobber=True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create shards in the store and on disk, and return their URLs; "x" is truncated, and "y" does not exist."""
    folder = tmp_path_factory.mktemp("shards")
    urls = {"y": "watched://y.tar"}
    for name, count in SIZES.items():
        path = build_shard(folder / f"{name}.tar", [{"__key__": f"{name}{n}", "bin": bytes(KIB)} for n in range(count)])
        Watched.files[f"{name}.tar"] = Path(path).read_bytes()
        urls[name], urls[name.upper()] = f"watched://{name}.tar", str(path)
    Watched.files["x.tar"] = Watched.files["e.tar"][:100_000]
    return {**urls, "x": "watched://x.tar"}


@pytest.fixture(autouse=True)
def no_thread_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote_parts, "GRACE_S", LIMIT_S)  # a busy machine may need it
    monkeypatch.setattr(known_stores, "NEAR_S", -1.0)  # otherwise the store might be near
    Watched.read.clear()
    Watched.gates.clear()
    Watched.doors.clear()
    yield
    until(lambda: not threads())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wds-read-ahead"]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ctrl_c_at_the_start_of_a_thread_leaves_none(shards: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "wds-read-ahead":
            signal.raise_signal(signal.SIGINT)

    for urls, open_shards in (([shards["c"]], 1), ([shards["b"], shards["c"]], 2)):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(load_wds_shards(urls, TarOptions(read_ahead=1, open_shards=open_shards)))
        until(lambda: not threads())


def outcome(urls: list[str], read_ahead: int, **options: Any) -> list[str]:
    """Return the names of the files, and the error that ended reading."""
    names: list[str] = []
    try:
        members = IterableWrapper(urls).load_wds_shards(read_ahead=read_ahead, **options)
        names.extend(f"{member.name} {len(member.data)}" for member in members)
    except Exception as error:
        names.append(f"{type(error).__name__}: {error}")
    return names


@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from("abcdexyABCDE"), max_size=8),
    read_ahead=st.sampled_from([1, 150_000, 400_000, 1 << 20, 32 << 20]),
    options=st.sampled_from([{"on_error": "raise"}, {"on_error": "skip"}, {"on_error": "skip", "open_shards": 3}]),
    near=st.sampled_from([(-1.0, 0.0), (LIMIT_S, 0.0), (LIMIT_S, LIMIT_S)]),  # never, until it takes time, and always
)
def test_reading_ahead_changes_no_item(
    shards: dict[str, str], names: list[str], read_ahead: int, options: dict[str, Any], near: tuple[float, float]
) -> None:
    urls = [shards[name] for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_stores, "NEAR_S", near[0])
        patch.setattr(prefetch, "MAX_DELAY_S", near[1])
        found = outcome(urls, read_ahead, **options)
    assert found == outcome(urls, 0, **options)
    assert not threads()


@settings(max_examples=30)
@given(
    names=st.lists(st.sampled_from("abceB"), min_size=1, max_size=6),
    read_ahead=st.sampled_from([1, 300_000, 1 << 20]),
    count=st.integers(0, 400),
    open_shards=st.sampled_from([1, 5]),
)
def test_all_threads_end_after_an_interruption(
    shards: dict[str, str], names: list[str], read_ahead: int, count: int, open_shards: int
) -> None:
    urls = IterableWrapper([shards[name] for name in names])
    samples = iter(urls.load_wds_shards(read_ahead=read_ahead, open_shards=open_shards).group_samples())
    for _ in zip(range(count), samples, strict=False):
        pass
    del samples
    assert not threads()


def test_a_thread_may_collect_the_iteration_that_it_reads_for(
    shards: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_garbage, failures = threading.Event(), list[object]()

    def collect(store: str) -> None:
        if store == store_of(shards["c"]):
            is_garbage.wait(LIMIT_S)
            gc.collect()

    def known(store: str) -> SimpleNamespace:
        return SimpleNamespace(note_answer=lambda _: collect(store))

    monkeypatch.setattr(known_stores, "NEAR_S", LIMIT_S)
    monkeypatch.setattr(remote_parts, "known_store", known)
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: failures.append(raised.exc_value))
    members = load_wds_shards([shards["a"], shards["c"]], TarOptions(read_ahead=1 << 20))
    next(members)
    until(lambda: "c.tar" in Watched.read)
    gc.disable()  # the main thread must not collect it first
    try:
        cycle: list[Any] = [members]
        cycle.append(cycle)
        del members, cycle
        is_garbage.set()
        until(lambda: not threads())
    finally:
        gc.enable()
    assert failures == []


def test_the_next_shard_is_read_while_one_is_used(shards: dict[str, str]) -> None:
    members = load_wds_shards([shards[name] for name in "acebB"], TarOptions(read_ahead=4 << 20))
    for name, following in itertools.pairwise("aceb"):
        assert next(members)[1][0] == name
        until(lambda awaited=f"{following}.tar": awaited in Watched.read)  # type: ignore[misc]  # it has a default
        for _ in range(SIZES[name] - 1):
            next(members)
    assert [member[1] for member in members] == ["b0.bin"] * 2


@pytest.mark.parametrize("open_shards", [1, 3])
def test_a_near_store_is_read_without_threads(
    shards: dict[str, str], monkeypatch: pytest.MonkeyPatch, open_shards: int
) -> None:
    def start(url: str, *options: Any) -> Any:
        started.append(url)
        return parts(url, *options)

    started: list[str] = []
    parts = remote_parts.RemoteParts
    monkeypatch.setattr(remote_parts, "RemoteParts", start)
    monkeypatch.setattr(known_stores, "NEAR_S", LIMIT_S)
    monkeypatch.setattr(prefetch, "MAX_DELAY_S", LIMIT_S)
    urls = [shards[name] for name in "ceab"]
    pipe = IterableWrapper(urls).load_wds_shards(open_shards=open_shards).group_samples()
    first = list(pipe)
    assert started == urls  # each shard counts as a store of its own
    assert list(pipe) == first
    assert started == urls
    monkeypatch.setattr(prefetch, "NEAR_BYTES_PER_S", float("inf"))
    monkeypatch.setattr(prefetch, "MAX_DELAY_S", 0.0)  # reading has taken longer
    assert list(pipe) == first
    assert started == urls * 2


@pytest.mark.parametrize("open_shards", [1, 4])
def test_open_shards_share_the_limit(shards: dict[str, str], monkeypatch: pytest.MonkeyPatch, open_shards: int) -> None:
    block = 1 << 14
    monkeypatch.setattr(part_fetch, "BLOCK_BYTES", block)
    monkeypatch.setattr(fsspec_file, "BLOCK_BYTES", block)
    limit = 500_000
    pipe = IterableWrapper([shards[name] for name in "cececece"]).load_wds_shards(
        open_shards=open_shards, read_ahead=limit
    )
    most = used = 0
    for sample in pipe.group_samples():
        used += len(sample["bin"]) + KIB  # with its headers
        while not most and sum(Watched.read.values()) - used < limit / 2:
            time.sleep(0.001)
        most = max(most, sum(Watched.read.values()) - used)
    # Besides the buffered blocks, each open shard and the next one have two blocks in flight, and its reader has some.
    assert limit / 2 <= most <= limit + 4 * block * (open_shards + 1)


def test_all_open_shards_are_read_at_the_same_time(shards: dict[str, str]) -> None:
    Watched.gates["a.tar"] = threading.Event()
    names = "ace"
    samples = iter(IterableWrapper([shards[name] for name in names]).load_wds_shards(open_shards=3).group_samples())
    thread = threading.Thread(target=next, args=(samples,))
    thread.start()
    until(lambda: {"c.tar", "e.tar"} <= Watched.read.keys())
    Watched.gates["a.tar"].set()
    thread.join()
    assert [sample["__key__"] for sample in itertools.islice(samples, 3)] == ["c0", "e0", "a1"]
    del samples


@pytest.mark.parametrize("waits", [True, False])
def test_a_source_of_local_files_is_not_read_ahead(
    shards: dict[str, str], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    asked, stream = list[str](), prefetch.PrefetchedStream
    doors = Watched.doors = {f"{name}.tar": threading.Event() for name in "ae"}

    def source() -> Iterator[str]:
        for name in "ABaCe":
            asked.append(name)
            yield shards[name]
            asked.append(name.lower())

    def open_stream(parts: Any, extend: Any, release: Any) -> Any:
        """Let the store answer while the reader waits, or else before it reads."""

        def extend_and_answer(has_to_wait: bool) -> None:
            extend(has_to_wait)
            doors["e.tar" if "e" in asked else "a.tar"].set()

        if not waits:
            extend_and_answer(False)
            until(lambda: parts.is_ready(1))
        return stream(parts, extend_and_answer, release)

    monkeypatch.setattr(prefetch, "PrefetchedStream", open_stream)
    found = [(name[0], "".join(asked)) for _, name, _, _ in load_wds_shards(source(), TarOptions(read_ahead=32 << 20))]
    assert dict(reversed(found)) == {"a": "A", "b": "AaB", "c": "AaBbaaC", "e": "AaBbaaCcee"}
    assert [seen for letter, seen in found if letter == "a"][-1] == "AaBbaaC"


def test_an_error_of_the_source_comes_after_the_shards_before_it(shards: dict[str, str]) -> None:
    def source() -> Iterator[str]:
        yield shards["a"]
        yield shards["b"]
        raise LookupError("the list ends here")

    members = load_wds_shards(source(), TarOptions(read_ahead=32 << 20))
    assert [next(members)[1][0] for _ in range(SIZES["a"] + SIZES["b"])] == ["a"] * SIZES["a"] + ["b"] * SIZES["b"]
    with pytest.raises(LookupError, match="the list ends here"):
        next(members)


def test_an_endless_source_is_read_only_as_far_as_needed(shards: dict[str, str]) -> None:
    def source() -> Iterator[str]:
        while True:
            yield shards["b"]

    members = load_wds_shards(source(), TarOptions(read_ahead=1 << 20))
    assert [name for _, (_, name, _, _) in zip(range(50), members, strict=False)] == ["b0.bin"] * 50
    members.close()  # type: ignore[attr-defined]  # it is a generator


def test_an_unresponsive_store_does_not_delay_the_end(shards: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_parts, "GRACE_S", GRACE_S)
    Watched.gates["c.tar"] = threading.Event()
    members = load_wds_shards([shards["a"], shards["c"]], TarOptions(read_ahead=1 << 20))
    next(members)
    until(lambda: len(threads()) == 1)  # that of the first has ended
    begun = time.monotonic()
    members.close()  # type: ignore[attr-defined]  # it is a generator
    assert time.monotonic() - begun < LIMIT_S / 2
    until(lambda: not threads())


def test_a_fork_leaves_the_threads_to_the_parent(shards: dict[str, str]) -> None:
    members = load_wds_shards([shards["c"], shards["e"]], TarOptions(read_ahead=100_000))
    next(members)
    child = os.fork()
    if not child:
        members.close()  # type: ignore[attr-defined]  # it is a generator
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(members)) == SIZES["c"] + SIZES["e"] - 1
