"""`check_resume` with correct and with faulty pipelines, and the law of coverage."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coverage_law import check_coverage
from numbered_shards import write_numbered
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardList
from wds_datapipes.testing import check_resume

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


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 1), (3, 5)])
def test_ranks_and_workers_yield_each_sample_once(ranks: int, workers: int) -> None:
    check_coverage(decoded, ranks=ranks, workers=workers)
    check_coverage(lambda: decoded().to_tuple("__key__", "cls"), ranks=ranks, workers=workers)
    with pytest.raises(AssertionError):
        check_coverage(lambda: stages.Lossy(gathered()))


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="check_resume needs at least 2 cuts, the beginning and the end, not 1"):
        check_resume(gathered, cuts=1)
