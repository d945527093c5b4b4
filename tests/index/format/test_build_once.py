"""Indexes that several processes need at once are built by one of them, with progress, or by another if it dies."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from numbered_shards import write_numbered

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.index import AccessOptions, Manifest, build_indexes, index_url, read_index
from wds_datapipes.index.format.folder_lock import FOLDER_LOCK, lock_folder
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Sample

FORK = multiprocessing.get_context("fork")
COUNTS = [3, 1, 4, 2, 5]


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """Shards with different numbers of samples."""
    return write_numbered(tmp_path, COUNTS)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".tar")


def started(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a forked process that calls a function, and the receiver of its result or error."""
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(work())
        except Exception as error:
            sender.send(error)

    process = FORK.Process(target=run)
    process.start()
    sender.close()
    return process, receiver


def result_of(running: tuple[Any, Any]) -> Any:
    process, receiver = running
    with receiver:
        found = receiver.recv()
    process.join()
    process.close()
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_many_processes_read_each_shard_once(pattern: str, tmp_path: Path) -> None:
    barrier = FORK.Barrier(4)

    def columns(sample: Sample) -> dict[str, Any]:
        with (tmp_path / "read.log").open("a") as log:
            log.write(sample["__key__"] + "\n")
        return {"size": len(sample["cls"])}

    def build() -> list[bool]:
        barrier.wait()
        return [result.is_new for result in build_indexes(pattern, columns=columns, num_workers=2)]

    results = [result_of(each) for each in [started(build) for _ in range(4)]]
    assert [sum(is_new) for is_new in zip(*results, strict=True)] == [1] * len(COUNTS)
    read = (tmp_path / "read.log").read_text().split()
    assert len(read) == len(set(read)) == sum(COUNTS)
    assert files(tmp_path) == [*(f"{number}.tar.wdsidx" for number in range(len(COUNTS))), "read.log"]


def test_when_a_builder_is_killed_its_workers_end_and_another_process_continues(pattern: str, tmp_path: Path) -> None:
    pids, log, gate = tmp_path / "pids", tmp_path / "log", tmp_path / "gate"

    def columns(sample: Sample) -> dict[str, Any]:
        if sample["__key__"][0] in "01":
            with pids.open("a") as file:
                file.write(f"{os.getpid()}\n")
            wait_until(gate.exists)
        return {"size": len(sample["cls"])}

    def build() -> list[bool]:
        return [result.is_new for result in build_indexes(pattern, columns=columns, num_workers=2)]

    def build_and_log() -> list[bool]:
        logger = logging.getLogger("wds_datapipes")
        logger.addHandler(logging.FileHandler(log))
        logger.setLevel(logging.INFO)
        return build()

    first, receiver = started(build)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    second = started(build_and_log)
    wait_until(lambda: log.exists() and f"that builds indexes and has locked {tmp_path}" in log.read_text())
    assert not (tmp_path / "2.tar.wdsidx").exists()
    first.kill()
    first.join()
    receiver.close()
    gate.touch()
    assert all(result_of(second)[2:])  # the workers of the first may have finished their shards
    assert [len(read_index(f"{tmp_path}/{number}.tar.wdsidx")) for number in range(len(COUNTS))] == COUNTS
    assert not [name for name in files(tmp_path) if name.endswith((".lock", ".part"))]


def test_threads_wait_for_each_other_too(pattern: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: build_indexes(pattern, num_workers=1), range(4)))
    assert [sum(result.is_new for result in results) for results in zip(*found, strict=True)] == [1] * len(COUNTS)


def test_valid_indexes_need_neither_a_lock_nor_a_process(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_indexes(pattern)
    monkeypatch.delattr(os, "fork")
    with lock_folder(index_url(f"{tmp_path}/0.tar")) as has_waited:
        assert not has_waited
        assert not any(result.is_new for result in build_indexes(pattern))
        assert len(IndexedSamples(pattern)) == sum(COUNTS)
    assert not (tmp_path / FOLDER_LOCK).exists()


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A directory with a shard that a process without privileges can read, but not write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_shard(folder / "a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}])
        (folder / "a.tar").chmod(0o644)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


def unprivileged(work: Callable[[], Any]) -> Any:
    def run() -> Any:
        if os.getuid() == 0:
            os.setuid(65534)
        return work()

    return result_of(started(run))


def test_an_unwritable_directory_is_an_error_with_advice(read_only: Path, tmp_path: Path) -> None:
    url = f"{read_only}/a.tar"
    error = unprivileged(lambda: IndexedSamples(url))
    assert isinstance(error, MissingSidecarError)
    assert str(error) == (
        f"The directory {read_only} cannot be written, so indexes cannot be built there: Permission denied. For "
        "another directory, pass access=AccessOptions(index_dir=...)"
    )
    with tempfile.TemporaryDirectory() as other:
        Path(other).chmod(0o777)
        assert unprivileged(lambda: len(IndexedSamples(url, access=AccessOptions(index_dir=f"{other}/of/it")))) == 2
    (tmp_path / "file").touch()
    with pytest.raises(MissingSidecarError, match=r"/file cannot be written,.*: File exists.*index_dir="):
        IndexedSamples(url, access=AccessOptions(index_dir=tmp_path / "file"))


@pytest.fixture
def manifest(pattern: str) -> Manifest:
    """A manifest of shards without indexes."""
    found = Manifest(build_indexes(pattern))
    for url in found.urls:
        Path(index_url(url)).unlink()
    return found


def test_a_manifest_costs_no_access_until_a_sample_is_read(manifest: Manifest, tmp_path: Path) -> None:
    samples = IndexedSamples(manifest)
    assert len(samples) == sum(COUNTS)
    with pytest.raises(MissingSidecarError, match=r"\d\.tar\.wdsidx cannot be read: .* with build_indexes"):
        next(iter(samples))
    assert files(tmp_path) == []


def test_progress_is_logged_unless_nothing_is_built(
    pattern: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_datapipes.parallel.progress.LOG_PERIOD_S", 0)
    with caplog.at_level(logging.INFO, "wds_datapipes"):
        build_indexes(pattern, num_workers=1)
        build_indexes(pattern)
    lines = [re.sub(r"\d+ (s|min)\b", "T", line) for line in caplog.messages if line.startswith("Indexing")]
    expected = [f"Indexing: {count} of 5 shards" for count in range(1, 6)]
    assert lines == [*expected, "Indexing: did 5 of 5 shards in T"]


def test_no_bar_is_shown_without_rich(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)  # importing it raises then
    assert len(build_indexes(pattern, num_workers=1, progress=True)) == len(COUNTS)


@pytest.mark.parametrize("index_dir", [None, "indexes"])
def test_the_lock_of_a_killed_process_is_removed_although_all_indexes_are_valid(
    pattern: str, tmp_path: Path, index_dir: str | None
) -> None:
    folder = tmp_path if index_dir is None else tmp_path / index_dir
    options: dict[str, Any] = {} if index_dir is None else {"index_dir": folder}
    build_indexes(pattern, **options)
    (folder / FOLDER_LOCK).touch()
    assert not any(result.is_new for result in build_indexes(pattern, **options))
    assert not (folder / FOLDER_LOCK).exists()
    with lock_folder(index_url(f"{tmp_path}/0.tar", index_dir and folder)):
        build_indexes(pattern, **options)
        assert (folder / FOLDER_LOCK).exists(), "another process builds indexes"
