"""Real ranks of torch.distributed with gloo: the items of each rank, and what they leave in the store.

Ranks that are lost are in `rank_faults`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked_ranks import on_ranks
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("restarted_ranks.py")

#: The number of samples in each shard; there are fewer shards than workers of four ranks, with two each.
SIZES = (5, 1, 9, 2, 30, 3, 4)
KEYS = {f"{shard}/{number}" for shard, size in enumerate(SIZES) for number in range(size)}

RANKS = 4
WORKERS = (0, 2)

#: The number of items of each rank.
SHARE = 20

#: The time limit of a program, in seconds: some minutes on a busy machine.
LIMIT_S = 400

Results = list[dict[str, Any]]
Sample = list[Any]  # its key, and the seed of a stage after the split


class Seeded(IterDataPipe[list[Any]]):
    """Yields each sample's key, and the seed of this stage."""

    def __init__(self, source: IterDataPipe[dict[str, Any]]) -> None:
        self.source = source
        self.seed = 0

    def set_seed(self, seed: int) -> Seeded:
        self.seed = seed
        return self

    def __iter__(self) -> Any:
        for sample in self.source:
            yield [sample["__key__"], self.seed]


def samples(urls: list[str]) -> IterDataPipe[Any]:
    return Seeded(ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples())


def numbers(total: int) -> IterDataPipe[int]:
    pipe: IterDataPipe[int] = IterableWrapper(range(total), deepcopy=False).sharding_filter()
    return pipe


def load(pipe: IterDataPipe[Any], workers: int = 2) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=ShardReadingService(workers, timeout_s=60, distributed=True))


def read(loader: DataLoader2[Any], epochs: int, seed: int | None = None) -> list[list[Any]]:
    with loader:
        if seed is not None:
            loader.seed(seed)
        return [list(loader) for _ in range(epochs)]


def stored() -> int:
    """Return the number of keys in the store of the ranks, when no rank changes it."""
    dist.barrier()
    count: int = distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return count


def no_waiting(rank: int, workers: int, folder: Path) -> int:
    """Let rank 1 take its first item after all the others have taken their last one; return how many it gets."""
    done = [folder / f"{other} has read {workers}" for other in range(RANKS)]
    with load(numbers(RANKS * 10_000), workers) as loader:
        iterator = iter(loader)
        while rank == 1 and not all(path.exists() for path in (done[0], *done[2:])):
            time.sleep(0.02)
        count = sum(1 for _ in iterator)
        done[rank].touch()
    return count


def read_together(rank: int, urls: list[str], folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for workers in WORKERS:
        # The seed of rank 0 decides.
        seed = 7 if rank == 0 else None
        seen[f"seeded {workers}"] = read(load(samples(urls), workers), 3, seed)
        seen[f"one shard {workers}"] = read(load(samples(urls[:1]), workers), 2)
        service = SequentialReadingService(DistributedReadingService(), ShardReadingService(workers))
        seen[f"sequential {workers}"] = read(DataLoader2(samples(urls), reading_service=service), 2, seed)
        gc.collect()  # torchdata's FullSync is in a cycle, and blocks forever if a starting thread collects it
        seen[f"no waiting {workers}"] = no_waiting(rank, workers, folder)

    before = stored()
    with load(numbers(RANKS)) as train, load(numbers(2 * RANKS), 0) as validation:
        seen["two services"] = [[list(train), list(validation)] for _ in range(3)]
        early = stored()
        for _ in range(10):
            list(train), list(validation)
        late = stored()
    seen["keys"] = {"grown": late - early, "left": stored() - before}

    with load(numbers(RANKS * SHARE)) as loader:
        seen["before a fork"] = list(loader)
        if (child := os.fork()) == 0:
            loader.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        seen["after a fork"] = list(loader)
    never = load(numbers(RANKS))
    del never
    with load(numbers(RANKS)):
        pass

    loader = load(numbers(RANKS * SHARE))
    iterator = iter(loader)
    first = [next(iterator)]
    dist.barrier()
    dist.destroy_process_group()
    seen["no group"], seen["still no group"] = first + list(iterator), list(loader)
    loader.shutdown()
    try:
        list(load(numbers(RANKS)))
    except RuntimeError as error:
        seen["no group any more"] = str(error)
    return seen


def torchrun(ranks: int, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # otherwise torchrun prints a notice about it
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each rank of a run."""
    folder = tmp_path_factory.mktemp("together")
    urls = [
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}/{number}", "cls": "0"} for number in range(size)])
        for shard, size in enumerate(SIZES)
    ]
    return on_ranks(RANKS, lambda rank: read_together(rank, urls, folder))


def keys(samples: Iterable[Sample]) -> list[str]:
    return [key for key, _ in samples]


def shards(samples: Iterable[Sample]) -> list[str]:
    """Return the shards in the order of their first reads."""
    return list(dict.fromkeys(key.partition("/")[0] for key in keys(samples)))


def shares(ranks: int, workers: int) -> list[int]:
    """Return the number of shards that each rank reads."""
    instances = ranks * max(workers, 1)
    owners = [shard % instances % ranks for shard in range(len(SIZES))]
    return [owners.count(rank) for rank in range(ranks)]


def epochs_of(together: Results, name: str) -> list[list[list[Sample]]]:
    """Return the items of each rank in each epoch."""
    return [list(ranks) for ranks in zip(*(results[name] for results in together), strict=True)]


@pytest.mark.parametrize("workers", WORKERS)
class TestShards:
    def test_every_sample_comes_once_per_epoch(self, together: Results, workers: int) -> None:
        for ranks in epochs_of(together, f"seeded {workers}"):
            read = keys(itertools.chain(*ranks))
            assert sorted(read) == sorted(KEYS)

    def test_every_sample_comes_once_if_only_one_rank_has_a_shard(self, together: Results, workers: int) -> None:
        for ranks in epochs_of(together, f"one shard {workers}"):
            assert sorted(keys(itertools.chain(*ranks))) == [f"0/{number}" for number in range(SIZES[0])]
            assert [bool(samples) for samples in ranks].count(True) == 1

    def test_shards_are_split_evenly_and_move_between_ranks(self, together: Results, workers: int) -> None:
        epochs = epochs_of(together, f"seeded {workers}")
        assert all([len(shards(samples)) for samples in ranks] == shares(len(ranks), workers) for ranks in epochs)
        assert len({json.dumps([sorted(shards(samples)) for samples in ranks]) for ranks in epochs}) == 3

    def test_stages_after_the_split_have_a_seed_for_each_epoch_rank_and_worker(
        self, together: Results, workers: int
    ) -> None:
        seeds: list[int] = []
        for ranks in epochs_of(together, f"seeded {workers}"):
            for samples in ranks:
                own = {seed for _, seed in samples}
                assert len(own) == min(len(shards(samples)), max(workers, 1))
                seeds += own
        assert len(set(seeds)) == len(seeds)

    def test_after_torchdatas_own_service_all_ranks_end_with_the_shortest(
        self, together: Results, workers: int
    ) -> None:
        for ranks in epochs_of(together, f"sequential {workers}"):
            read = keys(itertools.chain(*ranks))
            assert set(read) <= KEYS
            assert len(set(read)) == len(read)
            assert len({len(samples) for samples in ranks}) == 1
            shortest = [
                samples
                for samples, share in zip(ranks, shares(len(ranks), workers), strict=True)
                if len(shards(samples)) == share and len(samples) == sum(SIZES[int(name)] for name in shards(samples))
            ]
            assert shortest


@pytest.mark.parametrize("workers", [0, 2])
def test_no_rank_waits_for_the_items_of_another(together: Results, workers: int) -> None:
    assert [results[f"no waiting {workers}"] for results in together] == [10_000] * len(together)


def test_two_services_in_turn(together: Results) -> None:
    for service, count in enumerate([1, 2]):
        for epoch in range(3):
            read = [number for results in together for number in results["two services"][epoch][service]]
            assert sorted(read) == list(range(count * len(together)))


def test_the_store_does_not_fill_up(together: Results) -> None:
    for results in together:
        assert results["keys"] == {"grown": 0, "left": 0}


@pytest.mark.parametrize("name", ["before a fork", "after a fork", "no group", "still no group"])
def test_every_number_comes_once(together: Results, name: str) -> None:
    numbers = itertools.chain.from_iterable(results[name] for results in together)
    assert sorted(numbers) == list(range(len(together) * SHARE))


def test_the_error_without_a_process_group_says_what_is_needed(together: Results) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"distributed=True\) requires a process group: first call torch\.distributed\.init_process_group",
    ) as caught:
        list(DataLoader2(IterableWrapper(range(4)), reading_service=ShardReadingService(distributed=True)))
    assert {results["no group any more"] for results in together} == {str(caught.value)}


def test_ranks_restarted_by_torchrun_ignore_their_previous_state(tmp_path: Path) -> None:
    torchrun(2, "--max-restarts", "1", SCRIPT, tmp_path)
    assert any(name.endswith("gate") for name in (tmp_path / "found").read_text().split())
    epochs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for ranks in zip(*epochs, strict=True):
        assert sorted(itertools.chain(*ranks)) == list(range(2 * SHARE))


def read_alone(rank: int) -> tuple[list[list[int]], dict[str, int]]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    before = stored()
    with load(numbers(SHARE)) as loader:
        loader.seed(7)
        epochs = [list(loader)]
        early = stored()
        epochs += [list(loader) for _ in range(9)]
        grown = stored() - early
    return epochs, {"grown": grown, "left": stored() - before}


def test_a_single_rank_reads_everything() -> None:
    ((epochs, keys),) = on_ranks(1, read_alone)
    assert [sorted(epoch) for epoch in epochs] == 10 * [[*range(SHARE)]]
    assert keys == {"grown": 0, "left": 0}
