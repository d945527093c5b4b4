"""Ranks that share the data between fewer: those of tensor, pipeline and context parallelism read the same items."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_parallel_pipelines import BATCH, EPOCHS, KEYS, flat, write_shards

SCRIPT = Path(__file__).with_name("topology_scenarios.py")
#: As in the script.
WORKERS = (0, 2)

#: The ways to name the same two data-parallel ranks.
SAME = ("other seeds", "process group", "flattened mesh", "pair", "torch", "torch with a pair")

Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("topology"))


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    """What each of four ranks has written; ranks 0 and 1 are one data-parallel rank, and 2 and 3 the other."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), *sys.path])}
    subprocess.run([sys.executable, "-W", "ignore", SCRIPT, folder], env=environment, check=True, timeout=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("workers", WORKERS)
class TestReading:
    @pytest.mark.parametrize("kind", ["stream", "indexed"])
    @pytest.mark.parametrize("way", ["mesh", "no seed", *SAME])
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

    @pytest.mark.parametrize("kind", ["stream", "indexed"])
    def test_the_order_depends_on_the_seed_and_not_on_how_the_group_is_named(
        self, told: Told, kind: str, workers: int
    ) -> None:
        for each in told:
            found = each["read"]
            for way in SAME:
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
    def test_the_same_topology_goes_on_exactly(self, told: Told, kind: str, workers: int, way: str) -> None:
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
            ("no such dimension", {0, 1, 2, 3}, "Invalid mesh_dim_name"),
            ("not in the mesh", {2, 3}, "Rank [23] is not in the process group or mesh"),
            ("not in the group", {2, 3}, r"Rank [23] is not in the process group .* pair \(rank, world_size\)"),
            ("different groups", {0, 1, 2, 3}, "shares the data between 2 ranks, and rank 0 shares the data between 4"),
            ("different workers", {0, 1, 2, 3}, "reads with 2 workers, and rank 0 reads with one process"),
            ("no seed with a pair", {0, 1, 2, 3}, r"The loader has no seed.* Call loader\.seed\(n\)"),
            ("a queue of shards", {0, 1, 2, 3}, "4 ranks share the data between 2, .* DirectoryShards"),
            ("an uneven batch", {0, 1, 2, 3}, "batch_size of 7, which 2 ranks cannot share evenly"),
            ("different states", {0, 1, 2, 3}, "two different states of rank 1 of 2"),
            (
                "a rank without a loader",
                {0, 1, 2},
                r"for rank 3, dead .* pass distributed=\(rank, world_size\), and seed",
            ),
        ],
    )
    def test_what_is_wrong_on_all_ranks_is_an_error_on_each(
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
    def test_ranks_that_differ_without_waiting_for_each_other_are_noticed(
        self, told: Told, name: str, text: str
    ) -> None:
        found = [error for each in told if (error := each["faults"][name])]
        assert found
        for error in found:
            assert re.search(text, error)
