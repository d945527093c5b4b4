"""Lists of shards are the same in all workers and after a resume, whatever is drawn before they are split."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_parallel_pipelines import open_service
from error_facts import naming
from numbered_shards import key_of, numbered_shards, write_numbered
from sweeps import WHOLE
from torch.utils.data import DataLoader, IterDataPipe, RandomSampler
from torch.utils.data.datapipes.iter import FileLister, IterableWrapper, Sampler
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from users_stages import Unchanged

from wds_datapipes import ShardList, StatefulShards, merge_states
from wds_datapipes.errors import ChangedShardError

SHARDS, SAMPLES = 8, 3


class Shuffled(IterDataPipe[str]):
    """A user's stage that draws from a global generator, either all at once or with each item."""

    def __init__(self, source: IterDataPipe[str], how: str) -> None:
        self.source = source
        self.how = how

    def __iter__(self) -> Iterator[str]:
        urls = list(self.source)
        if self.how == "random":
            random.shuffle(urls)
        elif self.how == "numpy":
            urls = [urls[number] for number in np.random.permutation(len(urls))]
        elif self.how == "torch":
            urls = [urls[int(number)] for number in torch.randperm(len(urls))]
        elif self.how == "uuid":
            urls.sort(key=lambda _: uuid.uuid4())
        while urls:
            yield urls.pop(random.randrange(len(urls)) if self.how == "each" else 0)


class Named(Unchanged):
    """Names shards by numbers."""

    def __iter__(self) -> Iterator[str]:
        for number in self.source:
            yield f"{number}.tar"


def listed(how: str) -> IterDataPipe[str]:
    if how == "sampler":
        return Named(Sampler(IterableWrapper(range(SHARDS)), RandomSampler))
    return Shuffled(ShardList(f"{{0..{SHARDS - 1}}}.tar"), how)


def keys_of(urls: IterDataPipe[str]) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = urls.sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
    return pipe


shards = numbered_shards([SAMPLES] * SHARDS)
with_service = partial(open_service, seed=3)


ALL = sorted(f"{number}-{n}" for number in range(SHARDS) for n in range(SAMPLES))


DRAWING = ["random", "numpy", "torch", "each", "sampler"]


@pytest.mark.parametrize("how", DRAWING)
def test_draws_before_the_split_are_the_same_in_all_workers(how: str) -> None:
    orders = []
    for workers in (0, 2, 3) if WHOLE else (0, 2):
        with with_service(keys_of(listed(how)), workers) as loader:
            epochs = [[key for (key,) in loader] for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == ALL
        assert epochs[0] != epochs[1]
        orders.append(epochs)
    data = StatefulShards(keys_of(listed(how)), seed=3)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    assert [[key for (key,) in loader] for _ in range(2)] == orders[1]


@pytest.mark.parametrize("how", ["each", "sampler"])
def test_draws_before_the_split_are_the_same_under_other_loaders(how: str) -> None:
    torch.manual_seed(7)  # from which the loaders draw their seeds
    loader = DataLoader(keys_of(listed(how)), batch_size=None, num_workers=2)
    epochs = [[key for (key,) in loader] for _ in range(2)]
    with DataLoader2(keys_of(listed(how)), reading_service=MultiProcessingReadingService(2)) as loader:
        epochs += [[key for (key,) in loader] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [ALL] * 4
    assert len({*map(tuple, epochs)}) == 4, epochs


@pytest.mark.parametrize("how", DRAWING)
def test_draws_before_the_split_resume_exactly(how: str) -> None:
    with with_service(keys_of(listed(how)), 2) as loader:
        items = iter(loader)
        begun = [next(items) for _ in range(7)]
        state = loader.state_dict()
        rest, following = list(items), list(loader)
    with with_service(keys_of(listed(how)), 2, state) as loader:
        assert (list(loader), list(loader)) == (rest, following)
    with with_service(keys_of(listed(how)), 3, merge_states([state])) as loader:
        assert sorted(key for (key,) in begun + list(loader)) == ALL


def of_lister() -> IterDataPipe[Any]:
    return keys_of(FileLister(".", "*.tar"))


def cut(pipe: IterDataPipe[Any], workers: int, items: int) -> tuple[list[str], Any]:
    with with_service(pipe, workers) as loader:
        iterator = iter(loader)
        found = [key for (key,) in (next(iterator) for _ in range(items))]
        return found, loader.state_dict()


@pytest.mark.parametrize(("workers", "items"), [(0, SAMPLES), (2, 1), (2, 2 * SAMPLES)])
@pytest.mark.parametrize("then", [0, 3])
def test_a_shard_added_before_the_resume_is_noticed(workers: int, then: int, items: int) -> None:
    found, state = cut(of_lister(), workers, items)
    shutil.copyfile("0.tar", "+.tar")  # it sorts before the existing shards
    with (
        with_service(of_lister(), then, merge_states([state])) as loader,
        pytest.raises(
            ChangedShardError, match=r"list of shards has changed.*up to .*\d.tar.*now begins .*up to .*[+\d].tar"
        ),
    ):
        found += [key for (key,) in loader]
    os.remove("+.tar")
    with with_service(of_lister(), then, merge_states([state])) as loader:
        assert sorted(cut_again := [key for (key,) in loader]) == sorted((Counter(ALL) - Counter(found)).elements())
    assert cut_again


def mixed() -> IterDataPipe[Any]:
    sources = [
        FileLister(".", masks).sharding_filter().load_wds_shards().group_samples()
        for masks in ("[0-3].tar", "[4-7].tar")
    ]
    pipe: IterDataPipe[Any] = sources[0].mix_samples(sources[1], stop="all").shuffle_samples(3).to_tuple("__key__")
    return pipe


def passes() -> IterDataPipe[Any]:
    samples = FileLister(".", "*.tar").sharding_filter().load_wds_shards().group_samples()
    pipe: IterDataPipe[Any] = samples.with_epoch(10).to_tuple("__key__")
    return pipe


@pytest.mark.parametrize("make", [mixed, passes])
def test_the_lists_of_mixtures_and_of_streams_are_checked(make: Any) -> None:
    found, state = cut(make(), 2, 7)
    with with_service(make(), 2, state) as loader:
        rest = [key for (key,) in loader]
    assert sorted(found + rest) == ALL if make is mixed else len(rest) == 3
    shutil.copyfile("4.tar", "00.tar" if make is passes else "40.tar")
    os.remove("4.tar")
    with with_service(make(), 2, state) as loader, pytest.raises(ChangedShardError, match="list of shards has changed"):
        list(loader)


def with_draws(sample: dict[str, Any]) -> tuple[Any, ...]:
    return sample["__key__"], random.random(), float(np.random.random()), torch.rand(1).item()


def drawing() -> IterDataPipe[Any]:
    urls = ShardList(f"{{0..{SHARDS - 1}}}.tar").shuffle().sharding_filter()
    pipe: IterDataPipe[Any] = urls.load_wds_shards().group_samples().map(with_draws)
    return pipe


def drawn_by(items: Any) -> set[float]:
    return {number for _, *numbers in items for number in numbers}


def rest_with_service(state: Any, workers: int) -> list[Any]:
    with with_service(drawing(), workers, state) as loader:
        return list(loader)


def rest_with_data_loader(state: Any, workers: int) -> list[Any]:
    data = StatefulShards(drawing(), seed=3)
    data.load_state_dict(state)
    return list(DataLoader(data, batch_size=None, num_workers=workers))


@pytest.mark.parametrize("rest", [rest_with_service, rest_with_data_loader])
@pytest.mark.parametrize("workers", [2, 3])
def test_global_generators_do_not_repeat_their_numbers_after_a_resume(rest: Any, workers: int) -> None:
    with with_service(drawing(), 2) as loader:
        items = iter(loader)
        begun, states = [], []
        for _ in range(2):
            begun += [next(items) for _ in range(5)]
            states.append(merge_states([loader.state_dict()]))
        begun += items
    resumed = [rest(state, workers) for state in states]
    assert sorted(key for key, *_ in resumed[1]) == sorted({*ALL} - {key for key, *_ in begun[:10]})
    for found in resumed:
        assert not drawn_by(found) & drawn_by(begun)
    assert not drawn_by(resumed[0]) & drawn_by(resumed[1])
    assert rest(states[1], workers) == resumed[1]


def test_lists_that_differ_between_workers_are_an_error() -> None:
    with (
        with_service(keys_of(listed("uuid")), 2) as loader,
        pytest.raises(RuntimeError, match=naming("Worker 1", "Worker 0", "8 items", "sort it")),
    ):
        list(loader)
    with with_service(keys_of(listed("none")), 3) as loader:
        assert sorted(key for (key,) in loader) == ALL
        assert sorted(key for (key,) in loader) == ALL


def test_workers_of_a_resumed_stream_may_be_in_different_passes(folder: Path) -> None:
    write_numbered(folder, [2, 10, 2, 10])

    def stream(state: Any = None) -> Any:
        pipe = ShardList("{0..3}.tar").shuffle().sharding_filter().load_wds_shards().group_samples().map(key_of)
        return open_service(pipe.with_epoch(9), 2, state)

    with stream() as loader:
        states, epochs = zip(*[(loader.state_dict(), list(loader)) for _ in range(8)], strict=True)
    with stream(states[4]) as loader:
        assert [list(loader) for _ in range(4)] == [*epochs[4:]]
