"""Error budgets in workers: each worker has the whole budget, and a worker that exceeds it ends the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ErrorBudget, ShardList, ShardReadingService, read_quarantine
from wds_datapipes.errors import ErrorBudgetError
from wds_datapipes.testing import build_shard


@pytest.fixture(autouse=True)
def here(folder: Path) -> None:
    # The first worker reads the even shards, which are all good; in those of the second, 12 of 40 samples are bad.
    for shard in range(4):
        bad = {3, 7, 8, 9, 13, 17} if shard % 2 else set()
        labels = [{"__key__": f"{shard}-{n}", "cls": "x" if n in bad else "1"} for n in range(20)]
        build_shard(f"{shard}.tar", labels)


def read(budget: ErrorBudget, epochs: int = 1) -> Any:
    pipe = ShardList("{0..3}.tar").sharding_filter().load_wds_shards().group_samples().wds_decode(on_error=budget)
    with DataLoader2(pipe, reading_service=ShardReadingService(2)) as loader:
        counts = [len(list(loader)) for _ in range(epochs)]
        return counts, loader.reading_service.report()


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ({"max_errors": 5}, "6 of 18 items (6 x DecodeError), 1 of them in a row, which is more than max_errors=5 "),
        ({"max_consecutive": 2}, "4 of 10 items (4 x DecodeError), 3 of them in a row, which is more than max_cons"),
        ({"max_rate": 0.25, "after": 16}, "6 of 18 items (6 x DecodeError), 1 of them in a row, which is more than m"),
    ],
)
def test_a_worker_that_skips_too_much_ends_the_run(limits: dict[str, Any], counts: str) -> None:
    with pytest.raises(ErrorBudgetError) as caught:
        read(ErrorBudget(**limits, warn=False))
    assert f"wds_decode skipped {counts}" in str(caught.value)
    assert "worker process 1" in str(caught.value)


def test_each_worker_has_the_whole_budget_in_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    Path("0.tar").write_bytes(Path("1.tar").read_bytes())
    Path("2.tar").write_bytes(Path("3.tar").read_bytes())
    budget = ErrorBudget(max_errors=12, max_rate=0.3, max_consecutive=3, after=39, warn=False, quarantine="bad.jsonl")
    with caplog.at_level(logging.WARNING, "wds_datapipes"):
        found, report = read(budget, epochs=2)
    assert found == [56, 56]
    assert caplog.messages == [f"epoch {epoch}: skipped 24 items: 24 x wds_decode: DecodeError" for epoch in (1, 2)]
    assert report.skipped.counts == {"wds_decode: DecodeError": 48}
    assert len(read_quarantine("bad.jsonl")) == 48
