"""The headline pipeline under every loader: each sample exactly once, and errors with their type and text."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardList
from wds_datapipes.errors import DecodeError, MissingFieldError, ShardOpenError, TruncatedShardError
from wds_datapipes.testing import build_shard

#: Shards contain uneven numbers of samples, like real ones.
SAMPLES_PER_SHARD = [7, 1, 12, 3, 9]
ALL_KEYS = sorted(f"{shard}-{index:02d}" for shard, count in enumerate(SAMPLES_PER_SHARD) for index in range(count))

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # by StatefulDataLoader, of torch
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine with few cores
]

Loader = Callable[[IterDataPipe[Any]], Any]
Open = Callable[[str, IterDataPipe[Any]], Any]


def _dataloader2(service: Callable[[], Any] | None = None) -> Loader:
    return lambda pipe: DataLoader2(pipe, reading_service=None if service is None else service())


def _stock(workers: int, **options: Any) -> Loader:
    return _dataloader2(partial(MultiProcessingReadingService, num_workers=workers, **options))


def _torch(loader: Any, workers: int) -> Loader:
    return partial(loader, batch_size=None, num_workers=workers)


LOADERS: dict[str, Loader] = {
    "DataLoader2": _dataloader2(),
    "DataLoader2 in process": _dataloader2(InProcessReadingService),
    **{f"DataLoader2, {workers} workers": _stock(workers) for workers in (1, 2, 3, 7)},
    "DataLoader2, no prefetching": _stock(2, worker_prefetch_cnt=0, main_prefetch_cnt=0),
    "DataLoader2, spawned workers": _stock(2, multiprocessing_context="spawn"),
    **{f"DataLoader, {workers} workers": _torch(DataLoader, workers) for workers in (0, 1, 2, 3, 7)},
    **{f"StatefulDataLoader, {workers} workers": _torch(StatefulDataLoader, workers) for workers in (0, 2)},
}
#: One loader of each kind, for tests that do not depend on the number of workers.
KINDS = ["DataLoader2", "DataLoader2, 2 workers", "DataLoader, 0 workers", "DataLoader, 2 workers"]


@pytest.fixture
def load() -> Iterator[Callable[[str, IterDataPipe[Any]], Any]]:
    opened: list[Any] = []

    def open_loader(name: str, pipe: IterDataPipe[Any]) -> Any:
        opened.append(LOADERS[name](pipe))
        return opened[-1]

    yield open_loader
    for loader in opened:
        if isinstance(loader, DataLoader2):
            loader.shutdown()


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    for shard, count in enumerate(SAMPLES_PER_SHARD):
        build_shard(
            tmp_path / f"train-{shard}.tar",
            [
                {"__key__": f"{shard}-{index:02d}", "txt": f"sample {index}", "cls": str(index)}
                for index in range(count)
            ],
        )
    return str(tmp_path / "train-{0..4}.tar")


def pipeline(urls: str) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = (
        ShardList(urls)
        .shuffle()
        .sharding_filter()
        .load_wds_shards()
        .group_samples()
        .shuffle_samples(4)
        .wds_decode()
        .to_tuple("__key__", "txt", "cls")
    )
    return pipe


@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_comes_exactly_once_per_epoch(load: Open, name: str, pattern: str) -> None:
    loader = load(name, pipeline(pattern))
    for _ in range(2):
        received = list(loader)
        assert sorted(key for key, _, _ in received) == ALL_KEYS
        assert all(text == f"sample {label}" and key.endswith(f"-{label:02d}") for key, text, label in received)


@pytest.mark.parametrize("name", KINDS)
def test_batches_made_in_workers_contain_each_sample_exactly_once(load: Open, name: str, pattern: str) -> None:
    received = [key for keys, _, _ in load(name, pipeline(pattern).batch(4).collate()) for key in keys]
    assert sorted(received) == ALL_KEYS


def _truncated(urls: str) -> str:
    os.truncate(urls.replace("{0..4}", "2"), 5400)
    return urls


def _undecodable(urls: str) -> str:
    build_shard(urls.replace("{0..4}", "2"), [{"__key__": "bad", "txt": "x", "cls": "seven"}])
    return urls


def _without_field(urls: str) -> str:
    build_shard(urls.replace("{0..4}", "2"), [{"__key__": "bare", "cls": "7"}])
    return urls


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (_truncated, TruncatedShardError, r"train-2\.tar ends inside a header, at byte 5400"),
        (_undecodable, DecodeError, r"train-2\.tar.*'bad'|'bad'.*train-2\.tar"),
        (_without_field, MissingFieldError, r"the field 'txt' was requested, but the sample 'bare' of .*train-2\.tar"),
        (lambda urls: urls + "::gone.tar", ShardOpenError, r"gone\.tar"),
    ],
    ids=["truncated", "undecodable", "without a field", "missing"],
)
def test_an_error_arrives_with_its_type_and_text(
    load: Open, name: str, pattern: str, damage: Callable[[str], str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        list(load(name, pipeline(damage(pattern))))
    # A frame of torch holds the error and the workers; garbage collection would take 5 seconds to end them.
    traceback.clear_frames(caught.tb)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_seed_gives_new_epochs_and_the_same_run_again(pattern: str, workers: int) -> None:
    def run(seed: int) -> list[list[str]]:
        loader = DataLoader2(pipeline(pattern), reading_service=MultiProcessingReadingService(num_workers=workers))
        loader.seed(seed)
        epochs = [[key for key, _, _ in loader] for _ in range(3)]
        loader.shutdown()
        return epochs

    first = run(1)
    assert first[0] != first[1] != first[2] != first[0]
    assert run(1) == first
    assert run(2) != first


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle")
def test_lambdas_reach_forked_workers_of_torch() -> None:
    """torch pickles the collections in a stage's attributes, and would fail on those that contain a lambda."""
    pipe = IterableWrapper([{"n": 1}, {"n": 2}]).sharding_filter().compose(lambda samples: list(samples))
    pipe = pipe.map_dict(n=lambda n: 10 * n).map_samples(lambda sample: sample).to_tuple("n").map_tuple(lambda n: n + 1)
    loader = DataLoader(pipe, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [tuple(item) for item in loader] == [(11,), (21,)]
