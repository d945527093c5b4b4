"""The items that a `ShardReadingService` yields depend only on the items that the workers make."""

from __future__ import annotations

import hashlib
import operator
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from sweeps import WHOLE
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardReadingService

# items of all types and sizes


@dataclass
class Example:
    """An item of a custom class."""

    key: str
    picture: Any
    label: int


def noise(size: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def square(size: int, seed: int) -> Any:
    side = max(int((size / 4) ** 0.5), 1)
    return noise(4 * side * side, seed).view(np.int32).reshape(side, side)


def frozen(size: int, seed: int) -> Any:
    array = noise(size, seed)
    array.flags.writeable = False
    return array


def planes(size: int, seed: int) -> Any:
    side = max(int((size / 3) ** 0.5), 1)
    return torch.from_numpy(noise(3 * side * side, seed).reshape(1, 3, side, side))


def image(size: int, seed: int) -> Any:
    side = max(int(size**0.5), 1)
    return Image.frombytes("L", (side, side), noise(side * side, seed).tobytes())


MAKERS: dict[str, Callable[[int, int], Any]] = {
    "number": lambda size, seed: seed,
    "none": lambda size, seed: None,
    "bytes": lambda size, seed: noise(size, seed).tobytes(),
    "bytearray": lambda size, seed: bytearray(noise(size, seed)),
    "text": lambda size, seed: noise(size, seed).tobytes().decode("latin1"),
    "array": noise,
    "array by columns": lambda size, seed: np.asfortranarray(square(size, seed)),
    "every second number of an array": lambda size, seed: noise(2 * size, seed)[::2],
    "read-only array": frozen,
    "array of objects": lambda size, seed: np.array([{"size": size}, None, seed], object),
    "tensor": lambda size, seed: torch.from_numpy(noise(size, seed)),
    "transposed tensor": lambda size, seed: torch.from_numpy(square(size, seed)).T,
    "tensor by pixels": lambda size, seed: planes(size, seed).to(memory_format=torch.channels_last),
    "half precision": lambda size, seed: torch.from_numpy(square(size, seed)).to(torch.bfloat16),
    "image": image,
    "sample": lambda size, seed: {"__key__": f"{seed}", "jpg": noise(size, seed).tobytes(), "cls": seed % 10},
    "nested": lambda size, seed: {"x": [noise(size, seed), (planes(size, seed), {"y": b"y" * size})], "n": None},
    "dataclass": lambda size, seed: Example(f"{seed}", [image(size, seed), square(size, seed)], seed),
}

#: Sizes around the limits for shared messages, separate arrays and shared memory, and larger ones.
SIZES = (1, 100, 5_000, 16_300, 16_384, 16_500, 65_000, 66_000, 300_000, 1_000_000)

#: The number of items that a worker makes in an epoch, and the seed of their values.
Share = tuple[int, int]


def make(worker: int, share: Share) -> Iterator[Any]:
    count, seed = share
    rng = random.Random(f"{worker} {seed}")
    for _ in range(count):
        size = rng.choice(SIZES if count < 12 else SIZES[:3])
        yield MAKERS[rng.choice(list(MAKERS))](size, rng.getrandbits(32))


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def seen(item: Any) -> Any:
    """Return everything that a user can observe of an item, as a small value that can be compared."""
    name = type(item).__name__
    if isinstance(item, (list, tuple)):
        return name, [seen(part) for part in item]
    if isinstance(item, dict):
        return name, [(key, seen(part)) for key, part in item.items()]
    if is_dataclass(item):
        return name, [seen(getattr(item, field.name)) for field in fields(item)]
    if isinstance(item, np.ndarray):
        data = repr(item) if item.dtype.hasobject else digest(item.tobytes())
        return name, item.dtype.str, item.shape, item.flags.writeable, data
    if isinstance(item, torch.Tensor):
        return name, str(item.dtype), tuple(item.shape), digest(item.contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(item, Image.Image):
        return "Image", item.mode, item.size, digest(item.tobytes())
    if isinstance(item, (bytes, bytearray)):
        return name, len(item), digest(item)
    return name, item


def spoil(item: Any) -> None:
    """Change everything mutable in an item."""
    if isinstance(item, (list, tuple)):
        for part in item:
            spoil(part)
    elif isinstance(item, dict):
        for part in item.values():
            spoil(part)
        item.clear()
    elif is_dataclass(item):
        for field in fields(item):
            spoil(getattr(item, field.name))
    elif isinstance(item, np.ndarray) and item.flags.writeable:
        item.fill(item.flat[-1])
    elif isinstance(item, torch.Tensor):
        item.fill_(7)
    elif isinstance(item, bytearray):
        item[:] = b"\7" * len(item)


# pipelines


class Planned(IterDataPipe[Any]):
    """Makes the planned items of each epoch and each worker.

    Args:
        epochs: for each epoch and each worker, its share.
        delays: a seed for how long each item takes, or None if it takes no time.
    """

    def __init__(self, epochs: Sequence[Sequence[Share]], delays: int | None = None) -> None:
        self.epochs = epochs
        self.delays = None if delays is None else random.Random(delays)
        self.epoch = -1
        self.worker = 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: object = None) -> None:
        self.worker = instance_id
        if self.delays is not None:
            self.delays.seed(self.delays.random() + instance_id)

    def __iter__(self) -> Iterator[Any]:
        for item in make(self.worker, self.epochs[self.epoch][self.worker]):
            if self.delays is not None:
                time.sleep(self.delays.choice((0, 0, 0, 0.0005, 0.003)))
            yield item


def next_epoch(pipe: Any, info: Any, seeds: Any) -> Any:
    pipe.epoch += 1
    return pipe


def round_robin(lines: Sequence[Sequence[Any]]) -> list[Any]:
    """Return one item from each list in turn; exhausted lists are skipped."""
    return [line[turn] for turn in range(max(map(len, lines), default=0)) for line in lines if turn < len(line)]


def expected(epoch: Sequence[Share]) -> list[Any]:
    return round_robin([[seen(item) for item in make(worker, share)] for worker, share in enumerate(epoch)])


Prefetches = tuple[int, int]


def load(pipe: IterDataPipe[Any], workers: int, prefetches: Prefetches, method: str = "fork") -> DataLoader2[Any]:
    reset_fn = next_epoch if isinstance(pipe, Planned) else None
    service = ShardReadingService(workers, method, *prefetches, worker_reset_fn=reset_fn)
    return DataLoader2(pipe, reading_service=service)


# random examples

#: The number of examples that start new processes; `nox -s nightly` tries more.
TIMES = 3 if WHOLE else 1

WORKERS = st.integers(0, 4)
#: In each worker, and in all workers together.
PREFETCHES = st.tuples(st.sampled_from((0, 1, 3, 10)), st.sampled_from((0, 1, 10)))
COUNTS = st.one_of(st.integers(0, 6), st.sampled_from((0, 11, 40, 700)))
#: In examples with slow items.
FEW_COUNTS = st.one_of(st.integers(0, 6), st.sampled_from((0, 11, 40)))


class Plan(NamedTuple):
    """The number of workers, and for each epoch and each worker its share."""

    workers: int
    epochs: list[list[Share]]


def plans(counts: st.SearchStrategy[int]) -> st.SearchStrategy[Plan]:
    def plan(workers: int) -> st.SearchStrategy[Plan]:
        lines = max(workers, 1)
        epoch = st.lists(st.tuples(counts, st.integers(0, 10**6)), min_size=lines, max_size=lines)
        return st.builds(Plan, st.just(workers), st.lists(epoch, min_size=1, max_size=3))

    return WORKERS.flatmap(plan)


@settings(deadline=None, max_examples=8 * TIMES)
@given(plans(COUNTS), PREFETCHES, st.randoms(use_true_random=False))
@example(
    Plan(3, [[(0, 1), (0, 2), (0, 3)], [(0, 1), (700, 2), (1, 3)], [(11, 1), (0, 2), (40, 3)]]),
    (10, 10),
    random.Random(1),
)
def test_the_loop_takes_from_each_live_worker_in_turn(plan: Plan, prefetches: Prefetches, rng: random.Random) -> None:
    """It may end anywhere without affecting other epochs, and may change items in place."""
    kept = []
    with load(Planned(plan.epochs), plan.workers, prefetches) as loader:
        for epoch in plan.epochs:
            items = expected(epoch)
            taken = rng.choice((len(items) + 1, rng.randint(1, len(items) + 1)))
            count = 0
            for count, item in enumerate(islice(loader, taken), 1):
                assert seen(item) == items[count - 1]
                if rng.random() < 0.2:
                    spoil(item)
                else:
                    kept.append((item, items[count - 1]))
            assert count == min(taken, len(items))
    # No later item has overwritten the kept ones.
    assert all(seen(item) == wanted for item, wanted in kept)


@settings(deadline=None, max_examples=8 * TIMES)
@given(
    plans(FEW_COUNTS), PREFETCHES, st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1), st.integers(0, 10**6)
)
def test_neither_pauses_nor_delays_have_an_effect(
    plan: Plan, prefetches: Prefetches, limits: list[int | None], delays: int
) -> None:
    with load(Planned(plan.epochs, delays), plan.workers, prefetches) as loader:
        for epoch in plan.epochs:
            assert paused(loader, limits) == expected(epoch)


def paused(loader: DataLoader2[Any], limits: Sequence[int | None]) -> list[Any]:
    """Read an epoch in parts, with a pause after each."""
    items: list[Any] = []
    iterator = iter(loader)
    for limit in [*limits, None]:
        iterator.limit(limit)
        part = [seen(item) for item in iterator]
        items += part
        if limit is None or len(part) < limit:
            break
        assert len(part) == limit
        iterator.resume()
    return items


# start methods

#: Of classes that a new interpreter can import; this module defines none of them.
SENDABLE = [
    maker(size, seed) if name != "dataclass" else WorkerInfo(size, seed)
    for seed, (name, maker) in enumerate(MAKERS.items())
    if name != "read-only array"  # no longer the same object once Python has sent it to a worker
    for size in (1, 5_000, 66_000, 300_000)
]


@pytest.mark.parametrize("method", ["forkserver", "spawn"] if WHOLE else ["forkserver"])
def test_workers_that_are_not_forked(method: str) -> None:
    numbers = range(len(SENDABLE))
    wanted = round_robin([[seen(SENDABLE[number]) for number in numbers[line::2] if number < 50] for line in range(2)])
    pipe = IterableWrapper(numbers).sharding_filter().filter(partial(operator.gt, 50))
    with load(pipe.map(partial(operator.getitem, SENDABLE)), 2, (10, 10), method) as loader:
        kept = list(loader)
        assert list(map(seen, kept)) == wanted
        for taken in (1, 7, 30):
            assert [seen(item) for item in islice(loader, taken)] == wanted[:taken]
        assert list(map(seen, kept)) == wanted
        assert paused(loader, [5, 1, None]) == wanted


def test_more_arrays_can_be_kept_than_there_are_segments() -> None:
    epochs = [[(11, seed), (11, seed + 1)] for seed in range(20)]
    with load(Planned(epochs), 2, (10, 10)) as loader:
        kept = [item for _ in epochs for item in loader]
    assert list(map(seen, kept)) == [item for epoch in epochs for item in expected(epoch)]
