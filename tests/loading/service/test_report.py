"""The reports of workers: their figures, and the line that shows them."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.random import SeedGenerator
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.counters import Skipped, SkippedItem
from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading import report as reports
from wds_datapipes.loading.report import SHORTEST_S, LoadingReport, WorkerReport, count_skipped, wait_bucket
from wds_datapipes.loading.workers import in_process
from wds_datapipes.on_error.policy import ErrorBudget
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.samples import decoding
from wds_datapipes.pipes.shards.shard_list import ShardList
from wds_datapipes.testing import build_shard

pytestmark = pytest.mark.usefixtures("nothing_left")

WORKERS = [0, 2]

LAST = SkippedItem("wds_decode", "DecodeError", "a.tar", "1", "cls", "the last one")


def load(pipe: IterDataPipe[Any], workers: int, **options: Any) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=ShardReadingService(workers, **options))


def report(loader: DataLoader2[Any]) -> LoadingReport:
    found: LoadingReport = loader.reading_service.report()
    return found


# the numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_items_bytes_and_epochs_of_each_process_are_counted(workers: int) -> None:
    with load(IterableWrapper(range(101)).sharding_filter().map(wide), workers) as loader:
        assert (report(loader).epoch, report(loader).items) == (0, 0)
        for epoch in (1, 2, 3):
            assert len(list(loader)) == 101
            assert (report(loader).epoch, report(loader).items) == (epoch, 101 * epoch)
        found = report(loader).workers
        assert [worker.items for worker in found] == ([153, 150] if workers else [303])
        if workers:
            assert [worker.name for worker in found] == ["Worker 0", "Worker 1"]
            assert {worker.pid for worker in found} <= {child.pid for child in psutil.Process().children()}
            assert found[0].pid != found[1].pid
            assert 303 * 100_000 < sum(worker.bytes for worker in found) < 303 * 101_000
        else:
            assert [(worker.name, worker.pid) for worker in found] == [("The main process", os.getpid())]
    after = report(loader)
    assert after == report(loader)
    # A worker may have waited until it was shut down.
    same = [[(each.name, each.pid, each.items, each.bytes) for each in told] for told in (found, after.workers)]
    assert same[0] == same[1]


def wide(number: int) -> Any:
    return np.full(100_000, number, np.uint8)


def test_time_is_attributed_to_the_worker_that_spent_it() -> None:
    with load(IterableWrapper(range(2)).sharding_filter().map(slow), 1) as loader:
        list(loader)
        (found,) = report(loader).workers
        assert found.making_s >= 0.2
        assert found.waited_s > 0.01  # the loop starts to wait when the worker starts


def slow(number: int) -> int:
    time.sleep(0.1)
    return number


class Stuck(IterDataPipe[Any]):
    """Yields its items, and is busy before one of them."""

    def __init__(self, source: IterDataPipe[Any], last: int) -> None:
        self.source, self.last = source, last

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.source):
            if number == self.last:
                time.sleep(1000)  # all finished items are sent while it is busy
            yield item


def test_a_report_is_available_after_a_worker_was_killed(tmp_path: Path) -> None:
    names = [
        build_shard(tmp_path / f"{name}.tar", [{"__key__": str(n), "txt": "x"} for n in range(5)]) for name in "ab"
    ]
    loader = load(Stuck(ShardList(names).load_wds_shards().group_samples(), 7), 1)
    items = iter(loader)
    assert len([next(items) for _ in range(7)]) == 7
    psutil.Process(report(loader).workers[0].pid).kill()
    with pytest.raises(WorkerDiedError):
        next(items)
    (worker,) = report(loader).workers
    assert worker.shard == names[1]
    assert worker.items == 7
    loader.shutdown()
    assert report(loader).workers == [worker]


# shards


@pytest.mark.parametrize("workers", [0, 2])
def test_no_credentials_are_reported(workers: int, tmp_path: Path, openers: dict[str, Any]) -> None:
    def open_or_fail(url: str, /, **_: object) -> BinaryIO:
        if "bad" in url:
            raise OSError("refused")
        return shard.open("rb")

    shard = Path(build_shard(tmp_path / "a.tar", [{"__key__": "0", "txt": "a"}]))
    openers["test"] = open_or_fail
    addresses = [f"test://ada:secret@host/{name}.tar?token=secret" for name in ("bad", "good")]
    with load(IterableWrapper(addresses).load_wds_shards(on_error="skip").group_samples(), workers) as loader:
        assert len(list(loader)) == max(workers, 1)
        found = report(loader)
        assert [worker.shard for worker in found.workers] == ["test://***@host/good.tar?token=***"] * max(workers, 1)
        assert found.skipped.latest[0].url == "test://***@host/bad.tar?token=***"
        assert found.skipped.latest[0].url in found.skipped.latest[0].reason
        assert "secret" not in repr(found)


def test_a_very_long_url_is_reported_truncated(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["ü" * 100] * 10)
    folder.mkdir(parents=True)
    shard = build_shard(folder / "a.tar", [{"__key__": "0", "txt": "a"}])
    with load(ShardList([shard]).load_wds_shards().group_samples(), 1) as loader:
        assert len(list(loader)) == 1
        assert shard.startswith(report(loader).workers[0].shard.rstrip("\ufffd"))


@pytest.mark.parametrize("workers", WORKERS)
def test_hits_of_a_cache_and_the_last_shard_are_reported_and_nothing_is_logged(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "txt": name}]) for name in "abcd"]
    cached = ShardList(names).sharding_filter().cache_wds_shards(tmp_path / "cache")
    with load(cached.load_wds_shards(on_error="skip").group_samples(), workers) as loader:
        for epoch in (1, 2):
            assert len(list(loader)) == 4
            found = report(loader).as_dict()
            assert (found.get("cache_hits", 0), found["cache_misses"]) == (4 * epoch - 4, 4)
            shards = [worker.shard for worker in report(loader).workers]
            assert shards == {0: [names[3]], 2: [names[2], names[3]]}[workers]
    assert caplog.messages == []


spent_s = [0.0]


def spend(seconds: float, item: Any) -> Any:
    spent_s[0] += seconds
    return item


@pytest.mark.parametrize("workers", WORKERS)
def test_the_time_of_decoding_excludes_that_of_other_stages(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: spent_s[0]))
    samples = IterableWrapper([{"__key__": f"{n}", "txt": b"a"} for n in range(3)]).map(partial(spend, 8.0))
    with load(samples.wds_decode(txt=partial(spend, 2.0)).map(partial(spend, 32.0)), workers) as loader:
        assert len(list(loader)) == 3 * max(workers, 1)
        assert report(loader).as_dict()["decoding_s/wds_decode"] == 6 * max(workers, 1)


# skipped shards and samples


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Return four shards: the second and fourth are truncated; the others each have a sample without a number."""
    names = []
    for name in "abcd":
        samples = [{"__key__": f"{name}{n}", "cls": "x" if n == 2 else str(n)} for n in range(4)]
        names.append(build_shard(tmp_path / f"{name}.tar", samples))
    for name in names[1::2]:
        os.truncate(name, 1024 + 256)
    return names


EXPECTED = {"load_wds_shards: TruncatedShardError": 2, "wds_decode: DecodeError": 2}


def resume_from(error: Exception) -> bool:
    return True


@pytest.mark.filterwarnings("ignore:.*skipped")  # this is what "warn" does in the main process
@pytest.mark.parametrize(("on_error", "workers"), [("skip", 2), ("warn", 0), (resume_from, 1)])
def test_skipped_items_are_counted(
    on_error: Any, workers: int, shards: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pipe = ShardList(shards).sharding_filter().load_wds_shards(on_error=on_error).group_samples()
    with load(pipe.wds_decode(on_error=on_error), workers) as loader:
        for epoch in (1, 2):
            caplog.clear()
            assert len(list(loader)) == 6
            told = ", ".join(f"{count} x {what}" for what, count in sorted(EXPECTED.items()))
            assert caplog.messages == [f"epoch {epoch}: skipped 4 items: {told}"]
            assert caplog.records[0].name == "wds_datapipes"
            found = report(loader).skipped
            assert found.counts == {what: epoch * count for what, count in EXPECTED.items()}
            assert found.total == epoch * 4
            assert len(found.latest) == epoch * 4
            assert sum(each.error == "TruncatedShardError" for each in found.latest) == epoch * 2
        if workers == 2:
            each = [dict(worker.skipped.counts) for worker in report(loader).workers]
            assert each == [{"wds_decode: DecodeError": 4}, {"load_wds_shards: TruncatedShardError": 4}]
    assert report(loader).skipped.total == 8


def test_items_skipped_before_an_error_are_counted(shards: list[str]) -> None:
    pipe = ShardList([shards[1], shards[0]]).load_wds_shards(on_error="skip").group_samples().wds_decode()
    with load(pipe, 1) as loader:
        with pytest.raises(Exception, match="x"):
            list(loader)
        assert report(loader).skipped.counts == {"load_wds_shards: TruncatedShardError": 1}


@pytest.mark.parametrize("workers", WORKERS)
def test_loaders_of_one_process_do_not_see_what_others_skip(workers: int, shards: list[str]) -> None:
    def read(shard: str, on_error: Any) -> Any:
        return ShardList([shard]).load_wds_shards().group_samples().wds_decode(on_error=on_error)

    build_shard(shards[1], [{"__key__": str(n), "cls": "x" if n in (1, 3) else "1"} for n in range(4)])
    pipes = [read(shards[0], "skip"), read(shards[1], ErrorBudget(max_errors=2, warn=False))]
    loaders = [load(pipe, workers) for pipe in pipes]
    before = list(read(shards[1], "skip"))  # a plain loop in between
    try:
        for epoch in (1, 2):
            taken: list[Any] = list(itertools.zip_longest(*loaders))
            assert len([item for items in taken for item in items if item is not None]) == max(workers, 1) * 5
            for loader, count, shard in zip(loaders, (1, 2), shards, strict=False):
                found = report(loader)
                assert found.skipped.counts == {"wds_decode: DecodeError": epoch * count * max(workers, 1)}
                assert {each.shard for each in found.workers} == {shard}
    finally:
        for loader in loaders:
            loader.shutdown()
    assert len(before) == 2
    assert [count_skipped(pipe).total for pipe in pipes] == [0, 0]


# a report for people


def worker_report(number: int = 0, **changes: Any) -> WorkerReport:
    facts: dict[str, Any] = {
        "name": f"Worker {number}",
        "pid": 4000 + number,
        "items": 12_345,
        "bytes": 6_780_000,
        "making_s": 1.25,
        "waiting_s": 2.5,
        "waited_s": 3.75,
        "shard": f"s3://bucket/train-{number:03}.tar",
        "skipped": Skipped({"wds_decode: DecodeError": 3, "group_samples: DuplicateKeyError": 1}, (LAST,)),
    }
    return WorkerReport(**{**facts, **changes})


def test_the_line_states_the_facts() -> None:
    found = LoadingReport(3, [worker_report(0), worker_report(1)])
    assert str(found) == (
        "3 epochs: 24,690 items, 13.6 MB, from 2 workers; the loop waited 7.5 s for them, and they waited 5.0 s for "
        "the loop; skipped: 2 x group_samples: DuplicateKeyError, 6 x wds_decode: DecodeError"
    )
    assert found.skipped.latest == (LAST, LAST)


# a report for programs

#: Some amounts that add up exactly.
AMOUNTS = st.integers(0, 100)


@st.composite
def worker_reports(draw: st.DrawFn, number: int) -> WorkerReport:
    sums = {
        name: draw(AMOUNTS) for name in ("items", "received", "bytes", "making_s", "waiting_s", "waited_s", "ahead")
    }
    figures = draw(st.dictionaries(st.sampled_from(["fetched_bytes/s3://a", "retries/s3://a", "cache_hits"]), AMOUNTS))
    waits = Counter(map(wait_bucket, draw(st.lists(st.sampled_from([0.1, 1.0, 10.0])))))
    skipped = Skipped(draw(st.dictionaries(st.sampled_from(["a: AError", "b: BError"]), st.integers(1, 9))))
    return worker_report(number, skipped=skipped, figures=Counter(figures), waits=waits, **sums)


REPORTS = st.tuples(worker_reports(0), worker_reports(1)).map(lambda workers: LoadingReport(1, workers, 8.0))


def sums_of(report: LoadingReport) -> dict[str, Any]:
    """Return the figures of a report that can be added."""
    found = {name: amount for name, amount in report.as_dict().items() if not name.startswith(("slowest", "wait"))}
    return {name: amount for name, amount in found.items() if name != "epoch" and "_per_s" not in name and amount}


@settings(max_examples=30)
@given(REPORTS, REPORTS)
def test_the_work_before_and_after_a_report_adds_up(earlier: LoadingReport, since: LoadingReport) -> None:
    workers = [LoadingReport(1, pair).total for pair in zip(earlier.workers, since.workers, strict=True)]
    names = [{"name": each.name, "pid": each.pid} for each in earlier.workers]
    whole = [WorkerReport(**{**vars(each), **name}) for each, name in zip(workers, names, strict=True)]
    assert sums_of(LoadingReport(1, whole, 16.0).since(earlier)) == sums_of(since)


@settings(max_examples=30)
@given(REPORTS)
def test_a_report_is_json_of_plain_values(report: LoadingReport) -> None:
    found = report.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert {*map(type, found.values())} <= {int, float, str}
    total = report.total
    assert WorkerReport.from_json(total.to_json()) == total
    assert len(total.to_json()) < 2000  # what a rank publishes
    assert LoadingReport(1, [total], 8.0).as_dict() == found  # which is the sum of its workers


@given(st.lists(st.floats(0, 1e4), min_size=1), st.integers(0, 100), st.integers(1, 99))
def test_percentiles_are_exact_to_a_tenth(waits: list[float], others: int, percent: int) -> None:
    """The loop does not wait for most items, and no time is recorded for them."""
    recorded = [wait for wait in waits if wait > SHORTEST_S]
    found = worker_report(received=len(waits) + others, waits=Counter(map(wait_bucket, recorded)))
    wanted = np.percentile([0.0] * others + waits, percent, method="inverted_cdf")
    assert found.wait_s(percent) == pytest.approx(wanted, rel=0.1, abs=SHORTEST_S)


@pytest.mark.parametrize("workers", WORKERS)
def test_the_loop_records_its_waits(workers: int) -> None:
    with load(IterableWrapper(range(30)).sharding_filter().map(slow_if_odd), workers) as loader:
        assert len(list(loader)) == 30
        found = report(loader).total
        assert (found.received, found.ahead) == (30, 0)
        recorded_s = sum(float(bucket) * count for bucket, count in found.waits.items())
        assert recorded_s == pytest.approx(found.waited_s, rel=0.1, abs=30 * SHORTEST_S)
        assert found.wait_s(100) > 0


# reports to a function


def test_a_function_hears_from_a_loop_that_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker waits for the function, which receives the worker and the shard that the loop waits for."""
    names = [build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "txt": str(tmp_path)}]) for name in "abcd"]
    os.mkfifo(tmp_path / "gate")
    heard: list[dict[str, Any]] = []

    def hear(report: dict[str, Any]) -> None:
        if (report["slowest_worker"], report["slowest_shard"]) == ("Worker 1", names[3]) and report["waited_share"] > 0:
            if not heard:
                (tmp_path / "gate").write_text("continue")
            heard.append(report)
            raise LookupError("no such board")

    pipe = ShardList(names).sharding_filter().load_wds_shards().group_samples().map(wait_at_d)
    with load(pipe, 2, on_report=hear, report_every_s=0.02) as loader:
        assert len(list(loader)) == 4
    assert "no such board" in caplog.text
    assert heard[0]["epoch"] == 1
    await_end_of_reports()


def await_end_of_reports() -> None:
    for each in threading.enumerate():
        if each.name == "wds_datapipes reports":
            each.join()


def wait_at_d(sample: dict[str, Any]) -> str:
    if sample["__key__"] == "d":
        (Path(sample["txt"].decode()) / "gate").read_text()
    return str(sample["__key__"])


def test_a_function_does_not_keep_a_loader_alive() -> None:
    heard = threading.Event()

    def hear(found: dict[str, Any]) -> None:
        assert loaders[0].reading_service.report().items >= found["items"]
        heard.set()

    loaders = [load(IterableWrapper(range(10)), 1, on_report=hear, report_every_s=0.01)]
    list(loaders[0])
    assert heard.wait(60)
    gone = weakref.ref(loaders[0].reading_service)
    loaders.clear()
    while gone() is not None:  # the function may be running
        gc.collect()
    await_end_of_reports()


# stragglers


def test_a_straggler_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    known = set[str]()
    pace = {"items": 10, "making_s": 10.0, "waited_s": 10.0, "host": "north", "rank": 3}
    slow = {**pace, "making_s": 31.0}
    cases: list[tuple[list[dict[str, Any]], float]] = [
        ([pace, pace, pace, {**pace, "making_s": 29.0}], 100.0),
        ([pace, pace, pace, {**slow, "waited_s": 1.0}], 100.0),  # the loop has enough to do
        ([pace, slow], 9.0),  # a moment
        ([slow], 100.0),
        ([{**pace, "items": 0}, {**pace, "items": 0}], 100.0),  # both fill a buffer
    ]
    for workers, elapsed_s in cases:
        found = LoadingReport(1, [worker_report(n, **each) for n, each in enumerate(workers)], elapsed_s)
        reports.log_stragglers(found, "workers", known)
    assert caplog.messages == []
    stuck = {**pace, "items": 0, "making_s": 0.0}
    for workers in ([pace, pace, slow], [pace, pace, slow], [{**stuck, "ahead": 5}, stuck]):
        found = LoadingReport(1, [worker_report(n, **each) for n, each in enumerate(workers)], 50.0)
        reports.log_stragglers(found, "workers", known)
    assert caplog.messages == [
        f"Straggler: Worker {number} of rank 3 on north takes {item_s} s for an item, and the median of the workers "
        f"{median_s} s. The last shard that it opened is s3://bucket/train-00{number}.tar"
        for number, item_s, median_s in ((2, 3.1, 1), (1, 50, 0))
    ]


def test_the_worker_that_is_slow_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "COMPARED_S", 0.0)
    with load(IterableWrapper([0, 0.5] * 2).sharding_filter().map(sleep), 2) as loader:
        for _ in range(2):
            list(loader)
    assert [message.partition(" on ")[0] for message in caplog.messages] == ["Straggler: Worker 1 of rank 0"]


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def slow_if_odd(number: int) -> float:
    return sleep(0.01 * (number % 2))


# pipelines without workers


def test_time_in_the_loop_is_not_that_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    class TwoSecondsEach(IterDataPipe[int]):
        def __iter__(self) -> Iterator[int]:
            for number in range(5):
                now[0] += 2
                yield number

    monkeypatch.setattr(in_process, "perf_counter", lambda: now[0])
    pipe = TwoSecondsEach()
    items = in_process.LocalItems(PipelineGraph(pipe), None, "")
    items.begin(SeedGenerator(0), None, None, pipe)
    for _ in items:
        now[0] += 50
    (found,) = items.reports()
    assert (found.making_s, found.waited_s, found.waiting_s) == (10, 10, 0)
