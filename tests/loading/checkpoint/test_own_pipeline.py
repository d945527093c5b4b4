"""A state resumes the pipeline of the loader that loads it, and contains no part of the original pipeline."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_parallel_pipelines import open_loader
from numbered_shards import numbered_shards
from sweeps import WHOLE
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2, InProcessReadingService, SequentialReadingService

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import checkpoints_in
from wds_datapipes.shards.position import unpack_positions
from wds_datapipes.testing import build_shard

Pipe = IterDataPipe[Any]

#: The number of batches to read; `nox -s nightly` reads more.
BATCHES = int(os.environ.get("RESUME_BATCHES", "4_000"))
KEYS = sorted(f"{shard}-{number}" for shard in range(4) for number in range(5))


shards = numbered_shards([5] * 4)


def resized(sample: dict[str, Any], size: int) -> tuple[str, int]:
    return sample["__key__"], size


def pipeline(size: int = 224, urls: Any = "{0..3}.tar", **options: Any) -> Pipe:
    shards = urls if isinstance(urls, IterDataPipe) else ShardList(urls)
    samples = shards.shuffle().sharding_filter().load_wds_shards(**options).group_samples()
    pipe: Pipe = samples.shuffle_samples(6).map_samples(partial(resized, size=size))
    return pipe


def loader_of(pipe: Pipe, service: Any = None, seed: int | None = 3) -> Any:
    return open_loader(pipe, ShardReadingService(2) if service is None else service, seed=seed)


def state_after(count: int, pipe: Pipe, service: Any = None) -> tuple[dict[str, Any], list[Any]]:
    """Return the state after ``count`` items of the second epoch, and the items that follow."""
    with loader_of(pipe, service) as loader:
        list(loader)
        items = iter(loader)
        list(itertools.islice(items, count))
        return loader.state_dict(), list(items)


# the resumed pipeline


def test_a_changed_transform_is_an_error_that_names_it() -> None:
    state, _ = state_after(7, pipeline(224))
    with (
        loader_of(pipeline(256)) as loader,
        pytest.raises(StateError, match=r"stage 0 was .*partial of resized #.*, and is .*partial of resized #"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("list_of", [ShardList, IterableWrapper])
@pytest.mark.parametrize(
    "signed",
    [
        "file://{folder}/{shard}.tar?X-Amz-Signature={secret}",
        "pipe:cat {folder}/{shard}.tar # -H 'Authorization: Bearer {secret}'",
    ],
)
def test_no_state_contains_credentials_of_urls_and_they_may_be_renewed(signed: str, list_of: Any) -> None:
    def urls(secret: str) -> list[str]:
        return [signed.format(folder=Path.cwd(), shard=shard, secret=secret) for shard in range(4)]

    def pipe(secret: str) -> Pipe:
        return pipeline(urls=list_of(urls(secret)))

    if signed.startswith("file:"):
        for url in [*urls("0ld"), *urls("n3w")]:
            Path(url.removeprefix("file://")).symlink_to(url.removeprefix("file://").partition("?")[0])
    state, rest = state_after(7, pipe("0ld"))
    assert "0ld" not in json.dumps(state)
    with loader_of(pipe("n3w")) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


# the size of a state


def test_a_state_does_not_grow_with_the_number_of_urls_or_entries() -> None:
    sizes = []
    for count in (4, 2_000 if WHOLE else 400):
        urls = [f"{number % 4}.tar" for number in range(count)]
        table = {f"key-{number:06}": {"label": number} for number in range(20 * count)}
        pipe = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()
        pipe = pipe.associate(table, missing="keep").shuffle_samples(6).to_tuple("__key__")
        with loader_of(pipe, ShardReadingService(2)) as loader:
            sizes.append([len(pickle.dumps(loader.state_dict()))])
            items = iter(loader)
            next(items)
            sizes[-1].append(len(pickle.dumps(loader.state_dict())))
    assert all(abs(many - few) < 50 for few, many in zip(*sizes, strict=True))
    assert max(map(max, sizes)) < 2048


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_state_is_small_json_without_payload(workers: int) -> None:
    secret = "payload" * 10
    for shard in range(12):
        samples = [{"__key__": f"{shard}-{number}", "txt": secret} for number in range(100)]
        build_shard(f"much-{shard:02}.tar", samples)
    urls = ShardList("much-{00..11}.tar").shuffle().sharding_filter()
    pipe = urls.load_wds_shards().group_samples().shuffle_samples(300).to_tuple("__key__")
    largest = 0
    with loader_of(pipe, ShardReadingService(workers)) as loader:
        for number, _ in enumerate(loader):
            if number % 100 == 0:
                (state,) = loader.state_dict().values()
                stages = [stage or {} for part in checkpoints_in(state)[0].parts for stage in part.stages or ()]
                waiting = sum(len(unpack_positions(stage.get("waiting", ()))) for stage in stages)
                assert secret not in state
                assert len(state) <= 1024 * max(workers, 1) + 6 * waiting
                largest = max(largest, waiting)
    assert largest >= 100


def test_the_main_process_does_not_grow_while_states_are_saved() -> None:
    for shard in range(4):
        build_shard(f"many-{shard}.tar", [{"__key__": f"{shard}-{n}", "txt": "x" * (n % 700)} for n in range(500)])
    urls = ShardList([f"many-{shard}.tar" for shard in range(4)] * 8).shuffle().sharding_filter()
    pipe = urls.load_wds_shards().group_samples().shuffle_samples(100).to_tuple("__key__").batch(4)
    process, sizes = psutil.Process(), []
    with loader_of(pipe) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # 4,000 in an epoch
        for number in range(BATCHES):
            next(batches)
            if number % 100 == 99:
                loader.state_dict()
            if number % (BATCHES // 10) == BATCHES // 10 - 1:
                gc.collect()
                sizes.append(process.memory_info().rss)
    # The first batches allocate buffers and import modules.
    assert min(sizes[-3:]) - max(sizes[:3]) < 2 << 20, sizes


# the contents of a state


def test_a_state_contains_a_seed_that_no_epoch_has_begun_with() -> None:
    with loader_of(pipeline(), seed=8) as loader:
        first, second = list(loader), list(loader)
    with loader_of(pipeline(), seed=8) as loader:
        before = loader.state_dict()
        loader.set_epoch(1)
        chosen = list(loader)
    with loader_of(pipeline(), seed=3) as loader:
        list(loader)
        loader.seed(8)
        between = loader.state_dict()
    for state in (between, before):
        with loader_of(pipeline(), seed=None) as loader:
            loader.load_state_dict(state)
            assert [list(loader), list(loader)] == [first, second]
        with loader_of(pipeline(), seed=None) as loader:
            loader.load_state_dict(state)
            loader.set_epoch(1)
            assert list(loader) == chosen


# loading into a loader that has begun


SERVICES: dict[str, Callable[[], Any]] = {
    "no workers": ShardReadingService,
    "2 workers": partial(ShardReadingService, 2),
    "distributed": partial(ShardReadingService, 1, distributed=True),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("new_service", SERVICES.values(), ids=SERVICES.keys())
@pytest.mark.parametrize("came", [0, 3, len(KEYS) + 1])
def test_a_loader_that_has_begun_restarts_from_a_state(came: int, new_service: Callable[[], Any]) -> None:
    """Lightning asks each loader for an iterator before it loads its state."""
    state, rest = state_after(7, pipeline(), new_service())
    with loader_of(pipeline(), new_service()) as loader:
        items = iter(loader)
        list(itertools.islice(items, came))
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        with pytest.raises(RuntimeError, match="invalidated"):
            next(items)
        assert list(loader) == rest
        assert sorted(key for key, _ in loader) == KEYS
        loader.load_state_dict(state)
        assert list(loader) == rest


# states without a position


def test_a_state_of_torchdata_is_refused() -> None:
    with DataLoader2(pipeline(), reading_service=InProcessReadingService()) as loader:
        state = loader.state_dict()
    for load in (
        lambda: loader_of(pipeline()).load_state_dict(state),
        lambda: StatefulShards(pipeline()).load_state_dict(state),
    ):
        with pytest.raises(StateError, match="a state of torchdata: a pickled pipeline"):
            load()


def test_a_state_after_another_service_is_refused() -> None:
    state, _ = state_after(7, pipeline())
    service = SequentialReadingService(InProcessReadingService(), ShardReadingService())
    with loader_of(pipeline(), service) as loader:
        for act in (loader.state_dict, partial(loader.load_state_dict, state)):
            with pytest.raises(StateError, match="no state after another reading service, InProcessReadingService"):
                act()
