"""The figures of a run plan are those of the loaders that execute it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nginx_server import Nginx
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes import IndexedSamples
from wds_datapipes.index import AccessOptions, EpochOptions, Manifest, build_indexes
from wds_datapipes.seeds import derived_seed
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.plan.planned_cache import PlannedCache
from wds_datapipes.tools.plan.training_run import RunPlan, RunShape, plan_run
from wds_datapipes.writing import ShardInfo

FLEET: dict[str, Any] = {"hosts": 64, "global_batch_size": 512 * 8}


def manifest_of(counts: list[int], size: int = 10**8) -> Manifest:
    return Manifest([ShardInfo(f"{number}.tar", count, size) for number, count in enumerate(counts)])


LARGE = manifest_of([500] * 2000)


def planned(**options: Any) -> RunPlan:
    return plan_run(LARGE, RunShape(**FLEET, **options))


@pytest.mark.parametrize("lanes", [1, 2, 8])
@pytest.mark.parametrize("order", ["global", "window"])
def test_shards_of_a_host_are_those_that_its_workers_read(order: Any, lanes: int) -> None:
    counts, hosts, ranks, workers, batch = [7, 0, 31, 12, 5, 40, 9, 24], 2, 2, 3, 16
    shape = RunShape(
        hosts=hosts,
        ranks_per_host=ranks,
        num_workers=workers,
        global_batch_size=batch,
        order=order,
        lanes=lanes,
        window_shards=2,
        epochs=1,
    )
    pipe = IndexedSamples(
        manifest_of(counts), order=order, global_batch_size=batch, lanes=lanes, epoch=EpochOptions(window_shards=2)
    )
    read, samples = set(), 0
    for rank in range(ranks):
        for worker in range(workers):
            pipe.apply_sharding(hosts * ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
            pipe.apply_sharding(workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            pipe.set_seed(derived_seed("epoch", 0, 0))
            order_of_epoch = pipe.order_of_epoch()
            for positions in pipe._share().positions():
                samples += len(positions)
                read.update(order_of_epoch.find(positions)[0].tolist())
    plan = plan_run(manifest_of(counts), shape)
    assert plan.shards_per_host == (len(read), len(read))
    assert plan.steps * batch // hosts == samples
    assert plan.unread == sum(counts) % batch


def test_lanes_keep_shards_on_their_host_and_open() -> None:
    without, some, enough = planned(), planned(lanes=64), planned(lanes=512)
    assert [plan.shards_per_host[1] for plan in (without, some, enough)] == [2000, 32, 32]
    assert without.opens_per_sample > 5 * some.opens_per_sample > 10 * enough.opens_per_sample
    assert without.shards_per_batch < some.shards_per_batch < enough.shards_per_batch
    assert without.requests_per_s > enough.requests_per_s
    more = planned(lanes=512, read_ahead=256 << 20)
    assert more.requests_per_s < enough.requests_per_s
    assert more.worker_bytes == enough.worker_bytes + (192 << 20)


def test_a_cache_that_holds_the_lanes_of_a_host_serves_all_later_epochs() -> None:
    needed = planned(lanes=512).cache_bytes
    assert needed == 32 * 10**8
    with_all = planned(lanes=512, cache_bytes=needed)
    assert with_all.hit_rates == (0.0, 1.0, 1.0)
    assert with_all.worker_bytes == planned(lanes=512).worker_bytes + (80 << 20)
    assert with_all.bytes_per_epoch == (needed, 0, 0)
    half = planned(lanes=512, cache_bytes=needed // 2)
    assert min(half.bytes_per_epoch) > 0
    assert planned(cache_bytes=needed).hit_rates[1] < 0.05


@pytest.mark.filterwarnings("ignore:.*most samples open a shard again")
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("order", ["sequential", "window"])
@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_downloads_of_a_cache_are_those_of_the_loader(
    nginx: Nginx, tmp_path: Path, part: float, order: Any, lanes: int
) -> None:
    folder, epochs = nginx.files / tmp_path.name, 5
    folder.mkdir()
    for number in range(9):
        samples = range(3 + number * 5 % 7)
        build_shard(folder / f"{number}.tar", [{"__key__": f"{each}", "bin": bytes(20_000)} for each in samples])
    options: dict[str, Any] = {"global_batch_size": 4, "order": order, "lanes": lanes}
    urls = [f"http://127.0.0.1:{nginx.http}/{folder.name}/{number}.tar" for number in range(9)]
    manifest = Manifest(build_indexes(urls, index_dir=tmp_path / "indexes"))
    room = int(part * manifest.sizes.sum())
    access = AccessOptions(
        index_dir=tmp_path / "indexes", cache_dir=tmp_path / "copies", cache_bytes=room, open_shards=1
    )
    pipe = IndexedSamples(manifest, access=access, epoch=EpochOptions(window_shards=3), **options)
    found = [0]
    for epoch in range(epochs):
        pipe.set_seed(derived_seed("epoch", 0, epoch))
        deque(pipe, maxlen=0)
        found.append(pipe.counters.figures()["cache_misses_bytes"])
    shape: dict[str, Any] = {
        "ranks_per_host": 1,
        "num_workers": 1,
        "open_shards": 1,
        "window_shards": 3,
        "epochs": epochs,
    }
    plan = plan_run(manifest, RunShape(cache_bytes=room, **shape, **options))
    assert plan.bytes_per_epoch == tuple(np.diff(found))


def test_a_copy_that_a_worker_keeps_open_is_not_evicted() -> None:
    cache = PlannedCache([1] * 4, max_bytes=2, open_shards=1)
    assert cache.read_epoch([(0, [0]), (1, [1]), (2, [2, 3])]) == [0, 1, 2, 3]  # two of them are not kept
    assert cache.read_epoch([(0, [0]), (1, [1]), (0, [2]), (1, [0, 1])]) == [2, 0, 1]
    assert PlannedCache([9], max_bytes=8, open_shards=1).read_epoch([(0, [0, 0])]) == [0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "each host reads 2000 of 2000 shards, but needs only 32: choose lanes=512"),
        ({"lanes": 64}, "512 ranks do not divide 64 lanes"),
        ({"order": "global"}, 'samples: choose order="window", more lanes'),
        ({"lanes": 512, "cache_bytes": 10**9}, "choose cache_bytes=3200000000, or more lanes"),
        ({"num_workers": 400}, "no batch for 156 of 400 workers, because an epoch has only 244"),
        ({"global_batch_size": 512 * 1200}, "an epoch drops 385600 of 1000000 samples"),
    ],
)
def test_warnings_name_the_argument_to_change(options: dict[str, Any], text: str) -> None:
    plan = plan_run(LARGE, RunShape(**{**FLEET, **options}))
    assert any(text in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch_size": 100}, "not divisible by its 512 ranks"),
        ({"lanes": 3}, "global_batch_size=4096. Choose a multiple of 3"),
        ({"global_batch_size": 512 * 4096}, "an epoch would be empty"),
        ({"order": "random"}, "order must be"),
        ({"hosts": 0}, "hosts must be at least 1"),
        ({"steps_per_s": 0}, "steps_per_s must be a positive number"),
    ],
)
def test_impossible_runs_are_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_run(LARGE, RunShape(**{**FLEET, **options}))


def test_a_dataset_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="An epoch has no samples"):
        plan_run(manifest_of([0]), RunShape(ranks_per_host=1, global_batch_size=2))


def test_a_manifest_without_sizes_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the sizes of some shards"):
        plan_run(manifest_of([5, 5], size=0), RunShape(ranks_per_host=1, global_batch_size=2))
