"""A loader passes its service the pipeline and the number of the next epoch before each epoch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from data_parallel_pipelines import open_loader
from error_facts import naming
from numbered_shards import numbered_shards
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import (
    DataLoader2,
    DistributedReadingService,
    InProcessReadingService,
    SequentialReadingService,
)
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes import ShardList, ShardReadingService, StatefulShards
from wds_datapipes.epoch import NO_EPOCH, seed_after
from wds_datapipes.errors import StateError
from wds_datapipes.loading.loader_seed import seed_loader
from wds_datapipes.seeds import seed_of

pytestmark = pytest.mark.usefixtures("one_rank")

shards = numbered_shards([5, 0, 7, 1, 6])


def pipeline(urls: str = "{0..4}.tar", buffer_size: int = 4) -> Any:
    pipe = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples()
    return pipe.shuffle_samples(buffer_size).to_tuple("__key__")


def sequential(workers: int) -> SequentialReadingService:
    return SequentialReadingService(DistributedReadingService(), ShardReadingService(workers))


SERVICES: dict[str, Callable[[], Any]] = {
    "no workers": ShardReadingService,
    "distributed": partial(ShardReadingService, 1, distributed=True),
    "sequential": partial(sequential, 2),
}
every_service = pytest.mark.parametrize("new_service", SERVICES.values(), ids=SERVICES.keys())
with_states = pytest.mark.parametrize("new_service", [*SERVICES.values()][:2], ids=[*SERVICES.keys()][:2])


def refused_if_broken(item: Any) -> Any:
    if Path("broken").exists():
        raise ValueError(f"{item} is broken")
    return item


def loader_of(service: Any, seed: int = 3, pipe: IterDataPipe[Any] | None = None) -> Any:
    return open_loader(pipeline() if pipe is None else pipe, service, seed=seed)


def chosen(loader: Any, *numbers: int) -> list[list[Any]]:
    found = []
    for number in numbers:
        loader.set_epoch(number)
        found.append(list(loader))
    return found


# the number of the epoch


@every_service
def test_the_order_of_a_chosen_epoch_depends_only_on_seed_and_number(new_service: Any) -> None:
    with loader_of(new_service()) as loader:
        orders = chosen(loader, 0, 1, 5)
    assert len(set(map(str, orders))) == 3
    with loader_of(new_service()) as loader:  # later, and after epochs that were not chosen
        list(loader)
        next(iter(loader))
        assert chosen(loader, 5) == orders[2:]
        list(loader)
        assert chosen(loader, 1, 0) == orders[1::-1]
        loader.seed(3)
        assert chosen(loader, 1) == orders[1:2]
        next(iter(loader))
        if isinstance(loader.reading_service, SequentialReadingService):
            with pytest.raises(StateError, match="has no state after another reading service, DistributedReading"):
                loader.state_dict()
            return
        state = loader.state_dict()
    with loader_of(new_service()) as loader:
        loader.load_state_dict(state)
        list(loader)
        assert chosen(loader, 5, 0) == [orders[2], orders[0]]
        list(loader)
        between = loader.state_dict()
    with loader_of(new_service()) as loader:
        loader.load_state_dict(between)
        assert chosen(loader, 1) == orders[1:2]
    with loader_of(new_service(), seed=4) as loader:
        assert chosen(loader, 0, 1, 5) != orders


def test_a_chosen_epoch_is_shared_by_ranks_after_a_service_that_spawns() -> None:
    """Draws before the split are the same on all ranks; draws after it are not."""
    drawn = set()
    for rank, before in itertools.product(range(2), range(3)):
        epoch, generator = NO_EPOCH, SeedGenerator(9)
        for number in range(before + 1):
            generator.seed(generator.generate_shared_seed())  # as DistributedReadingService does
            generator.spawn(rank, inplace=True)
            if number == before:
                epoch = replace(epoch, wanted=6)
            epoch = epoch.follow(seed_of(generator))
            seed_loader(generator, epoch.seed, rank)
            found = rank, generator.generate_shared_seed(), generator.generate_seed()
            generator.seed(epoch.next)
        drawn.add(found)
    assert len(drawn) == 2  # whatever was before
    assert len({shared for _, shared, _ in drawn}) == 1
    assert len({own for *_, own in drawn}) == 2


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, "1", True, None])
def test_a_seed_is_an_unsigned_integer_of_64_bits(seed: Any) -> None:
    with DataLoader2(pipeline(), reading_service=ShardReadingService()) as loader:
        with pytest.raises((TypeError, ValueError), match=r"^seed must be .*integer") as raised:
            loader.seed(seed)
        with pytest.raises(raised.type, match=f"^{re.escape(str(raised.value))}$"):
            StatefulShards(pipeline(), seed=seed)
        loader.seed((1 << 64) - 1)
        assert len(list(loader)) == 19


def test_ranks_agree_on_epochs_if_only_the_first_is_reseeded() -> None:
    def run(rank: int) -> Iterator[tuple[int, int, int]]:
        epoch, seed = NO_EPOCH, rank
        for number in range(4):
            if number == 2 and rank == 0:
                seed = 77
            if number == 3:
                epoch = replace(epoch, wanted=5)
            epoch = epoch.follow(shared.setdefault(seed, seed) if rank == 0 else list(shared)[-1])
            yield epoch.seed, epoch.first, epoch.number
            seed = seed_after(epoch.seed)

    shared: dict[int, int] = {}
    draws_of_ranks = list(zip(run(0), run(1), strict=True))
    assert all(one == other for one, other in draws_of_ranks)
    assert [epoch for (_, _, epoch), _ in draws_of_ranks] == [0, 1, 0, 5]


@with_states
def test_a_state_contains_a_chosen_epoch_that_has_not_begun(new_service: Any) -> None:
    with loader_of(new_service()) as loader:
        (expected,) = chosen(loader, 8)
    states = {}
    with loader_of(new_service()) as loader:
        loader.set_epoch(8)
        states["before the first"] = loader.state_dict()
        loader.set_epoch(2)
        items = iter(loader)
        next(items)
        loader.set_epoch(8)
        states["in an epoch"] = loader.state_dict()
        rest = list(items)
        states["between two"] = loader.state_dict()
    for name, state in states.items():
        with loader_of(new_service()) as loader:
            loader.load_state_dict(state)
            if name == "in an epoch":
                loader.set_epoch(2)  # a trainer may call set_epoch() again
                assert list(loader) == rest
            assert list(loader) == expected, name
        with loader_of(new_service()) as loader:
            loader.load_state_dict(state)
            if name == "in an epoch":
                assert list(loader) == rest
            assert chosen(loader, 8) == [expected], name
    with loader_of(new_service()) as loader:
        loader.load_state_dict(states["in an epoch"])
        loader.set_epoch(3)
        with pytest.raises(StateError, match=naming("set_epoch(3)", "epoch 2")):
            next(iter(loader))


@pytest.mark.parametrize("service", [None, InProcessReadingService()])
def test_a_loader_without_our_service_has_no_set_epoch(service: Any) -> None:
    with loader_of(service) as loader:
        assert not hasattr(loader, "set_epoch")


# the pipeline


@with_states
@pytest.mark.parametrize("cut", [None, 0, 6])
def test_a_state_is_refused_by_a_loader_with_another_pipeline(new_service: Any, cut: int | None) -> None:
    """The state of a loader that has not begun (None) also identifies the pipeline."""
    with loader_of(new_service()) as loader:
        if cut is not None:
            items = iter(loader)
            list(itertools.islice(items, cut))
        state = loader.state_dict()
    with loader_of(new_service(), pipe=pipeline("{0..3}.tar")) as loader:
        with pytest.raises(StateError, match=r"different pipeline.* was ShardList\(.*, and is ShardList\("):
            loader.load_state_dict(state)
        assert len(list(loader)) == 13  # in place of its own pipeline
    with (
        loader_of(new_service(), pipe=pipeline(buffer_size=5)) as loader,
        pytest.raises(StateError, match=r"stage 1 was SampleShuffler\(.*4.*, and is SampleShuffler\(.*5"),
    ):
        loader.load_state_dict(state)
    with loader_of(new_service()) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 19 - (cut or 0)
    with (
        DataLoader2(None, reading_service=new_service()) as loader,
        pytest.raises(StateError, match=r"contains no pipeline.* DataLoader2\(pipe, reading_service="),
    ):
        loader.load_state_dict(state)


def test_pausing_needs_workers_and_a_limit_does_not() -> None:
    with DataLoader2(IterableWrapper(range(9)), reading_service=ShardReadingService(num_workers=0)) as loader:
        items = iter(loader)
        items.limit(2)
        assert [*items] == [0, 1]
        items.resume()
        assert [*items] == [2, 3]
        items.limit(None)
        items.resume()
        with pytest.raises(RuntimeError, match="no worker processes to pause"):
            loader._pause()
        with pytest.raises(RuntimeError, match="no worker processes to resume"):
            loader._resume()


def test_a_stream_has_a_state_after_an_error_in_a_later_epoch() -> None:
    """The error may come before the other worker has said where it continues."""

    def stream() -> Any:
        return pipeline().map(refused_if_broken).with_epoch(7)

    with loader_of(ShardReadingService(2), pipe=stream()) as loader:
        _, *later = [list(loader) for _ in range(3)]
    with loader_of(ShardReadingService(2), pipe=stream()) as loader:
        list(loader)
        Path("broken").touch()
        with pytest.raises(ValueError, match="is broken"):
            next(iter(loader))
        state = loader.state_dict()
    Path("broken").unlink()
    with loader_of(ShardReadingService(2), pipe=stream()) as loader:
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == later
