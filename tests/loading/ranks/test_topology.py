"""Data-parallel ranks of several ranks each: tensor, pipeline and context parallel ranks read the same items."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from data_parallel_pipelines import BATCH, EPOCHS, KEYS, LIMIT_S, flat, indexed, open_service, stream, write_shards
from forked_ranks import on_ranks
from sweeps import WHOLE
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import DirectoryShards, IndexedSamples, ShardReadingService, StatefulShards, merge_states

RANKS = 4
WORKERS = (0, 2)
#: The number of batches before a state is saved; some ranks of a stream have no more.
CUTS = (1, 4)


def with_numbers(keys: list[str]) -> list[tuple[str, float]]:
    """Return keys with random numbers, as augmentations draw them in a worker."""
    return [(key, random.random()) for key in keys]


KINDS: dict[str, Callable[[Path, int], Any]] = {"stream": stream, "indexed": indexed}


def by_service(pipe: Any, workers: int, distributed: Any, seed: int | None = 7, epochs: int = EPOCHS) -> list[Any]:
    with open_service(pipe, workers, distributed=distributed, seed=seed) as loader:
        return [list(loader) for _ in range(epochs)]


def by_torch(pipe: Any, workers: int, distributed: Any, seed: int = 7) -> list[Any]:
    data = StatefulShards(pipe, seed=seed, distributed=distributed)
    loader = DataLoader(data, batch_size=None, num_workers=workers, timeout=LIMIT_S if workers else 0)
    return [list(loader) for _ in range(EPOCHS)]


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Read in every way with two data-parallel ranks, of two ranks of tensor parallelism each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))["replicate", "shard"]
    dp, pair = mesh["dp"], (mesh["dp"].get_local_rank(), 2)
    told: dict[str, Any] = {}
    for kind, make in KINDS.items():
        for workers in WORKERS:
            name = f"{kind} {workers}"
            # Only the seed of rank 0 matters, where the ranks agree on one.
            told[f"mesh, {name}"] = by_service(make(folder, 2), workers, dp, 7 if rank == 0 else None)
            told[f"no seed, {name}"] = by_service(make(folder, 2), workers, dp, None)
            told[f"pair, {name}"] = by_service(make(folder, 2), workers, pair)
            told[f"torch with a pair, {name}"] = by_torch(make(folder, 2), workers, pair)
        for workers in WORKERS if WHOLE else WORKERS[:1]:
            name = f"{kind} {workers}"
            told[f"other seeds, {name}"] = by_service(make(folder, 2), workers, dp, 7 + rank)
            told[f"process group, {name}"] = by_service(make(folder, 2), workers, dp.get_group())
            told[f"flattened mesh, {name}"] = by_service(make(folder, 2), workers, flat._flatten("both"))
            told[f"torch, {name}"] = by_torch(make(folder, 2), workers, dp)
    told["augmented"] = by_service(stream(folder, 2).map(with_numbers), 2, dp)
    with open_service(indexed(folder, 2), distributed=dp) as loader:
        told["length"] = len(loader)
    told["alone"] = by_service(stream(folder, 1), 2, init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))["dp"])
    return told


def resume(folder: Path, rank: int) -> dict[str, Any]:
    """Save states with two data-parallel ranks, and resume with two, four and one."""
    told: dict[str, Any] = {}
    groups: dict[int, Any] = {
        dp: init_device_mesh("cpu", (dp, RANKS // dp), mesh_dim_names=("dp", "tp"))["dp"] for dp in (1, 2, 4)
    }
    for kind, make in KINDS.items():
        for workers, cut in zip(WORKERS, CUTS, strict=True):
            with open_service(make(folder, 2), workers, distributed=groups[2]) as loader:
                begun = [*islice(loader, cut)]
                states = gathered(loader.state_dict())
            merged = merge_states(states)
            assert merged == merge_states(states[1::2]) == merge_states([merged, *states])
            for dp, group in groups.items():
                with open_service(make(folder, dp), workers, merged, distributed=group) as loader:
                    told[f"{kind} {workers} on {dp}"] = [begun, list(loader), list(loader)]
            with open_service(make(folder, 2), workers, merged, distributed=(rank // 2, 2)) as loader:
                told[f"{kind} {workers} with a pair"] = [begun, list(loader), list(loader)]
            with open_service(make(folder, 2), workers, states[rank], distributed=groups[2]) as loader:
                told[f"{kind} {workers} with its own"] = [begun, list(loader), list(loader)]
    return told


def faults(folder: Path, rank: int) -> dict[str, Callable[[], Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, group = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), dist.new_group([0, 1])
    dp, pair = mesh["dp"], (rank // 2, 2)

    def without_loader() -> None:
        if rank != 3:
            service = ShardReadingService(timeout_s=2, distributed=dp)
            next(iter(DataLoader2(stream(folder, 2), reading_service=service)))

    return {
        "two dimensions": lambda: ShardReadingService(distributed=mesh),
        "not in the mesh": lambda: ShardReadingService(distributed=part),
        "not in the group": lambda: ShardReadingService(distributed=group),
        "different groups": lambda: by_service(stream(folder, 2), 0, dp if rank else True),
        "different workers with a pair": lambda: by_service(stream(folder, 2), 2 * (rank % 2), pair),
        "different seeds": lambda: StatefulShards(stream(folder, 2), seed=rank % 2, distributed=dp),
        "different seeds with a pair": lambda: by_service(stream(folder, 2), 0, pair, rank % 2),
        "no seed with a pair": lambda: by_service(stream(folder, 2), 0, pair, None),
        "a queue of shards": lambda: by_service(DirectoryShards(str(folder)).load_wds_shards(), 0, dp),
        "an uneven batch": lambda: by_service(IndexedSamples(str(folder / "*.tar"), global_batch_size=7), 0, dp),
        "a rank without a loader": without_loader,
    }


def come_of(scenario: Callable[[], Any]) -> str:
    try:
        scenario()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


#: The ways to specify the same two data-parallel ranks, by the number of workers.
WAYS = ("other seeds", "process group", "flattened mesh", "pair", "torch", "torch with a pair")
SAME = {0: WAYS, 2: WAYS if WHOLE else ("pair", "torch with a pair")}

Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The results of four ranks: ranks 0 and 1 are one data-parallel rank, and 2 and 3 are the other."""
    folder = write_shards(tmp_path_factory.mktemp("topology"))

    def tell(rank: int) -> dict[str, Any]:
        told: dict[str, Any] = {"read": read(folder, rank), "resumed": resume(folder, rank), "faults": {}}
        for name, scenario in faults(folder, rank).items():
            dist.barrier()
            told["faults"][name] = come_of(scenario)
        dist.barrier()
        return told

    return on_ranks(RANKS, tell)


class TestReading:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("way", "workers"), [(way, workers) for workers, same in SAME.items() for way in ("mesh", "no seed", *same)]
    )
    def test_peers_read_the_same_and_others_the_rest(self, told: Told, way: str, kind: str, workers: int) -> None:
        first, its_peer, second, second_peer = (each["read"][f"{way}, {kind} {workers}"] for each in told)
        assert first == its_peer
        assert second == second_peer
        assert len(first) == EPOCHS
        for some, others in zip(first, second, strict=True):
            keys = flat(some + others)
            if kind == "stream":
                assert sorted(keys) == KEYS
            else:
                assert len(some) == len(others) == len(KEYS) // BATCH
                assert len(set(keys)) == len(keys) == len(KEYS) // BATCH * BATCH
        assert len({str(epoch) for epoch in first}) == EPOCHS

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("workers", WORKERS)
    def test_the_order_depends_on_the_seed_and_not_on_how_the_group_is_named(
        self, told: Told, kind: str, workers: int
    ) -> None:
        for each in told:
            found = each["read"]
            for way in SAME[workers]:
                assert found[f"{way}, {kind} {workers}"] == found[f"mesh, {kind} {workers}"], way
            assert found[f"no seed, {kind} {workers}"] != found[f"mesh, {kind} {workers}"]


def test_augmentations_of_peers_draw_the_same_numbers(told: Told) -> None:
    first, its_peer, second, second_peer = (each["read"]["augmented"] for each in told)
    assert (first, second) == (its_peer, second_peer)
    numbers = [number for epoch in first + second for batch in epoch for _, number in batch]
    assert len(set(numbers)) == len(numbers)


def test_the_length_is_that_of_the_data_parallel_rank(told: Told) -> None:
    assert [each["read"]["length"] for each in told] == [len(KEYS) // BATCH] * 4


def test_without_data_parallelism_all_ranks_read_everything_in_one_order(told: Told) -> None:
    found = [each["read"]["alone"] for each in told]
    assert all(epochs == found[0] for epochs in found)
    assert [sorted(flat(epoch)) for epoch in found[0]] == [KEYS] * EPOCHS


class TestResuming:
    @pytest.mark.parametrize("way", ["on 2", "with a pair", "with its own"])
    @pytest.mark.parametrize("workers", WORKERS)
    @pytest.mark.parametrize("kind", ["stream", "indexed"])
    def test_the_same_topology_resumes_exactly(self, told: Told, kind: str, workers: int, way: str) -> None:
        for each in told:
            begun, rest, following = each["resumed"][f"{kind} {workers} {way}"]
            whole = each["read"][f"mesh, {kind} {workers}"]
            assert [begun + rest, following] == whole[:2]

    @pytest.mark.parametrize("ranks", [1, 4])
    @pytest.mark.parametrize("workers", WORKERS)
    @pytest.mark.parametrize("kind", ["stream", "indexed"])
    def test_another_topology_reads_every_remaining_sample_once(
        self, told: Told, kind: str, workers: int, ranks: int
    ) -> None:
        found = [each["resumed"][f"{kind} {workers} on {ranks}"] for each in told]
        peers = 4 // ranks
        assert all(found[rank][1:] == found[rank - rank % peers][1:] for rank in range(4))
        begun = flat(found[0][0] + found[2][0])
        rest = [[flat(epochs[number]) for epochs in found[::peers]] for number in (1, 2)]
        if kind == "stream":
            assert sorted(begun + flat(rest[0])) == sorted(flat(rest[1])) == KEYS
            return
        whole = [told[rank]["read"][f"mesh, indexed {workers}"] for rank in (0, 2)]
        expected = [[{*flat(parts)} for parts in zip(*epochs, strict=True)] for epochs in zip(*whole, strict=True)]
        steps = [zip(*(epochs[number] for epochs in found[::peers]), strict=True) for number in (1, 2)]
        batches = [[{*flat(parts)} for parts in each] for each in steps]
        assert batches == [expected[0][len(found[0][0]) :], expected[1]]


class TestFaults:
    @pytest.mark.parametrize(
        ("name", "ranks", "text"),
        [
            ("two dimensions", {0, 1, 2, 3}, r"one dimension, but this one has 2: .*'dp', 'tp'.* mesh\['dp'\]"),
            ("not in the mesh", {2, 3}, "Rank [23] is not in the process group or mesh"),
            ("not in the group", {2, 3}, r"Rank [23] is not in the process group .* pair \(rank, world_size\)"),
            ("different groups", {0, 1, 2, 3}, "shares the data between 2 ranks, and rank 0 shares the data between 4"),
            ("no seed with a pair", {0, 1, 2, 3}, r"The loader has no seed.* Call loader\.seed\(n\)"),
            ("a queue of shards", {0, 1, 2, 3}, "4 ranks share the data between 2, .* DirectoryShards"),
            ("an uneven batch", {0, 1, 2, 3}, "batch_size of 7, which is not divisible by its 2 ranks"),
            (
                "a rank without a loader",
                {0, 1, 2},
                r"for rank 3, dead .* pass distributed=\(rank, world_size\), and seed",
            ),
        ],
    )
    def test_a_mistake_on_all_ranks_is_an_error_on_each(
        self, told: Told, name: str, ranks: set[int], text: str
    ) -> None:
        found = [each["faults"][name] for each in told]
        assert {rank for rank in range(4) if found[rank]} == ranks
        for rank in ranks:
            assert re.search(text, found[rank])

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("different workers with a pair", "Give every rank the same num_workers"),
            ("different seeds", r"Rank \d has the seed \d, and rank \d has the seed \d"),
            ("different seeds with a pair", r"Rank \d has the seed \d, and rank \d has the seed \d"),
        ],
    )
    def test_differing_ranks_are_noticed_even_if_none_waits_for_another(self, told: Told, name: str, text: str) -> None:
        found = [error for each in told if (error := each["faults"][name])]
        assert found
        for error in found:
            assert re.search(text, error)
