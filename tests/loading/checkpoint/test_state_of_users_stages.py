"""User stages that may buffer samples and have no state resume by replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from error_facts import naming
from numbered_shards import key_of, numbered_shards
from pipeline_table import Declared, Pairs
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher
from torchdata.dataloader2 import DataLoader2
from users_stages import Buckets, OwnShuffler, Unchanged

from wds_datapipes import ShardList, ShardReadingService, Stage
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.graph import PipelineGraph

Pipe = IterDataPipe[Any]


shards = numbered_shards([20] * 3)


class Plain(Stage[Any]):
    """Makes one item from each, without declaring it."""

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield key_of(item)


class OtherLoop(Declared):
    """Inherits a declaration that was made for another loop."""

    def __iter__(self) -> Iterator[Any]:
        yield from [*self.source]


class Overlapping(Batcher):
    """A loop other than torch's, which keeps an item of each batch for the next one."""

    def __iter__(self) -> Iterator[Any]:
        before = None
        for item in self.datapipe:
            yield [before, item]
            before = item


class Twice(Plain):
    """Makes a false declaration: it yields two items for each."""

    is_stateless = True

    def __iter__(self) -> Iterator[Any]:
        for item in self.source:
            yield item["__key__"], 0
            yield item["__key__"], 1


class Unloadable(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Undeclared(Unchanged):
    """Has the usual methods for a state, but is not a `Stage`."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OfSets(Pairs):
    def state_dict(self) -> dict[str, Any]:
        return {"before": {*self.before}}


def first_of(batch: list[Any]) -> Any:
    return batch[0]


def source() -> Any:
    return ShardList("{0..2}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()


ASKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "plain": (
        Plain,
        r"test_state_of_users_stages\.Plain may hold samples back, .*Derive it .* set is_stateless = True in its class",
    ),
    "another loop": (OtherLoop, "OtherLoop may hold samples back"),
    "torch's shuffler": (
        OwnShuffler,
        r"OwnShuffler has no position in the shards\. Use \.shuffle_samples\(n\) for samples",
    ),
    "torch's batcher": (
        lambda pipe: Overlapping(pipe, 2),
        r"Overlapping may hold .* of BatcherIterDataPipe do not apply",
    ),
    "before a shuffle": (
        lambda pipe: Pairs(pipe).shuffle_samples(4),
        r"Pairs has its own state and comes before SampleShuffler\. .* Put Pairs after SampleShuffler",
    ),
    "not to be loaded": (Unloadable, r"Unloadable has state_dict\(\) but no load_state_dict\(\)"),
    "no Stage": (Undeclared, r"Undeclared may hold samples back, .* Derive it from wds_datapipes\.Stage"),
    "positions behind a batch": (
        lambda pipe: Buckets(pipe.batch(2).map(first_of), 3),
        r"Buckets records the positions of the individual samples .* Put it before \.batch\(\)",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_stages_that_may_buffer_samples_are_named(case: str) -> None:
    build, message = ASKED[case]
    with pytest.raises(StateError, match=message):
        PipelineGraph(build(source())).stateful_stages()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_values_that_are_not_json_is_refused(workers: int) -> None:
    pipe: Any = OfSets(source())
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as loader:
        next(iter(loader))
        with pytest.raises((StateError, TypeError), match=r"OfSets must contain only JSON values|not JSON"):
            loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_items_that_share_an_address_in_a_shuffle_are_noticed(workers: int) -> None:
    """Reading either of them again would also yield the other."""
    pipe: Any = Twice(source())
    with DataLoader2(pipe.shuffle_samples(6), reading_service=ShardReadingService(workers)) as loader:
        next(iter(loader))
        with pytest.raises(StateError, match=naming("stateless", "one sample")):
            loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stage_in_a_stream_keeps_what_it_has_from_one_epoch_to_the_next(workers: int) -> None:
    """A new epoch used to reset the stages of a pass that continues."""
    keys = [f"{number // 20}-{number % 20}" for number in range(21)]
    pipe: Any = Pairs(ShardList("{0..2}.tar").load_wds_shards().group_samples()).with_epoch(7)
    with DataLoader2(pipe, reading_service=ShardReadingService(workers)) as made:
        found = [*made, *made, *made]
    assert found == [tuple(keys[max(last - 2, 0) : last + 1]) for last in range(21)]
