"""Pipelines in every loader: each sample exactly once, errors with their type and text, and stages in workers."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from numbered_shards import write_numbered
from readers import keys_of
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import MockSamples, ShardList
from wds_datapipes.errors import DecodeError, EmptySourceError, MissingFieldError, ShardOpenError, TruncatedShardError
from wds_datapipes.testing import build_shard

#: Shards contain uneven numbers of samples, like real ones.
SAMPLES_PER_SHARD = [7, 1, 12, 3, 9]
ALL_KEYS = sorted(f"{shard}-{index}" for shard, count in enumerate(SAMPLES_PER_SHARD) for index in range(count))


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    return write_numbered(tmp_path, SAMPLES_PER_SHARD)


def loader_of(kind: str, pipe: IterDataPipe[Any]) -> Any:
    """Return a loader by its name and number of workers."""
    name, workers = kind.split()
    if name == "StatefulDataLoader":
        return StatefulDataLoader(pipe, batch_size=None, num_workers=int(workers))
    if name == "DataLoader":
        return DataLoader(pipe, batch_size=None, num_workers=int(workers))
    service = MultiProcessingReadingService(int(workers)) if int(workers) else InProcessReadingService()
    return DataLoader2(pipe, reading_service=service)


def items_of(kind: str, pipe: IterDataPipe[Any], epochs: int = 1) -> list[list[Any]]:
    loader = loader_of(kind, pipe)
    try:
        return [list(loader) for _ in range(epochs)]
    finally:
        if isinstance(loader, DataLoader2):
            loader.shutdown()


def pipeline(urls: str) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = (
        ShardList(urls)
        .shuffle()
        .sharding_filter()
        .load_wds_shards()
        .group_samples()
        .shuffle_samples(4)
        .wds_decode()
        .to_tuple("__key__", "cls")
    )
    return pipe


@pytest.mark.parametrize(
    "kind",
    [
        *("DataLoader2 0", "DataLoader2 7"),
        *("DataLoader 0", "DataLoader 2", "StatefulDataLoader 0", "StatefulDataLoader 2"),
    ],
)
def test_each_sample_comes_exactly_once_per_epoch(kind: str, pattern: str) -> None:
    for received in items_of(kind, pipeline(pattern), epochs=2):
        assert sorted(key for key, _ in received) == ALL_KEYS
        assert all(key.endswith(f"-{label}") for key, label in received)


def replaced(sample: dict[str, bytes | str]) -> Callable[[str], str]:
    """Write a different third shard."""
    return lambda urls: urls if build_shard(urls.replace("{0..4}", "2"), [sample]) else ""


def truncated(urls: str) -> str:
    os.truncate(urls.replace("{0..4}", "2"), 5400)
    return urls


@pytest.mark.parametrize("kind", ["DataLoader2 2", "DataLoader 2"])
@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (truncated, TruncatedShardError, r"/2\.tar ends inside a header, at byte 5400"),
        (replaced({"__key__": "bad", "cls": "7x"}), DecodeError, r"/2\.tar.*'bad'|'bad'.*/2\.tar"),
        (replaced({"__key__": "bare", "txt": "7"}), MissingFieldError, r"the sample 'bare' of .*/2\.tar"),
        (lambda urls: urls + "::gone.tar", ShardOpenError, r"gone\.tar"),
    ],
    ids=["truncated", "undecodable", "without a field", "missing"],
)
def test_an_error_arrives_with_its_type_and_text(
    kind: str, pattern: str, damage: Callable[[str], str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        items_of(kind, pipeline(damage(pattern)))
    # A frame of torch references the error and the workers; ending them by garbage collection would take 5 seconds.
    traceback.clear_frames(caught.tb)


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle")
def test_lambdas_reach_forked_workers_of_torch() -> None:
    """torch pickles the collections in a stage's attributes, and would fail if one contained a lambda."""
    pipe: Any = (
        MockSamples(lambda number: {"n": number + 1}, 2).sharding_filter().compose(lambda samples: list(samples))
    )
    pipe = pipe.map_dict(n=lambda n: 10 * n).map_samples(lambda sample: sample).to_tuple("n").map_tuple(lambda n: n + 1)
    assert [[tuple(item) for item in epoch] for epoch in items_of("DataLoader 2", pipe, 2)] == [[(11,), (21,)]] * 2


# Stages whose items depend on the worker


def samples(urls: str) -> Any:
    return ShardList(urls).sharding_filter().load_wds_shards().group_samples()


def test_batches_of_all_workers_are_mixed_in_the_main_process(pattern: str) -> None:
    pipe = samples(pattern).wds_decode().select_fields("cls").batch(4).collate()
    loader = loader_of("DataLoader2 2", pipe)
    mixed = IterableWrapper(loader, deepcopy=False).unbatch_samples().shuffle_samples(20).batch(8).collate()
    epochs = []
    for _ in range(2):
        batches = list(mixed)
        assert [len(batch["cls"]) for batch in batches] == [8] * 4
        assert all({key[0] for key in batch["__key__"]} > {batch["__key__"][0][0]} for batch in batches[:2])
        pairs = [pair for batch in batches for pair in zip(batch["__key__"], batch["cls"].tolist(), strict=True)]
        assert sorted(pairs) == [(key, int(key[2:])) for key in ALL_KEYS]
        epochs.append(pairs)
    assert epochs[0] != epochs[1]
    loader.shutdown()


def test_each_worker_and_epoch_draws_another_subset_that_the_seed_repeats(tmp_path: Path) -> None:
    pattern = write_numbered(tmp_path, [60] * 2)

    def epochs(seed: int) -> list[list[str]]:
        pipe = samples(pattern).rsample(0.5)
        loader = DataLoader(pipe, None, num_workers=2, generator=torch.Generator().manual_seed(seed))
        return [keys_of(loader) for _ in range(2)]

    first, second = epochs(1)
    assert [first, second] == epochs(1)
    assert first != second
    assert first != epochs(2)[0]
    assert 30 < len(first) == len({*first}) < 90
    assert {key[2:] for key in first if key[0] == "0"} != {key[2:] for key in first if key[0] == "1"}


def test_the_shard_is_closed_before_the_last_sample_leaves(pattern: str) -> None:
    def opened() -> set[str]:
        return {Path(file.path).name for file in psutil.Process().open_files() if file.path.endswith(".tar")}

    iterator = iter(samples(pattern).slice_samples(2))
    next(iterator)
    assert opened() == {"0.tar"}
    next(iterator)
    assert opened() == set()
    assert list(iterator) == []


def test_an_empty_stream_is_an_error_after_the_split_only(pattern: str) -> None:
    one = pattern.replace("{0..4}", "0")
    before = ShardList(one).non_empty().sharding_filter().load_wds_shards().group_samples()
    assert len(items_of("DataLoader 2", before)[0]) == 7
    for kind, pipe in (("DataLoader 2", before.non_empty()), ("DataLoader 0", before.filter(callable).non_empty())):
        with pytest.raises(EmptySourceError, match=r"no items from .*The shards may be empty") as caught:
            items_of(kind, pipe)
        traceback.clear_frames(caught.tb)
