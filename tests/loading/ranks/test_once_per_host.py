"""The ranks of a host list a store and read indexes only once; an S3 server counts the requests."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from faults import fault_proxy
from forked_ranks import on_ranks, received, running_ranks
from sweeps import WHOLE
from torch import distributed as dist

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.errors import RankLostError, SpecError
from wds_datapipes.index import AccessOptions, Manifest, build_indexes, read_manifest, write_manifest
from wds_datapipes.io import once_per_host
from wds_datapipes.io.once_per_host import share_on_host
from wds_datapipes.testing import build_shard

SHARDS, SAMPLES, LIMIT_S = 3, 2, 300.0
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, in which ranks leave nothing."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(once_per_host, "VALID_S", float("inf"))  # however slow this machine is
    yield folder
    assert {path.name for path in folder.iterdir()} <= {f"wds-datapipes-{os.getuid()}"}  # copies of indexes


def serve(store: Any, folder: Path, connection: Any) -> None:
    """Fill a store, and count the requests to it."""
    options = {**store.options(), "skip_instance_cache": True}
    filesystem = fsspec.filesystem("s3", **options)
    for number in range(SHARDS):
        samples = [{"__key__": f"{number}-{sample}", "cls": "1"} for sample in range(SAMPLES)]
        filesystem.put(build_shard(folder / f"{number}.tar", samples), f"bucket/meet/{number}.tar")
    found = build_indexes(f"s3://bucket/meet/{{0..{SHARDS - 1}}}.tar", storage_options=options, num_workers=0)
    write_manifest(Manifest(found), "s3://bucket/meet/manifest.json", storage_options=options)
    with fault_proxy(("127.0.0.1", store.port)) as proxy, suppress(EOFError):
        connection.send(proxy.server_port)
        while connection.recv():
            connection.send(len(proxy.asked) + proxy.heads)


@pytest.fixture(scope="module")
def counted(s3_store: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Callable[[], int]]]:
    """The options of a store, and a function that returns the number of its requests.

    The store is another process, because ranks are forks, which may hang if their parent has threads.
    """
    import s3fs  # type: ignore[import-untyped]  # noqa: F401  before ranks are forked, which would all import it

    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(s3_store, tmp_path_factory.mktemp("meet"), theirs))
    process.start()
    theirs.close()

    def count() -> int:
        ours.send(True)
        return int(ours.recv())

    yield s3_store.options(ours.recv()), count
    process.kill()
    process.join()
    ours.close()


@pytest.mark.parametrize("source", ["list", "pattern", "manifest"])
def test_requests_of_a_host_do_not_grow_with_its_ranks(source: str, counted: tuple[Any, Callable[[], int]]) -> None:
    options, count = counted

    def start(rank: int) -> Any:
        if not dist.is_initialized():
            return read()
        dist.barrier()
        found = read()
        dist.barrier()  # a rank that ends removes its results, which others may not have read
        return found

    def read() -> Any:
        if source == "list":
            return [*ShardList("s3://bucket/meet/*.tar", storage_options=options)]
        shards: Any = "s3://bucket/meet/*.tar"
        if source == "manifest":
            shards = read_manifest("s3://bucket/meet/manifest.json", storage_options=options)
        samples = IndexedSamples(shards, global_batch_size=1, access=AccessOptions(storage_options=options))
        return len(samples), samples._shards.fingerprint()

    def requests(ranks: int) -> int:
        before = count()
        found = on_ranks(ranks, start)
        assert found == found[:1] * ranks
        return count() - before

    alone = requests(1)
    downloads = SHARDS if source == "pattern" else 0  # once on a host
    assert [requests(ranks) for ranks in ((4, 16) if WHOLE else (2, 8))] == [alone - downloads] * 2
    assert alone == {"list": 1, "pattern": 1 + 3 * SHARDS, "manifest": 1}[source]


def results_of(spoil: Callable[[], object], folder: Path, ranks: int = 3) -> list[Any]:
    """Return what the ranks receive if the first owner of a result fails: the process that computed it, or an error."""

    def compute(_: Any) -> list[int]:
        with (folder.parent / "owners").open("a") as file:
            file.write("x")
            file.flush()
            if file.tell() == 1:
                spoil()
        return [os.getpid()]

    others = FORK.Barrier(ranks - 1)

    def ask(rank: int) -> Any:
        dist.barrier()
        try:
            found = share_on_host("counts", compute)[0]
        except SpecError as error:
            return str(error)
        others.wait(LIMIT_S)  # a result is removed with its owner
        return found

    with running_ranks(ranks, ask) as running:
        found = [received(rank.results) for rank in running]
        for rank in running:
            rank.process.join()
        return found


def pid_of(_: Any) -> int:
    return os.getpid()


def count_together(_: int) -> int:
    dist.barrier()  # a rank that ends earlier would break the connections that others are making
    return share_on_host("counts", pid_of)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise SpecError("nothing matches")


@pytest.mark.parametrize("spoil", [kill, fail])
def test_when_a_rank_dies_or_fails_another_one_takes_over(spoil: Any, results: Path) -> None:
    found = results_of(spoil, results)
    failed = [each for each in found if isinstance(each, str)]
    assert failed == ["nothing matches" if spoil is fail else "ended without a result"]
    assert len({each for each in found if each not in failed}) == 1


@pytest.mark.usefixtures("results")
def test_a_file_of_another_user_is_not_read() -> None:
    turns = FORK.Barrier(2)

    def ask(rank: int) -> Any:
        dist.barrier()
        if rank:
            os.getuid = lambda: -1
            turns.wait(LIMIT_S)
        found = share_on_host("counts", pid_of)
        if not rank:
            turns.wait(LIMIT_S)
        turns.wait(LIMIT_S)  # a result is removed with its owner
        return found

    assert len({*on_ranks(2, ask)}) == 2


def test_a_rank_that_is_stopped_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, ticks = results.with_name("stopped"), itertools.count(0, 200)
    clock = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: next(ticks) if stopped.exists() else 0)
    monkeypatch.setattr(once_per_host, "time", clock)

    def stop(progress: Any) -> None:
        progress(None)
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    def ask(rank: int) -> Any:
        dist.barrier()
        with pytest.raises(RankLostError) as caught:
            share_on_host("counts", stop)
        return str(caught.value)

    with running_ranks(3, ask) as running:
        ready = wait([rank.results for rank in running], LIMIT_S)
        told = [rank.results for rank in running if rank.results in ready]
        assert re.fullmatch(
            r"This rank waits for rank \d, process \d+, which counts for all ranks of this host, without progress for "
            r"300 s. End it, or choose a longer timeout of the group",
            received(told[0]),
        )
    (file,) = results.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    os.utime(file, (0, 0))
    assert len({*on_ranks(2, count_together)}) <= 2  # removes what a killed run has left


def test_a_result_requested_again_is_computed_again(results: Path) -> None:
    log = results.with_name("log")

    def read(_: Any) -> list[str]:
        return log.read_text().split()

    def program(rank: int) -> Any:
        if rank == 0:
            log.write_text("a")
            assert share_on_host("reads", read) == ["a"]
            log.write_text("a b")
        dist.barrier()
        found = share_on_host("reads", read)
        with FORK.Pool(1) as pool:  # has the connection of its rank
            pid = pool.apply(share_on_host, ("counts", pid_of))
        return found, pid == os.getpid()

    assert on_ranks(3, program) == [(["a", "b"], False)] * 3


def test_without_a_folder_for_temporary_files_each_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert len({*on_ranks(3, count_together)}) == 3
