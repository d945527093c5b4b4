"""Global batches of indexed samples: the same on any ranks and workers, also if a run resumes on different ones."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2, reading_service
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes import IndexedSamples, ShardReadingService, merge_states
from wds_datapipes.index import Manifest, build_indexes
from wds_datapipes.testing import build_shard

SIZES = (7, 1, 30, 12, 5, 45)
BATCH = 12


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("shards")
    for shard, size in enumerate(SIZES):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}-{n:02}", "cls": "1"} for n in range(size)])
    return Manifest(build_indexes(f"{folder}/{{0..5}}.tar"))


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"]) + ("+" if sample.get("__padding__") else "")


def pipeline(manifest: Manifest, *, buffer: int = 1, ranks: int = 1, **options: Any) -> IterDataPipe[Any]:
    pipe: Any = IndexedSamples(manifest, global_batch_size=BATCH, **options)
    if buffer > 1:
        pipe = pipe.shuffle_samples(buffer)
    return pipe.map(key_of).batch(BATCH // ranks)  # type: ignore[no-any-return]  # torch's stages carry no types


def service_loader(workers: int, pipe: IterDataPipe[Any]) -> Any:
    loader: Any = DataLoader2(pipe, reading_service=ShardReadingService(num_workers=workers))
    loader.seed(3)
    return loader


@pytest.mark.parametrize(("remainder", "lanes"), [("drop", 1), ("pad", 1), ("keep", 1), ("drop", 4), ("pad", 6)])
def test_a_run_with_unreadable_samples_resumes_with_any_number_of_workers(
    tmp_path: Path, remainder: str, lanes: int
) -> None:
    for shard in range(4):
        build_shard(tmp_path / f"{shard}.tar", [{"__key__": f"{shard}-{n:02}", "cls": "1"} for n in range(20)])
    damaged = Manifest(build_indexes(f"{tmp_path}/{{0..3}}.tar"))
    os.truncate(tmp_path / "1.tar", 100)

    def loader(workers: int) -> Any:
        return service_loader(workers, pipeline(damaged, remainder=remainder, lanes=lanes, on_error="skip"))

    with loader(0) as whole_loader:
        whole = list(chain.from_iterable(whole_loader))
    assert len(whole) == {"drop": 72, "pad": 84, "keep": 60}[remainder]
    assert remainder == "drop" or sum(not key.endswith("+") for key in whole) == 60
    for workers, cut, later in ((0, 2, 2), (2, 1, 3), (2, 3, 0)):
        with loader(workers) as first:
            iterator = iter(first)
            found = list(chain.from_iterable(next(iterator) for _ in range(cut)))
            state = first.state_dict()
        with loader(later) as second:
            second.load_state_dict(merge_states([state]))
            found += chain.from_iterable(second)
        assert sorted(found) == sorted(whole)
        assert found == whole or remainder == "keep"


def test_ranks_of_torchdata_read_one_order(manifest: Manifest) -> None:
    orders = []
    for rank in range(2):
        pipe: Any = pipeline(manifest)
        reading_service.set_graph_random_seed(pipe, SeedGenerator(3).spawn(rank))  # as DistributedReadingService does
        orders.append(list(pipe))
    assert orders[0] == orders[1]
