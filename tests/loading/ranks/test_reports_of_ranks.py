"""Reports of all ranks are merged without waiting, name the slowest rank, and cost the same in runs of any size."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import on_ranks
from torch._C._distributed_c10d import HashStore
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.counters import Skipped
from wds_datapipes.errors import RankLostError
from wds_datapipes.loading import report as reports
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.report import WorkerReport, wait_bucket

RANKS = 3
#: The number of items of each rank.
SHARE = 4


def as_rank_2(number: float) -> float:
    """Take long on one rank."""
    time.sleep(0.3 * (dist.get_rank() == 2))
    return number


def report_on(rank: int) -> dict[str, Any]:
    """Load two epochs step by step, and return the reports of this rank and of all ranks."""
    reports.COMPARED_S = 0.0
    logged: list[str] = []
    reports.LOGGER.warning = lambda text, *arguments: logged.append(text % arguments)  # type: ignore[method-assign]
    host = f"host{rank // 2}"
    socket.gethostname = lambda: host
    heard: list[dict[str, Any]] = []
    service = ShardReadingService(1, distributed=True, on_report=heard.append, report_every_s=0.05)
    pipe = IterableWrapper(range(RANKS * SHARE)).sharding_filter().map(as_rank_2)
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(0)
        for _ in range(2):
            assert len([dist.barrier() for _ in loader]) == SHARE
        while True:  # the other ranks publish at their interval, and this one does not wait for them
            found = loader.reading_service.report(all_ranks=True)
            if sum(each.received for each in found.workers) == 2 * SHARE * RANKS and len(heard) > 1:
                break
        dist.barrier()  # until all have seen it: the report of a rank disappears with the rank
        own = loader.reading_service.report()
        return {"all": found.as_dict(), "line": str(found), "own": own.as_dict(), "heard": heard, "logged": logged}


def test_ranks_see_each_other_without_waiting() -> None:
    found = on_ranks(RANKS, report_on)
    for rank, seen in enumerate(found):
        assert seen["all"]["received"] == 2 * SHARE * RANKS
        assert seen["own"]["received"] == 2 * SHARE
        slowest = {name: seen["all"][f"slowest_{name}"] for name in ("rank", "host", "worker")}
        assert slowest == {"rank": 2, "host": "host1", "worker": "Worker 0"}
        assert seen["line"].startswith("2 epochs: 24 items, ")
        assert ", from 3 ranks; " in seen["line"]
        assert (seen["own"]["slowest_rank"], seen["own"]["slowest_host"]) == (rank, f"host{rank // 2}")
        assert any(name.startswith("all_ranks_") for each in seen["heard"] for name in each) == (rank == 0)
    assert max(each.get("all_ranks_slowest_rank", 0) for each in found[0]["heard"]) == 2
    lines = [line for line in found[0]["logged"] if line.startswith("Straggler: Worker 0 of rank 2 on host1 takes ")]
    assert len(lines) == 1
    assert "the median of the ranks" in lines[0]


class CountingStore(HashStore):
    """Counts requests, and the bytes of the values."""

    requests: Counter[str]
    size = 0

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.size = max(self.size, len(value))
        super().set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests["compare_set"] += 1
        return super().compare_set(key, expected, desired)


def test_publishing_costs_the_same_in_runs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of 4,096 that only publishes sends one short message."""
    store = CountingStore()
    ranks = Ranks(IterableWrapper([]))
    monkeypatch.setattr(ranks, "_host", store)
    ranks.size = 4096
    waits = Counter({wait_bucket(1e-5 * 1.1**number): 1 << 40 for number in range(200)})  # every bucket
    figures = Counter({f"{name}/s3://bucket{n}": 1 << 50 for name in ("fetched_bytes", "retries") for n in range(4)})
    for rank in range(ranks.size):
        worker = WorkerReport("Worker 1", 1, 9, 9, rank / 3, 1 / 3, 1 / 3, "s3://bucket/train-000001.tar", Skipped())
        store.requests = Counter()
        ranks.rank = rank
        text = reports.LoadingReport(
            1, [WorkerReport(**{**vars(worker), "waits": waits, "figures": figures, "rank": rank})]
        ).total.to_json()
        ranks.share(text, reads=False)
        assert store.requests == {"set": 1}
    assert store.size < 4000
    store.requests = Counter()
    texts = ranks.share(text, reads=True)
    assert store.requests == {"set": 1, "compare_set": 4096}
    whole = reports.LoadingReport(1, [WorkerReport.from_json(each) for each in texts])
    assert (whole.total.name, whole.items) == ("Rank 4095", 9 * 4096)
    assert json.loads(text)["rank"] == 4095


def test_a_lost_store_and_unknown_ranks_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    ranks = Ranks(IterableWrapper([]))
    monkeypatch.setattr(ranks, "_host", Gone())
    with pytest.raises(RankLostError, match=r"cannot report together: .* \(RuntimeError: Connection reset by peer\)"):
        ranks.share("{}", reads=False)
    monkeypatch.setattr("wds_datapipes.loading.service.service_loop.ranks_of_run", lambda: 2)
    service = ShardReadingService(0, distributed=False)
    with DataLoader2(IterableWrapper(range(3)), reading_service=service) as loader:
        assert len(list(loader)) == 3
        with pytest.raises(RuntimeError, match=r"requires ShardReadingService\(distributed=True\)"):
            loader.reading_service.report(all_ranks=True)
