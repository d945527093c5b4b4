"""Golden orders: what every loader yields from a table of pipelines, as ranks, workers and epochs.

`orders.json` has a digest of each epoch. Run this file as a script to record them again after a deliberate change.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_kinds import SEED, Persistent, Service, Stateful, Tracked, comparable, items_of, unchanged
from pipeline_table import EXACT, IN_MAIN, REPLAYED, STREAMS, Build, Pipe, drawn, key_of, split, write_shards
from sweeps import WHOLE
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService

from wds_datapipes import DirectoryShards, IndexedSamples, ShardList
from wds_datapipes.errors import StateError

ORDERS = Path(__file__).with_name("orders.json")
EPOCHS = 3


def with_global_draws(sample: dict[str, Any]) -> list[Any]:
    """Draws from the generators that loaders seed in each worker, as a user's function does."""
    return [key_of(sample), random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, ()))]


def directory() -> Pipe:
    """Shards that are taken from a directory, oldest first, and put back."""
    path = Path(tempfile.mkdtemp(dir="."))
    for age, shard in enumerate((4, 0, 2)):
        shutil.copy(f"{shard}.tar", path)
        os.utime(path / f"{shard}.tar", (age, age))
    return DirectoryShards(path, after="return", timeout_s=0).load_wds_shards().group_samples().slice_samples(20)


#: Pipelines whose states are not compared, or that run only in loaders without a state.
OTHERS: dict[str, Build] = {
    "in order": lambda: ShardList("{0..5}.tar").sharding_filter().load_wds_shards().group_samples(),
    "split by sample": lambda: ShardList("{0..5}.tar").load_wds_shards().group_samples().sharding_filter(),
    "shards and samples split": lambda: (
        ShardList("{0..5}.tar")
        .shuffle(buffer_size=3)
        .sharding_filter()
        .load_wds_shards()
        .group_samples()
        .to_tuple("cls")
    ),
    "sources in turn": lambda: split().mix_samples(split("a"), split("b"), stop="all"),
    "torch's mux": lambda: split().mux(split("a")),
    "prefetched": lambda: split().shuffle_samples(4).prefetch(3).map(key_of).batch(4),
    "global draws": lambda: split().shuffle_samples(4).map(with_global_draws),
    "indexed samples in order": lambda: IndexedSamples("{0..5}.tar", order="sequential", global_batch_size=4),
    "more epochs": lambda: drawn("a").rsample(0.5).with_epoch(5),
}
#: These run only in this process, because a directory is shared by time rather than by number.
IN_PROCESS = {"directory": directory}
TRACKED = EXACT | STREAMS | REPLAYED | OTHERS
TABLE = TRACKED | IN_MAIN | IN_PROCESS
#: These use random generators that no state contains, or find different shards when they resume.
UNREPEATED = ("global draws", "directory")
#: Pipelines for loaders with several processes: each kind of source, split and shuffle.
SPREAD = (
    *("a chain", "a long chain", "random crops", "drawn shards", "shards in turn", "records", "buckets"),
    *("a mixture in a mixture", "a mixture up to the first end", "packed parts", "batches taken apart"),
    *("indexed samples", "indexed samples by windows", "indexed samples by length", "an indexed mixture by windows"),
    *("a shuffle after it", "split by sample", "sources in turn", "torch's mux", "global draws"),
)


class Iteration:
    """A pipeline without a loader, which draws its orders from torch's global generator."""

    def __init__(self, build: Build, workers: int) -> None:
        self.pipe = build()

    def epoch(self) -> Iterator[Any]:
        return iter(self.pipe)

    def close(self) -> None:
        pass


class TorchLoader(Iteration):
    """A pipeline in torch's ``DataLoader``."""

    def __init__(self, build: Build, workers: int) -> None:
        context = "fork" if workers else None
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
        self.pipe: Any = DataLoader(build(), batch_size=None, collate_fn=unchanged, **options)


class Stock(Service):
    """A pipeline in torchdata's own service."""

    def __init__(self, build: Build, workers: int) -> None:
        service = MultiProcessingReadingService(workers, multiprocessing_context="fork")
        self.loader = DataLoader2(build(), reading_service=service)
        self.loader.seed(SEED)


#: The pipelines that also run on several ranks with several workers.
FEW = (
    *("a long chain", "random crops", "a mixture in a mixture", "batches taken apart", "indexed samples by windows"),
    *("a shuffle after it", "split by sample", "global draws"),
)
#: Each loader with its numbers of ranks and workers, its pipelines, and whether it also resumes.
LOADERS: dict[str, tuple[Callable[..., Any], dict[tuple[int, int], Iterable[str]], bool]] = {
    "iteration": (Iteration, {(1, 0): TABLE}, False),
    "DataLoader": (TorchLoader, {(1, 0): FEW, (1, 2): FEW}, False),
    "MultiProcessingReadingService": (Stock, {(1, 2): FEW}, False),
    "ShardReadingService": (Service, {(1, 0): TABLE, (1, 3): SPREAD, (2, 2): FEW, (4, 1): FEW}, True),
    "ShardReadingService without a seed": (partial(Service, seed=None), {(1, 0): FEW, (1, 2): FEW}, False),
    "StatefulShards": (Tracked, {(1, 0): TRACKED, (2, 0): TRACKED, (1, 2): FEW}, True),
    "StatefulShards, persistent workers": (Persistent, {(2, 2): FEW}, WHOLE),
    "StatefulDataLoader": (Stateful, {(1, 2): [name for name in FEW if name not in STREAMS]}, WHOLE),
}
CASES = [
    (loader, name, ranks, workers)
    for loader, (_, topologies, _) in LOADERS.items()
    for (ranks, workers), names in topologies.items()
    for name in names
]


def yielded(loader: str, name: str, ranks: int, workers: int) -> list[list[list[Any]]]:
    """Return the items of each epoch of each rank; check that the last rank also yields them if it resumes."""
    kind, _, resumes = LOADERS[loader]
    is_resumed = resumes and name not in UNREPEATED and (not workers or name in FEW)
    found = []
    for rank in range(ranks):
        shutil.rmtree("kept", ignore_errors=True)  # a cache of samples
        options: dict[str, Any] = {"distributed": (rank, ranks)} if ranks > 1 else {}
        new = partial(kind, TABLE[name], workers, **options)
        states: dict[int, Any] = {}
        with closing(seeded(new)) as run:
            epochs = [items_of(run.epoch()), [], []]
            cuts = [len(epochs[0]) // 3, 2 * len(epochs[0]) // 3] if is_resumed and rank == ranks - 1 else []
            for number, item in enumerate(run.epoch()):
                epochs[1].append(comparable(item))
                if number in cuts:
                    with suppress(StateError):
                        states[number] = run.state()
            epochs[2] = items_of(run.epoch())
        for cut, state in states.items():
            with closing(new(state=state)) as run:
                assert items_of(run.epoch()) == epochs[1][cut + 1 :], f"resumed after {cut + 1} items, rank {rank}"
        found.append(epochs)
    return found


def seeded(new: Callable[[], Any]) -> Any:
    """Return a new loader, with the same state of the global generators each time."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return new()


def text_of(items: list[Any]) -> str:
    """Return items as text, without the location of their shards, which differs for a directory."""
    return re.sub(r'"[^"]*(?=[^"/.]+\.tar")', '"', json.dumps(items, default=bytes.decode))


def digests_of(ranks: list[list[list[Any]]]) -> str:
    """Return the number of items and a digest of each epoch of each rank."""
    return " / ".join(
        " ".join(f"{len(items)}:{hashlib.sha256(text_of(items).encode()).hexdigest()[:8]}" for items in epochs)
        for epochs in ranks
    )


@pytest.fixture(scope="module", autouse=True)
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("golden"))
        write_shards()
        yield
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])


@pytest.mark.parametrize(("loader", "name", "ranks", "workers"), CASES)
def test_every_loader_yields_the_recorded_orders(loader: str, name: str, ranks: int, workers: int) -> None:
    recorded = json.loads(ORDERS.read_text())[f"{loader} {ranks} x {workers}"][name]
    found = yielded(loader, name, ranks, workers)
    assert digests_of(found) == recorded, found


def test_every_record_has_a_case() -> None:
    recorded = json.loads(ORDERS.read_text())
    assert {(table, name) for table, orders in recorded.items() for name in orders} == {
        (f"{loader} {ranks} x {workers}", name) for loader, name, ranks, workers in CASES
    }


def test_loaders_with_the_same_ranks_and_workers_yield_the_same() -> None:
    orders: dict[tuple[str, str], set[str]] = {}
    for table, of_table in json.loads(ORDERS.read_text()).items():
        loader, topology = table[:-5].rstrip(), table[-5:]
        if loader not in ("iteration", "DataLoader", "ShardReadingService without a seed"):
            for name, found in of_table.items():
                orders.setdefault((topology, name), set()).add(found)
    # Without workers, the draws of the loop's own generators differ.
    assert [case for case, found in orders.items() if len(found) > 1] == [("1 x 0", "global draws")]


def record() -> None:
    """Write the orders of all cases."""
    recorded: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_shards()
        for loader, name, ranks, workers in CASES:
            found = digests_of(yielded(loader, name, ranks, workers))
            recorded.setdefault(f"{loader} {ranks} x {workers}", {})[name] = found
    ORDERS.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    record()
