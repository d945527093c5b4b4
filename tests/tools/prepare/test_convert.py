"""Converting many shards in parallel: the output, failures, and the effect of a second call."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from readers import keys_in

import wds_datapipes
from wds_datapipes import ConvertedShard, JobOptions, WriteOptions, convert_shards
from wds_datapipes.errors import ConversionError, EncodeError, ShardWriteError, StateError, WorkerDiedError
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("folder")
Forked = Callable[[Callable[[], object]], int | None]


@pytest.fixture
def shards() -> list[str]:
    """Six shards of five samples."""
    return [build(number) for number in range(6)]


def build(number: int, samples: int = 5, size: int = 100) -> str:
    rng = Random(number)
    return build_shard(
        f"{number}.tar",
        [
            {"__key__": f"{number}-{n}", "cls": str(n), "bin": rng.randbytes(rng.randrange(size))}
            for n in range(samples)
        ],
    )


def odd(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if int(sample["cls"]) % 2 else None


def same(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def written(folder: str = "out") -> dict[str, str]:
    """Return the digests of all shards in a folder, and of other files left there."""
    return {
        name: hashlib.sha256(Path(folder, name).read_bytes()).hexdigest()
        for name in sorted(os.listdir(folder))
        if not name.endswith(".journal")
    }


def new(results: Iterable[ConvertedShard]) -> list[str]:
    return [result.source for result in results if result.is_new]


def noted(name: str) -> int:
    """Record a call, and return the number of calls so far."""
    with open(name, "a") as file:
        file.write(".")
    return os.path.getsize(name)


# Output


def test_a_function_returns_a_sample_or_none_or_several(shards: list[str]) -> None:
    def convert(sample: dict[str, Any]) -> Any:
        number = int(sample["cls"])
        several = ({"__key__": f"{sample['__key__']}-{n}", "cls": n} for n in range(number))
        return [None, sample, [sample], several, ()][number]

    results = convert_shards(convert, shards, "out/")
    for number, result in enumerate(results):
        assert result.source == f"{number}.tar"
        assert (result.info.url, result.info.samples, result.read, result.is_new) == (f"out/{number}.tar", 5, 5, True)
        assert keys_in(result.info.url) == [f"{number}-{n}" for n in ("1", "2", "3-0", "3-1", "3-2")]
        assert result.info.sha256 == written()[f"{number}.tar"]
        assert result.info.bytes == os.path.getsize(result.info.url)


def test_a_function_of_whole_shards_gets_all_samples_of_one(shards: list[str]) -> None:
    def last_first(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        found = list(samples)
        yield {"__key__": f"all-{len(found)}", "txt": found[0]["__url__"]}
        yield from reversed(found)

    results = convert_shards(last_first, shards, "out/", whole_shards=True)
    assert [result.read for result in results] == [5] * 6
    assert keys_in("out/4.tar") == ["all-5", "4-4", "4-3", "4-2", "4-1", "4-0"]


def test_archives_without_end_markers_are_converted_on_request(folder: Path) -> None:
    build_shard("a.tar", [{"__key__": "a", "cls": "1"}])
    Path("a.tar").write_bytes(Path("a.tar").read_bytes()[:1024])
    with pytest.raises(ConversionError, match="without the two blocks of zeros"):
        convert_shards(odd, "a.tar", "out/", num_workers=0, job=JobOptions(retries=0))
    [shard] = convert_shards(odd, "a.tar", "out/", num_workers=0, job=JobOptions(end_marker="optional"))
    assert (shard.read, shard.info.samples) == (1, 1)
    with pytest.raises(ValueError, match='end_marker must be "required", "optional" or "final", not'):
        convert_shards(odd, "a.tar", "out/", job=JobOptions(end_marker="none"))  # type: ignore[arg-type]


def test_a_shard_without_samples_is_written_too(shards: list[str]) -> None:
    results = convert_shards(lambda sample: sample if sample["__key__"][0] == "3" else None, shards, "out/")
    assert [result.info.samples for result in results] == [0, 0, 0, 5, 0, 0]
    assert len(written()) == 6
    assert keys_in("out/") == [f"3-{n}" for n in range(5)]
    assert new(convert_shards(lambda sample: sample if sample["__key__"][0] == "3" else None, shards, "out/")) == []


@pytest.mark.parametrize("whole_shards", [False, True])
def test_a_function_that_drops_everything_warns(shards: list[str], whole_shards: bool) -> None:
    def forgets_to_return(sample: Any) -> Any:
        return filter(lambda each: False, sample) if whole_shards else None

    warning = r"The function dropped all 30 samples, which leaves 6 new shards without any.* return the sample"
    with pytest.warns(UserWarning, match=warning):
        convert_shards(forgets_to_return, shards, "out/", whole_shards=whole_shards)
    assert new(convert_shards(forgets_to_return, shards, "out/", whole_shards=whole_shards)) == []


def test_old_shards_are_removed_only_if_they_are_numbered(shards: list[str]) -> None:
    with pytest.raises(ValueError, match=r"Surplus shards .* only if .* numbered, but 'out/\{name\}' has no"):
        convert_shards(lambda sample: sample, shards, "out/", job=JobOptions(remove_old=True))


# A second call


@pytest.mark.usefixtures("nothing_left")
def test_a_second_call_writes_only_missing_shards(shards: list[str]) -> None:
    told: list[ConvertedShard] = []
    assert new(convert_shards(odd, shards[:4], "out/", on_result=told.append)) == shards[:4]
    assert sorted(result.source for result in told) == shards[:4]
    before = written()
    os.unlink("out/1.tar")
    os.truncate("out/2.tar", 100)
    second = convert_shards(odd, shards, "out/", on_result=told.append)
    assert new(second) == ["1.tar", "2.tar", "4.tar", "5.tar"]
    assert [result.source for result in second] == shards
    assert [result.info.samples for result in second] == [2] * 6
    assert {name: written()[name] for name in before} == before
    # Shards finished earlier are reported first, each once.
    assert [result.source for result in told[4:6]] == ["0.tar", "3.tar"]
    assert len(told) == 4 + 6
    assert new(convert_shards(odd, shards, os.path.abspath("out/"))) == []  # the same folder under a different name


@pytest.mark.parametrize(
    ("change", "text", "redone"),
    [
        ("options", r"0\.tar \(another function or other options\)", range(6)),
        ("input", r"with other inputs or options: 2\.tar \(the input has changed\)\. To conv", [2]),
    ],
)
def test_shards_made_differently_are_redone(shards: list[str], change: str, text: str, redone: Any) -> None:
    convert_shards(odd, shards, "out/")
    before = written()
    if change == "input":
        build(2, samples=9)

    def call(if_changed: Any) -> list[ConvertedShard]:
        return convert_shards(
            odd, shards, "out/", if_changed=if_changed, options=WriteOptions(mtime=7 if change == "options" else 0)
        )

    with pytest.raises(StateError, match=text):
        call("raise")
    assert new(call("keep")) == []
    assert written() == before
    assert new(call("redo")) == [shards[number] for number in redone]
    assert [name for name, digest in written().items() if digest != before[name]] == [shards[n] for n in redone]
    assert new(call("raise")) == []


def test_a_missing_input_is_reported_and_its_output_stays(shards: list[str]) -> None:
    convert_shards(odd, shards, "out/")
    before = written()
    os.unlink("3.tar")
    with pytest.raises(StateError, match=r"3\.tar \(the input has changed\)"):
        convert_shards(odd, shards, "out/")
    with pytest.raises(ConversionError, match=r"1 of 6 shards .*\n3\.tar: ShardOpenError"):
        convert_shards(odd, shards, "out/", if_changed="redo", job=JobOptions(retries=0))
    assert written() == before
    assert new(convert_shards(odd, shards, "out/", if_changed="keep")) == []


@pytest.mark.usefixtures("nothing_left")
def test_two_conversions_do_not_share_a_journal(shards: list[str]) -> None:
    def conflict(_: ConvertedShard) -> None:
        with pytest.raises(StateError, match="another process is writing these shards"):
            convert_shards(odd, shards, "out/")

    assert len(convert_shards(odd, shards, "out/", on_result=conflict)) == 6


def test_a_journal_of_a_writer_is_not_mistaken_for_one_of_a_conversion(shards: list[str]) -> None:
    with wds_datapipes.ShardWriter("s-%d.tar", resume=True) as writer:
        writer.write({"__key__": "a", "cls": 1})
    with pytest.raises(StateError, match="journal"):
        convert_shards(odd, shards, "s-%d.tar")


# Failures


def fail_at_3(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] == "3-2":
        noted("tries")
        raise LookupError("no such label")
    return sample


@pytest.mark.usefixtures("nothing_left")
def test_failed_shards_are_retried_and_reported_and_the_others_written(
    shards: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConversionError, match=r"1 of 6 shards .* 4 attempts.*\n3\.tar: LookupError: ") as caught:
        convert_shards(fail_at_3, shards, "out/", job=JobOptions(retries=3))
    assert noted("tries") == 4 + 1
    assert {url: str(error) for url, error in caught.value.failures.items()} == {"3.tar": "no such label"}
    assert caught.value.__cause__ is caught.value.failures["3.tar"]
    if sys.version_info >= (3, 11):
        assert caught.value.__cause__.__notes__ == ["in the sample '3-2' of 3.tar"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert sorted(written()) == ["0.tar", "1.tar", "2.tar", "4.tar", "5.tar"]
    # Fixing the function changes it.
    assert new(convert_shards(same, shards, "out/", if_changed="keep")) == ["3.tar"]


class Odd(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unpicklable_error_is_reported(shards: list[str], workers: int) -> None:
    def fail(sample: dict[str, Any]) -> None:
        raise Odd(1, 2)

    # In a process that has imported Dask, tblib also pickles such errors.
    text = r"6 of 6 .*\n\d\.tar: (RuntimeError: )?Odd: 1 and 2\n\d\.tar: "
    with pytest.raises(ConversionError, match=text):
        convert_shards(fail, shards, "out/", job=JobOptions(retries=0), num_workers=workers)
    assert written() == {}


@pytest.mark.parametrize(
    ("function", "options", "error", "text"),
    [
        (lambda sample: 7, {}, TypeError, r"in the sample '0-0' of 0\.tar it returned int"),
        (lambda sample: [sample, "a"], {}, TypeError, r"it returned str"),
        (lambda sample: b"x", {}, TypeError, r"it returned bytes"),
        (lambda samples: [1], {"whole_shards": True}, TypeError, r"must yield samples, but it yielded int"),
        (lambda sample: {**sample, "cls": None}, {}, EncodeError, r"field 'cls' of sample '0-0'"),
        (lambda sample: sample["jpg"], {}, KeyError, "jpg"),
        (lambda sample: {"__key__": "a/../b", "cls": 1}, {}, EncodeError, r"a/\.\./b"),
    ],
)
def test_errors_of_the_function_are_not_retried(
    shards: list[str],
    function: Any,
    options: dict[str, Any],
    error: type[BaseException],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConversionError, match=f"(?s)1 of 1 shard could not be converted\\. .*{text}") as caught:
        convert_shards(function, shards[:1], "out/", job=JobOptions(retries=3), num_workers=0, **options)
    assert not caplog.records
    assert type(caught.value.failures["0.tar"]) is error
    assert written() == {}


def test_bad_samples_are_skipped_on_request(shards: list[str]) -> None:
    def convert(sample: dict[str, Any]) -> Any:
        number = int(sample["cls"])
        if number == 1:
            raise LookupError("no such label")
        return [sample, {**sample, "__key__": f"{sample['__key__']}x", "cls": None}] if number == 2 else sample

    data = Path(shards[5]).read_bytes()
    Path(shards[5]).write_bytes(data[: len(data) // 2])
    results = convert_shards(convert, shards, "out/", on_error="skip")
    assert [(result.read, result.skipped) for result in results[:5]] == [(5, 2)] * 5
    assert results[5].skipped == sum(number in (1, 2) for number in range(results[5].read)) + 1  # the rest of the shard
    again = convert_shards(convert, shards, "out/", on_error="skip")
    assert again == [result._replace(is_new=False) for result in results]
    assert keys_in("out/0.tar") == ["0-0", "0-3", "0-4"]
    assert keys_in("out/5.tar") == [key for key in keys_in("out/5.tar") if key[:3] in ("5-0", "5-3", "5-4")]
    with pytest.raises(ConversionError, match=r"5\.tar: TruncatedShardError"):
        convert_shards(same, shards, "whole/", job=JobOptions(retries=0))


@pytest.mark.usefixtures("nothing_left")
def test_only_the_shard_that_kills_its_process_is_reported(shards: list[str]) -> None:
    def die(sample: dict[str, Any]) -> dict[str, Any]:
        noted(f"tries-{sample['__key__'][0]}")
        if sample["__key__"] in ("1-0", "4-2"):
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with pytest.raises(ConversionError, match=r"(?s)2 of 6 .*killed") as caught:
        convert_shards(die, shards, "out/", job=JobOptions(retries=2), num_workers=3)
    assert {url: type(error) for url, error in caught.value.failures.items()} == {
        "1.tar": WorkerDiedError,
        "4.tar": WorkerDiedError,
    }
    assert [noted(f"tries-{n}") - 1 for n in range(6)] == [5, 3, 5, 5, 9, 5]


@pytest.mark.usefixtures("nothing_left")
def test_a_full_disk_loses_no_finished_shard(forked: Forked) -> None:
    sizes = [100, 100_000, 100, 100_000]
    shards = [build(number, size=size) for number, size in enumerate(sizes)]
    convert_shards(same, shards, "wanted/")
    failures = {}

    def on_a_small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            convert_shards(same, shards, "out/", job=JobOptions(retries=1))
        except ConversionError as error:
            failures.update({url: type(cause) for url, cause in error.failures.items()})
            os._exit(0 if failures == {"1.tar": ShardWriteError, "3.tar": ShardWriteError} else 1)

    assert forked(on_a_small_disk) == 0
    assert sorted(written()) == ["0.tar", "2.tar"]
    assert new(convert_shards(same, shards, "out/")) == ["1.tar", "3.tar"]
    assert written() == written("wanted")


# Termination


def working(sample: dict[str, Any]) -> dict[str, Any]:
    """Record which process works, kill the main one at some sample, and return a sample that reveals errors."""
    Path("pids", str(os.getpid())).touch()
    with open("begun", "ab") as begun:
        begun.write(b"x")
    main, last = map(int, Path("main").read_text().split())
    if os.path.getsize("begun") >= last:
        with contextlib.suppress(ProcessLookupError):  # the other process was faster
            os.kill(main, signal.SIGKILL)
    threading.Event().wait(0.002)
    return {"__key__": sample["__key__"], "txt": hashlib.sha256(sample["bin"]).hexdigest()}


def convert_until_killed(shards: list[str], samples: int) -> None:
    """Convert shards, and get killed when this number of further samples have begun."""
    Path("new").write_text(f"{os.getpid()} {os.path.getsize('begun') + samples}")
    os.rename("new", "main")
    convert_shards(working, shards, "out/", num_workers=2)


def wait_until_ended(pids: Iterable[str]) -> None:
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.01)


@pytest.mark.usefixtures("nothing_left")
def test_a_conversion_killed_at_random_moments_resumes_to_the_same_bytes(forked: Forked) -> None:
    shards = [build(number, samples=25) for number in range(8)]
    os.mkdir("pids")
    Path("begun").touch()
    Path("main").write_text(f"0 {sys.maxsize}")
    convert_shards(working, shards, "wanted/")
    assert os.listdir("pids") != []
    rng = Random(os.getpid())
    ends = []
    for _ in range(2):
        # Processes of the previous call may still be running, and do not interfere.
        ends.append(forked(functools.partial(convert_until_killed, shards, rng.randrange(1, 75))))
        for shard in Path("out").glob("*.tar"):
            assert shard.read_bytes() == Path("wanted", shard.name).read_bytes()  # each of them is complete
        if ends[-1] == 0:
            break
    wait_until_ended(os.listdir("pids"))
    assert ends[0] == -signal.SIGKILL
    Path("main").write_text(f"0 {sys.maxsize}")
    convert_shards(working, shards, "out/")
    assert written() == written("wanted")  # and nothing remains next to them


class Finalized:
    """An object whose removal loses an exception that ends the process."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __del__(self) -> None:
        Path(f"waits-{self.key}").touch()
        threading.Event().wait(60)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exit_exception_that_python_has_dropped_is_raised_again(shards: list[str]) -> None:
    def stuck(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"][0] != "0":
            Finalized(sample["__key__"])
            threading.Event().wait(60)
        return sample

    def refuse(result: ConvertedShard) -> None:
        while not list(Path().glob("waits-*")):
            time.sleep(0.01)
        raise LookupError(result.source)

    with pytest.raises(LookupError, match=r"0\.tar"):
        convert_shards(stuck, shards, "out/", on_result=refuse, num_workers=3)
    assert multiprocessing.active_children() == []
    assert sorted(written()) == ["0.tar"]
    assert [path.name for path in Path("out").iterdir() if path.name.endswith(".part")] == []


# Executors


class Watched(ThreadPoolExecutor):
    """Counts its concurrent tasks, and stores their descriptions."""

    def __init__(self) -> None:
        super().__init__(3)
        self.open: set[Future[Any]] = set()
        self.most = 0
        self.seen: list[str] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.seen.append(repr((function, args, kwargs)))
        function, args, kwargs = pickle.loads(pickle.dumps((function, args, kwargs)))  # as if for another host
        task = super().submit(function, *args, **kwargs)
        self.open = {each for each in (*self.open, task) if not each.done()}
        self.most = max(self.most, len(self.open))
        return task


def test_an_executor_is_given_a_bounded_number_of_tasks_in_order(shards: list[str]) -> None:
    secret = {"password": "do not tell"}
    many = [shards[number % 6] for number in range(40)]
    with Watched() as executor:
        results = convert_shards(
            odd,
            many,
            "out/%d.tar",
            executor=executor,
            num_workers=4,
            options=WriteOptions(storage_options=secret),
            job=JobOptions(input_options=secret),
        )
        assert executor.submit(len, "ab").result() == 2  # it is still open
    assert [result.source for result in results] == many
    assert 1 < executor.most <= 4
    assert [f"'out/{number}.tar'" in text for number, text in enumerate(executor.seen[:40])] == [True] * 40
    assert not [text for text in executor.seen if "do not tell" in text]


def test_pending_tasks_are_cancelled(shards: list[str]) -> None:
    gate, begun = threading.Event(), threading.Event()

    def wait(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"][0] != "0":
            begun.set()
            gate.wait(600)
        return sample

    def refuse(result: ConvertedShard) -> None:
        assert begun.wait(600)
        raise LookupError

    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(LookupError):
            convert_shards(wait, shards, "out/", executor=executor, on_result=refuse)
        gate.set()
    assert sorted(written()) == ["0.tar", "1.tar"]
