"""Shards written to a real S3 server: the contents of the store if writing is interrupted at any request."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from faults import FaultProxy
from web_server import serving

from wds_datapipes import ConvertedShard, JobOptions, ShardList, TarWriter, WriteOptions, convert_shards
from wds_datapipes.errors import ShardOpenError, ShardWriteError
from wds_datapipes.index import check_index, read_index
from wds_datapipes.io.output import upload
from wds_datapipes.io.output.sink import size_of
from wds_datapipes.parallel import executors
from wds_datapipes.testing import build_shard

#: The smallest part that S3 accepts; a larger shard is uploaded in several.
PART = 5 << 20

#: Called with each request, right before and right after the store executes it; before, it may refuse the request.
Act = Callable[[str, str], "bool | None"]


class Gate(FaultProxy):
    """Stands in front of the store, and acts on requests that change something."""

    act: Act

    def __init__(self, backend: tuple[str, int]) -> None:
        super().__init__(backend)
        #: The changes that were requested and executed.
        self.done: list[str] = []
        self.aborted = threading.Event()

    def refuses(self, method: str, path: str) -> bool:
        return bool((kind := change(method, path)) and self.act(kind, "before"))

    def answered(self, method: str, path: str) -> None:
        if kind := change(method, path):
            self.done.append(kind)
            if kind == "abort":
                self.aborted.set()
            self.act(kind, "after")


def change(method: str, path: str) -> str:
    """Describe what a request changes, if anything."""
    words = parse_qs(urlsplit(path).query, keep_blank_values=True).keys()
    for verb, word, kind in (
        ("POST", "uploads", "create"),
        ("PUT", "partNumber", "part"),
        ("POST", "uploadId", "complete"),
        ("DELETE", "uploadId", "abort"),
        ("PUT", "", "put"),
    ):
        if verb == method and (word in words or not word):
            return kind
    return ""


@pytest.fixture
def gate(s3_store: Any) -> Iterator[Gate]:
    with serving(Gate(("127.0.0.1", s3_store.port))) as gate:
        gate.act = lambda kind, moment: None
        yield gate


@pytest.fixture
def options(s3_store: Any, gate: Gate) -> dict[str, Any]:
    """The storage options of the store behind the gate."""
    found: dict[str, Any] = s3_store.options(gate.server_port)
    return found


@pytest.fixture
def bucket(s3_store: Any) -> Iterator[Any]:
    """The file system of the store without the gate, with an empty bucket and no unfinished upload."""
    filesystem = fsspec.filesystem("s3", **s3_store.options(), skip_instance_cache=True, use_listings_cache=False)
    assert uploads(filesystem) == []
    yield filesystem
    if uploads(filesystem):
        filesystem.clear_multipart_uploads("bucket")
    with suppress(FileNotFoundError):
        filesystem.rm("bucket/w", recursive=True)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(upload, "PART_BYTES", PART)


def uploads(bucket: Any) -> list[str]:
    """The uploads that were neither finished nor aborted."""
    with suppress(FileNotFoundError):  # this server's answer before the first one
        return sorted(upload["Key"] for upload in bucket.list_multipart_uploads("bucket"))
    return []


def shards(bucket: Any) -> dict[str, bytes]:
    """All objects and uploads of the store."""
    found = bucket.find("bucket/w")
    return {name.removeprefix("bucket/w/"): bucket.cat_file(name) for name in found}


def samples(megabytes: float, prefix: str = "") -> list[dict[str, Any]]:
    """Samples of one megabyte each."""
    rng = Random(megabytes)
    count = max(1, int(megabytes))
    return [{"__key__": f"{prefix}{n}", "bin": rng.randbytes(int(megabytes * 1e6 / count))} for n in range(count)]


def write(url: str, options: dict[str, Any], megabytes: float, error: type[BaseException] | None = None) -> None:
    with TarWriter(url, options=WriteOptions(storage_options=options)) as shard:
        for sample in samples(megabytes):
            shard.write(sample)
        if error is not None:
            raise error


# One shard


@pytest.mark.parametrize(("megabytes", "requests"), [(0.1, ["put"]), (12, ["create", *["part"] * 3, "complete"])])
def test_a_shard_appears_when_its_upload_is_finished(
    bucket: Any, gate: Gate, options: dict[str, Any], megabytes: float, requests: list[str]
) -> None:
    seen = []
    gate.act = lambda kind, moment: seen.append(shards(bucket).keys()) if moment == "before" else None
    write("s3://bucket/w/a.tar", options, megabytes)
    assert gate.done == requests
    assert seen == [set()] * len(requests)
    write("a.tar", {}, megabytes)
    with open("a.tar", "rb") as file:
        assert shards(bucket) == {"a.tar": file.read()}
    members = ShardList("s3://bucket/w/*.tar", storage_options=options).load_wds_shards(storage_options=options)
    assert [member.data for member in members] == [sample["bin"] for sample in samples(megabytes)]


@pytest.mark.parametrize(("megabytes", "error"), [(0.1, ZeroDivisionError), (12, KeyboardInterrupt)])
def test_an_error_leaves_nothing_in_the_store(
    bucket: Any, gate: Gate, options: dict[str, Any], megabytes: float, error: type[BaseException]
) -> None:
    write("s3://bucket/w/a.tar", options, 0.2)
    before = shards(bucket)
    gate.done.clear()
    with pytest.raises(error):
        write("s3://bucket/w/a.tar", options, megabytes, error)
    assert gate.done == (["create", "part", "part", "abort"] if megabytes > 1 else [])
    assert shards(bucket) == before
    assert uploads(bucket) == []


@pytest.mark.parametrize(
    ("megabytes", "refused", "number"),
    [(0.1, "put", 1), (12, "create", 1), (12, "part", 2), (12, "part", 3), (12, "complete", 1)],
)
def test_a_refused_request_leaves_nothing(
    bucket: Any, gate: Gate, options: dict[str, Any], megabytes: float, refused: str, number: int
) -> None:
    gate.act = lambda kind, moment: moment == "before" and kind == refused and gate.done.count(kind) >= number - 1
    with pytest.raises(ShardWriteError, match=r"s3://bucket/w/a\.tar cannot be written: permission denied") as caught:
        write("s3://bucket/w/a.tar", options, megabytes)
    assert options["secret"] not in "".join(traceback.format_exception(caught.value))
    assert gate.done.count("abort") == (refused in ("part", "complete"))
    assert bucket.find("bucket/w") == []
    assert uploads(bucket) == []


def test_a_lost_answer_to_a_finished_upload_is_no_error(bucket: Any, gate: Gate, options: dict[str, Any]) -> None:
    def lose_first(kind: str, moment: str) -> None:
        if (kind, moment, gate.done.count("complete")) == ("complete", "after", 1):
            raise ConnectionResetError

    gate.act = lose_first
    write("s3://bucket/w/a.tar", options, 12)
    assert gate.done.count("complete") == 2
    write("a.tar", {}, 12)
    assert shards(bucket) == {"a.tar": Path("a.tar").read_bytes()}
    assert uploads(bucket) == []


@pytest.mark.parametrize(("megabytes", "kind"), [(0.1, "put"), (12, "create"), (12, "part"), (12, "complete")])
def test_a_store_that_does_not_answer_is_given_up(
    bucket: Any, gate: Gate, options: dict[str, Any], megabytes: float, kind: str
) -> None:
    released = threading.Event()
    # Refused at the end, so that nothing happens after the test.
    gate.act = lambda found, moment: released.wait(600) if (found, moment) == (kind, "before") else None
    slow = {**options, "timeout_s": 0.1, "config_kwargs": {"read_timeout": 600}}
    try:
        with pytest.raises(ShardWriteError, match=r"s3://bucket/w/a\.tar cannot be written: .* within \d s, after"):
            write("s3://bucket/w/a.tar", slow, megabytes)
    finally:
        released.set()
    assert bucket.find("bucket/w") == []


# Many shards


def inputs() -> list[str]:
    """Two shards, of which the first is uploaded in three parts, and the other in one piece."""
    return [build_shard(f"{name}.tar", samples(size, name)) for name, size in (("a", 12), ("b", 0.2))]


def turned(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "bin": sample["bin"][::-1]}


def wanted() -> dict[str, bytes]:
    """The output of an undisturbed conversion to local files."""
    infos = [result.info for result in convert_shards(turned, inputs(), "wanted/", num_workers=0)]
    found = {}
    for info in infos:
        with open(info.url, "rb") as file:
            found[os.path.basename(info.url)] = file.read()
    return found


def convert(options: dict[str, Any], *, index: bool = False, **more: Any) -> list[ConvertedShard]:
    writing, job = WriteOptions(storage_options=options, index=index), JobOptions(journal="s.journal")
    return convert_shards(turned, ["a.tar", "b.tar"], "s3://bucket/w/", options=writing, job=job, **more)


def new(results: list[ConvertedShard]) -> list[str]:
    return [result.source for result in results if result.is_new]


def test_shards_are_converted_to_the_store(bucket: Any, gate: Gate, options: dict[str, Any]) -> None:
    expected = wanted()
    results = convert(options, index=True)
    assert [result.info.url for result in results] == ["s3://bucket/w/a.tar", "s3://bucket/w/b.tar"]
    found = shards(bucket)
    assert {name: found[name] for name in expected} == expected
    assert found.keys() == {*expected, "a.tar.wdsidx", "b.tar.wdsidx"}
    for name in expected:
        index = read_index(f"s3://bucket/w/{name}.wdsidx", storage_options=options)
        check_index(index, f"s3://bucket/w/{name}", storage_options=options)
    assert new(convert(options, index=True)) == []
    bucket.rm("bucket/w/b.tar")
    assert new(convert(options, index=True)) == ["b.tar"]
    assert shards(bucket) == found
    with pytest.raises(ShardOpenError, match=r"s3://bucket/w/a\.tar cannot be opened: permission denied") as caught:
        convert({**options, "secret": f"wrong{options['secret']}"})
    assert options["secret"] not in "".join(traceback.format_exception(caught.value))


def test_a_converting_process_aborts_its_upload_when_its_parent_is_killed(
    bucket: Any, gate: Gate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs()
    monkeypatch.setattr(executors, "SHUTDOWN_S", 600.0)  # which a busy machine may need
    process = multiprocessing.get_context("fork").Process(target=partial(convert, options, num_workers=1))

    def kill_and_hold(kind: str, moment: str) -> None:
        """Answer the first part only when the process, which notices the end of its parent, has aborted its upload."""
        if (kind, moment, gate.done) == ("part", "after", ["create", "part"]):
            os.kill(process.pid or 0, signal.SIGKILL)
            assert gate.aborted.wait(600)

    gate.act = kill_and_hold
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert gate.aborted.wait(600)
    assert gate.done == ["create", "part", "abort"]
    assert uploads(bucket) == []
    assert bucket.find("bucket/w") == []


def test_a_conversion_killed_at_any_request_that_writes_resumes(
    bucket: Any, gate: Gate, options: dict[str, Any], forked: Callable[[Callable[[], object]], int | None]
) -> None:
    expected = wanted()
    requests = ["create", *["part"] * 3, "complete", "put"]

    def convert_here() -> None:
        Path("pid").write_text(str(os.getpid()))
        convert(options, num_workers=0)

    def kill(kind: str, moment: str, done: list[str]) -> None:
        if gate.done == done and moment == ("after" if done else "before"):
            os.kill(int(Path("pid").read_text()), signal.SIGKILL)

    for number in range(len(requests) + 1):  # how many of them the store executes before the process is killed
        gate.act, gate.done = partial(kill, done=requests[:number]), []
        assert forked(convert_here) == -signal.SIGKILL
        assert gate.done[:number] == requests[:number]
        gate.act = lambda kind, moment: None
        there = shards(bucket)
        assert there == {name: expected[name] for name in there}  # each of them is whole
        # A process killed at the end of a shard could not record it in its journal.
        assert new(convert(options, num_workers=0)) == ["a.tar", "b.tar"][number > 5 :]
        assert shards(bucket) == expected
        bucket.rm("bucket/w", recursive=True)
        Path("s.journal").unlink()


def test_a_forked_process_closes_no_connection_of_its_parent(
    bucket: Any, gate: Gate, options: dict[str, Any], forked: Callable[[Callable[[], object]], int | None]
) -> None:
    async def collect() -> None:
        gc.collect()

    def collect_and_write() -> None:
        fsspec.asyn.sync(fsspec.asyn.get_loop(), collect)  # it closes everything that is not referenced
        write("s3://bucket/w/b.tar", options, 0.1)

    write("s3://bucket/w/a.tar", options, 0.1)
    assert forked(collect_and_write) == 0
    before = gate.heads
    assert size_of("s3://bucket/w/a.tar", options) == size_of("s3://bucket/w/b.tar", options)
    assert gate.heads == before + 2  # no request was repeated for want of a response
