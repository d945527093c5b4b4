"""Indexes that several processes need at once: built by one of them, with progress, and by another if it dies."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pty
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import ChangedShardError, MissingSidecarError
from wds_datapipes.index import AccessOptions, Manifest, build_indexes, index_url, read_index
from wds_datapipes.index.build_many import FOLDER_LOCK, lock_folder
from wds_datapipes.parallel.progress import ProgressMeter
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Sample

FORK = multiprocessing.get_context("fork")
COUNTS = [3, 1, 4, 2, 5]


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """Shards with different numbers of samples."""
    for number, count in enumerate(COUNTS):
        samples = [{"__key__": f"{number}-{sample}", "txt": f"{sample}"} for sample in range(count)]
        build_shard(tmp_path / f"{number}.tar", samples)
    return f"{tmp_path}/{{0..{len(COUNTS) - 1}}}.tar"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".tar")


class Running:
    """A forked process that calls a function, and sends its result and its log."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._receiver, sender = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._run, args=(work, sender))
        self.process.start()
        sender.close()

    @staticmethod
    def _run(work: Callable[[], Any], sender: Any) -> None:
        class Sending(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                sender.send(record.getMessage())

        logger = logging.getLogger("wds_datapipes")
        logger.addHandler(Sending())
        logger.setLevel(logging.INFO)
        try:
            sender.send((work(),))
        except Exception as error:
            sender.send((error,))

    def line(self) -> str:
        """Wait for the next line of the log."""
        found = self._receiver.recv()
        assert isinstance(found, str), found
        return found

    def result(self) -> Any:
        while isinstance(found := self._receiver.recv(), str):
            pass
        self.process.join()
        self.close()
        return found[0]

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._receiver.close()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_many_processes_read_each_shard_once(pattern: str, tmp_path: Path) -> None:
    barrier = FORK.Barrier(4)

    def columns(sample: Sample) -> dict[str, Any]:
        with (tmp_path / "read.log").open("a") as log:
            log.write(sample["__key__"] + "\n")
        return {"size": len(sample["txt"])}

    def build() -> list[bool]:
        barrier.wait()
        return [result.is_new for result in build_indexes(pattern, columns=columns, num_workers=2)]

    results = [each.result() for each in [Running(build) for _ in range(4)]]
    assert [sum(is_new) for is_new in zip(*results, strict=True)] == [1] * len(COUNTS)
    read = (tmp_path / "read.log").read_text().split()
    assert len(read) == len(set(read)) == sum(COUNTS)
    assert files(tmp_path) == [*(f"{number}.tar.wdsidx" for number in range(len(COUNTS))), "read.log"]


def test_when_the_builder_is_killed_another_process_continues(pattern: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def columns(sample: Sample) -> dict[str, Any]:
        if sample["__key__"] == "2-1":
            wait_until(gate.exists)
        return {"size": len(sample["txt"])}

    def build() -> list[bool]:
        return [result.is_new for result in build_indexes(pattern, columns=columns, num_workers=1)]

    with closing(Running(build)) as first:
        wait_until((tmp_path / "1.tar.wdsidx").exists)
        second = Running(build)
        assert second.line() == (
            f"Waiting for another process, which builds indexes and has locked {tmp_path / FOLDER_LOCK}"
        )
        assert not (tmp_path / "2.tar.wdsidx").exists()
        first.kill()
    gate.touch()
    assert second.result() == [False, False, True, True, True]
    assert [len(read_index(f"{tmp_path}/{number}.tar.wdsidx")) for number in range(len(COUNTS))] == COUNTS
    assert files(tmp_path) == [*(f"{number}.tar.wdsidx" for number in range(len(COUNTS))), "gate"]


def test_when_a_parallel_builder_is_killed_its_workers_end_and_another_process_continues(
    pattern: str, tmp_path: Path
) -> None:
    pids, gate = tmp_path / "pids", tmp_path / "gate"

    def columns(sample: Sample) -> dict[str, Any]:
        with pids.open("a") as log:
            log.write(f"{os.getpid()}\n")
        wait_until(gate.exists)
        return {}

    def build() -> list[bool]:
        return [result.is_new for result in build_indexes(pattern, columns=columns, num_workers=2)]

    with closing(Running(build)) as first:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        second = Running(build)
        second.line()
        first.kill()
    gate.touch()
    assert all(second.result()[2:])
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

    return Running(run).result()


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out(read_only: Path, tmp_path: Path) -> None:
    url = f"{read_only}/a.tar"
    error = unprivileged(lambda: IndexedSamples(url))
    assert isinstance(error, MissingSidecarError)
    assert str(error) == (
        f"The directory {read_only} cannot be written, so indexes cannot be built there: Permission denied. Pass "
        "another directory for indexes, index_dir="
    )
    with tempfile.TemporaryDirectory() as other:
        Path(other).chmod(0o777)
        assert unprivileged(lambda: len(IndexedSamples(url, access=AccessOptions(index_dir=f"{other}/of/it")))) == 2
    (tmp_path / "file").touch()
    with pytest.raises(MissingSidecarError, match=r"/file cannot be written,.*: File exists.* index_dir="):
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


@pytest.mark.parametrize("count", [2, 4])
def test_a_shard_with_another_count_than_its_manifest_says_is_an_error(
    manifest: Manifest, tmp_path: Path, count: int
) -> None:
    build_indexes([build_shard(tmp_path / "0.tar", [{"__key__": f"{n}", "txt": "new"} for n in range(count)])])
    samples = IndexedSamples(manifest, order="sequential")
    expected = rf"0\.tar\.wdsidx has {count} samples, and the dataset was opened with 3.*write the manifest again"
    with pytest.raises(ChangedShardError, match=expected):
        next(iter(samples))


def test_progress_is_logged_with_the_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_datapipes.parallel.progress.LOG_PERIOD_S", 0)
    logger = logging.getLogger("wds_datapipes")
    with caplog.at_level(logging.INFO, "wds_datapipes"), ProgressMeter("Indexing", 4, logger=logger) as meter:
        for _ in range(3):
            meter.add(shards=1, samples=5, size=100)
    assert [re.sub(r"\d+ (s|min)\b", "T", line) for line in caplog.messages] == [
        "Indexing: 1 of 4 shards, T left",
        "Indexing: 2 of 4 shards, T left",
        "Indexing: 3 of 4 shards, T left",
        "Indexing: did 3 of 4 shards in T",
    ]


def test_nothing_is_logged_when_nothing_is_built(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "wds_datapipes"):
        build_indexes(pattern)
        build_indexes(pattern)
    [line] = [line for line in caplog.messages if " did " in line]  # none for indexes that are valid
    assert line.startswith("Indexing: did 5 of 5 shards in ")


@pytest.mark.parametrize(("progress", "has_rich"), [(True, True), (False, True), (True, False)])
def test_a_terminal_has_a_bar_if_rich_is_installed(pattern: str, progress: bool, has_rich: bool) -> None:
    def slow(sample: Sample) -> dict[str, Any]:
        time.sleep(0.05)
        return {}

    pid, terminal = pty.fork()
    if pid == 0:
        code = 70
        try:
            sys.stderr = os.fdopen(2, "w")
            os.environ.update(TERM="xterm", COLUMNS="150")
            if not has_rich:
                sys.modules["rich.console"] = None  # type: ignore[assignment]  # importing it raises then
            build_indexes(pattern, columns=slow, num_workers=1, progress=progress)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    shown = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (b"Indexing" in shown) is (b"3/5" in shown) is (progress and has_rich)
