"""Batches after `IndexedSamples` are the parts of ranks in its global batches, or their sizes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numbered_shards import write_numbered
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2
from torchdata.stateful_dataloader import StatefulDataLoader
from users_stages import InMain

from wds_datapipes import IndexedSamples, ShardReadingService, StatefulShards
from wds_datapipes.index import Manifest, build_indexes


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest(build_indexes(write_numbered(tmp_path_factory.mktemp("shards"), [9, 30, 12])))


def read_by_service(pipe: Any, ranks: int, batch_size: int | None, workers: int) -> None:
    service = ShardReadingService(workers, distributed=(1, ranks) if ranks > 1 else None)
    with DataLoader2(pipe, reading_service=service) as loader:
        loader.seed(1)
        next(iter(loader))


def read_tracked(pipe: Any, ranks: int, batch_size: int | None, workers: int, kind: Any = DataLoader) -> None:
    data = StatefulShards(pipe, distributed=(1, ranks) if ranks > 1 else None)
    next(data.tracked(kind(data, batch_size=batch_size, num_workers=workers, collate_fn=list)))


def read_by_stateful_loader(pipe: Any, ranks: int, batch_size: int | None, workers: int) -> None:
    data = StatefulShards(pipe, distributed=(1, ranks) if ranks > 1 else None)
    next(iter(StatefulDataLoader(data, batch_size=batch_size, num_workers=workers, collate_fn=list)))


def read_untracked(pipe: Any, ranks: int, batch_size: int | None, workers: int) -> None:
    data = StatefulShards(pipe, distributed=(1, ranks) if ranks > 1 else None)
    next(iter(DataLoader(data, batch_size=batch_size, num_workers=workers, collate_fn=list)))


def is_any(item: Any) -> bool:
    return True


BATCHED: dict[str, tuple[Callable[[Any], Any], int, int | None, str]] = {
    "larger": (lambda samples: samples.wds_decode().batch(6), 1, None, r"8 samples per rank .*but \.batch\(6\) after"),
    "smaller": (lambda samples: samples.batch(4), 1, None, r"of 4\. Pass \.batch\(8\), or global_batch_size=4; or,"),
    "for more ranks": (
        lambda samples: samples.batch(2, drop_last=True),
        2,
        None,
        r"4 samples per rank \(2 ranks\), .* global_batch_size=4; or, .*\.batch\(2\)\.batch\(2\)",
    ),
    "of batches": (lambda samples: samples.batch(2).batch(2), 1, None, r"\.batch\(2\) and \.batch\(2\) after it makes"),
    "by the loader": (lambda samples: samples, 1, 4, r"but batch_size=4 of the loader after it makes batches of 4"),
    "by both": (lambda samples: samples.batch(4), 1, 4, r"\.batch\(4\) and batch_size=4 of the loader .* of 16"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("read", [read_by_service, read_tracked, read_by_stateful_loader, read_untracked])
@pytest.mark.parametrize("name", BATCHED)
def test_batches_other_than_the_part_of_a_rank_are_refused(
    manifest: Manifest, name: str, read: Any, workers: int
) -> None:
    build, ranks, batch_size, message = BATCHED[name]
    pipe = build(IndexedSamples(manifest, global_batch_size=8))
    if batch_size is not None and read in (read_untracked, read_by_service):
        return  # nothing knows the size, or the loader takes none
    if read is read_untracked and name != "larger":  # the loader may combine smaller batches
        with pytest.warns(UserWarning, match=message):
            read(pipe, ranks, batch_size, 0)
        return
    with pytest.raises(ValueError, match=message):
        read(pipe, ranks, batch_size, workers)


@pytest.mark.parametrize("read", [read_by_service, read_tracked, read_by_stateful_loader, read_untracked])
def test_batches_that_match_the_part_of_a_rank(manifest: Manifest, read: Any) -> None:
    builds: list[Callable[[Any], Any]] = [
        lambda samples: samples,
        lambda samples: samples.batch(4),
        lambda samples: samples.batch(2).batch(2),
        lambda samples: samples.batch(3).unbatch_samples(),
        lambda samples: samples.bucket_samples(key_length, batch_size=4),
    ]
    for build in builds:
        read(build(IndexedSamples(manifest, global_batch_size=8)), 2, None, 0)
    if read not in (read_by_service, read_untracked):
        read(IndexedSamples(manifest, global_batch_size=8).batch(2), 2, 2, 0)


def key_length(sample: Any) -> int:
    return len(sample["__key__"])


def test_a_stage_that_may_drop_samples_makes_it_a_warning(manifest: Manifest) -> None:
    for add in (
        lambda samples: samples.filter(is_any).batch(6),
        lambda samples: InMain(samples).batch(6),
        lambda samples: samples.bucket_samples(key_length, batch_size=6),
    ):
        with pytest.warns(UserWarning, match=r"global_batch_size of 8.*makes batches of 6"):
            read_by_service(add(IndexedSamples(manifest, global_batch_size=8)), 1, None, 0)
