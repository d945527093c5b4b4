"""`check_resume` with correct and with faulty pipelines, and the law of coverage."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from numbered_shards import write_numbered
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardList
from wds_datapipes.testing import check_coverage, check_resume

SIZES = (5, 0, 7, 2)

Pipe = IterDataPipe[Any]


#: A module that another process also imports.
sys.path.insert(0, str(Path(__file__).parent))
stages: Any = importlib.import_module("unresumable")
sys.path.pop(0)


@pytest.fixture(autouse=True)
def shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    write_numbered(folder, SIZES)


def gathered() -> Any:
    return ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


def decoded() -> Any:
    return gathered().shuffle_samples(3).wds_decode()


def test_a_pipeline_that_resumes_exactly_passes() -> None:
    check_resume(lambda: decoded().to_tuple("__key__", "cls").batch(2), workers=2, cuts=4)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: stages.Buffered(gathered()),
            r"After \d+ of 14 items, another process resumes with other items: item \d+ should",
        ),
        (lambda: stages.Ending(gathered(), "exit"), "After 0 of 14 items, the other process ended"),
        (
            lambda: stages.Ending(gathered(), "raise"),
            "After 0 of 14 items, another process cannot resume: LookupError: not here",
        ),
        (
            lambda: gathered().shuffle().with_epoch(14),
            r"After 0 of 14 items, there is no state: Shuffler .* Use \.shuffle_samples",
        ),
        (
            lambda: gathered().map(stages.unrepeatable),
            "The pipeline is not reproducible with the same seed: item 0 should be",
        ),
    ],
    ids=["holds back", "exits", "raises", "no state", "does not repeat"],
)
def test_pipelines_that_resume_wrongly_are_reported_with_the_cut(make: Callable[[], Pipe], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_resume(make, cuts=4)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1), (3, 5)])
def test_ranks_and_workers_yield_each_sample_once(ranks: int, workers: int) -> None:
    check_coverage(decoded, ranks=ranks, workers=workers)
    check_coverage(lambda: decoded().to_tuple("__key__", "cls"), ranks=ranks, workers=workers)


def test_items_are_identified_by_a_function() -> None:
    check_coverage(lambda: gathered().map(stages.unrepeatable_with_key), key=lambda item: item[0])
    with pytest.raises(AssertionError, match="should occur once, but occurs 0 times"):
        check_coverage(lambda: gathered().map(stages.unrepeatable_with_key))


def self_seeded() -> Any:
    pipe: Any = stages.SelfSeeded(ShardList(["{0..3}.tar"] * 5))
    return pipe.sharding_filter().load_wds_shards().group_samples()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (self_seeded, r"Epoch 0: \('\d.tar', '\d-\d'\) should occur 5 times, but occurs "),
        (
            lambda: ShardList("{0..3}.tar").load_wds_shards().group_samples(),
            r"Epoch 0: .* occurs 4 times \(rank 0, worker 0, rank 0, .*No stage splits the data: add \.sharding_filter",
        ),
        (
            lambda: stages.Lossy(gathered()),
            r"Epoch 1: \('\d.tar', '\d-0'\) should occur once, but occurs 0 times \(never\)",
        ),
        (
            lambda: gathered().map(stages.unrepeatable_with_key).map(list),
            r"Epoch 0: \['\d-\d', .* should occur once, but occurs 0 times \(never\)",
        ),
    ],
    ids=["own order", "no split", "loses some", "lists"],
)
def test_incomplete_shares_are_reported(make: Callable[[], Pipe], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_coverage(make)


def test_an_empty_pipeline_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="yields nothing, even without a split"):
        check_coverage(lambda: ShardList("1.tar").sharding_filter().load_wds_shards().group_samples())


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=naming("check_resume", "2 cuts", "not 1")):
        check_resume(gathered, cuts=1)
    with pytest.raises(ValueError, match=naming("check_coverage", "1 rank", "0 workers", "not 0 and 2")):
        check_coverage(gathered, ranks=0)
