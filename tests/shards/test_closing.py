"""Every file, process and stream is closed when reading ends, fails or is abandoned."""

from __future__ import annotations

import errno
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec  # type: ignore[import-untyped]  # it carries no types
import psutil
import pytest
import zstandard
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ShardList, register_opener
from wds_datapipes.errors import MissingFieldError, ShardReadError, TruncatedShardError
from wds_datapipes.io import prefetch
from wds_datapipes.io.openers import open_url
from wds_datapipes.io.remote import known_stores, remote_parts
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.select import to_tuple
from wds_datapipes.shards.loading import TarOptions, load_wds_shards, read_shards
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("nothing_left")

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "zst": zstandard.ZstdCompressor().compress}
SOURCES = ["plain", "zst", "pipeline", "memory"]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """More than all buffers can hold, so that a command is still running after the first samples."""
    samples: list[dict[str, bytes | str]] = [
        {"__key__": str(number), "bin": bytes(100_000), "cls": b"1"} for number in range(30)
    ]
    return Path(build_shard(tmp_path_factory.mktemp("shard") / "x.tar", samples)).read_bytes()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BinaryIO]]:
    """The opened objects, which must all be closed at the end of the test, although they are referenced here."""
    streams: list[BinaryIO] = []

    def open_and_keep(url: str, **options: Any) -> BinaryIO:
        stream = open_url(url, **options)
        streams.append(stream)
        return stream

    for module in (prefetch, remote_parts):
        monkeypatch.setattr(module, "open_url", open_and_keep)
    yield streams
    assert streams
    assert all(stream.closed for stream in streams)


@pytest.fixture(params=SOURCES)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[bytes], str]]:
    """Puts an archive in a readable location, and returns its URL."""
    kind: str = request.param
    memory = fsspec.filesystem("memory")

    def put(content: bytes) -> str:
        path = tmp_path / "x.tar"
        path.write_bytes(COMPRESSIONS.get(kind, bytes)(content))
        if kind == "memory":
            memory.pipe("/x.tar", content)
            return "memory://x.tar"
        return f"pipe:cat {path} | cat | cat" if kind == "pipeline" else str(path)

    yield put
    memory.store.clear()


def test_reading_to_the_end(write: Callable[[bytes], str], opened: list[BinaryIO], archive: bytes) -> None:
    url = write(archive)
    for number, _ in enumerate(load_wds_shards([url, url])):
        assert sum(not stream.closed for stream in opened) == 1, "one shard is open at a time"
        assert number < 60 or opened[0].closed
    assert len(opened) == 2


def test_a_shard_that_fails(write: Callable[[bytes], str], opened: list[BinaryIO], archive: bytes) -> None:
    url = write(archive[:1_000_000])  # in the tenth sample
    with pytest.raises(TruncatedShardError):
        list(load_wds_shards([url]))
    assert len(list(group_samples(read_shards([url, url], TarOptions(on_error="skip"))))) == 2 * 9


def test_an_abandoned_pipeline(write: Callable[[bytes], str], opened: list[BinaryIO], archive: bytes) -> None:
    shards = IterableWrapper([write(archive)]).load_wds_shards(read_ahead=1)  # so that threads do not reach the end
    pipe = shards.group_samples().shuffle_samples(2).to_tuple("cls")
    for number in range(2):
        iterator = iter(pipe)
        assert list(itertools.islice(iterator, 3)) == [(b"1",)] * 3
        assert not opened[number].closed
        del iterator
        assert opened[number].closed


@pytest.mark.parametrize("open_shards", [1, 5])
def test_an_abandoned_iterator_leaves_no_thread_that_prefetches(
    archive: bytes, open_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_stores, "NEAR_S", -1.0)  # otherwise the store might be near
    memory = fsspec.filesystem("memory")
    urls = [f"memory://{number}.tar" for number in range(8)]
    for url in urls:
        memory.pipe(url.removeprefix("memory:/"), archive)
    members = load_wds_shards(urls, TarOptions(open_shards=open_shards, read_ahead=1 << 20))
    next(members)
    started = [thread for thread in threading.enumerate() if thread.name == "wds-read-ahead"]
    assert started
    members.close()  # type: ignore[attr-defined]  # it is a generator
    for thread in started:
        thread.join(20)  # a thread may not have noticed it yet on a busy machine
    assert not any(thread.is_alive() for thread in started)
    memory.store.clear()


def test_a_command_ends_with_all_its_children(opened: list[BinaryIO], archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(archive)
    others = psutil.Process().children(recursive=True)  # such as multiprocessing's resource tracker
    members = load_wds_shards([f"pipe:(cat {tmp_path}/x.tar; sleep 600) | cat"])
    next(members)
    processes = [process for process in psutil.Process().children(recursive=True) if process not in others]
    assert len(processes) >= 2
    del members
    _, alive = psutil.wait_procs(processes, timeout=600)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_an_error_of_a_stage_leaves_no_shard_open(archive: bytes, tmp_path: Path) -> None:
    """Even without garbage collection: an error must not be referenced by a frame of its own traceback."""
    path = tmp_path / "x.tar"
    path.write_bytes(archive)
    with pytest.raises(MissingFieldError):
        list(to_tuple(group_samples(read_shards([path])), ["jpg"]))
    assert str(path) not in {file.path for file in psutil.Process().open_files()}


class FailsToClose(io.BytesIO):
    def close(self) -> None:
        super().close()
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_fails_to_close_is_an_error_of_its_shard(tmp_path: Path) -> None:
    shard = Path(build_shard(tmp_path / "a.tar", [{"__key__": "a", "txt": "b"}])).read_bytes()
    register_opener("fails-to-close", lambda url, /, **options: FailsToClose(shard), replace=True)
    pipe = ShardList("fails-to-close:a.tar")
    with pytest.raises(ShardReadError, match=r"fails-to-close:a\.tar could not be read to its end: OSError"):
        list(pipe.load_wds_shards())
    assert [member.name for member in pipe.load_wds_shards(on_error="skip")] == ["a.txt"]
