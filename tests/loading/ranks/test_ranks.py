"""Real ranks of torch.distributed with gloo: the items of each rank, and the errors when one is lost."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from wds_datapipes import ShardReadingService
from wds_datapipes.testing import build_shard

SCRIPT = Path(__file__).with_name("ranks_scenarios.py")

#: The number of samples in each shard; there are fewer shards than workers of four ranks, with two each.
SIZES = (5, 1, 9, 2, 30, 3, 4)
KEYS = {f"{shard}/{number}" for shard, size in enumerate(SIZES) for number in range(size)}

RANKS = 4
WORKERS = (0, 2)

#: The number of items of each rank in the scenarios.
SHARE = 20

#: The time limit of all scenarios together, in seconds: some minutes on a busy machine.
LIMIT_S = 400

# The fixtures run many scenarios at once.
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

Results = list[dict[str, Any]]
Sample = list[Any]  # its key, and the seed of a stage after the split


def torchrun(ranks: int, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # otherwise torchrun prints a notice about it
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of the ranks in all scenarios."""
    folder = tmp_path_factory.mktemp("forked")
    for shard, size in enumerate(SIZES):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}/{number}", "cls": "0"} for number in range(size)])
    subprocess.run([sys.executable, SCRIPT, "forked", folder], check=True, timeout=LIMIT_S)
    return folder


@pytest.fixture(scope="module")
def together(forked: Path) -> Results:
    """The results of each rank of a run in which no rank is lost."""
    outcome = Outcome(forked / "together")
    assert outcome.codes == [0] * RANKS
    return outcome.results


class Outcome:
    """The results of the ranks of a scenario.

    Attributes:
        results: the results of each rank; empty for one that could not write them.
        codes: the exit code of each.
        stderr: the standard error of each.
    """

    def __init__(self, folder: Path) -> None:
        codes = {int(rank): code for rank, code in json.loads((folder / "codes.json").read_text()).items()}
        self.ranks = range(len(codes))
        self.codes = [codes[rank] for rank in self.ranks]
        files = [folder / f"{rank}.json" for rank in self.ranks]
        self.results: Results = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        self.stderr = [(folder / f"{rank}.stderr").read_text() for rank in self.ranks]

    def share(self, rank: int) -> list[int]:
        """Return the items of a rank in an epoch, with any number of workers, in order."""
        world = len(self.ranks)
        return [number for number in range(world * SHARE) if number % world == rank]

    def check_survivors(self, lost: int, message: str, workers: int = 2) -> None:
        """Check that all ranks but one read an epoch to its end, and then get an error that names the lost rank."""
        for rank in self.ranks:
            if rank != lost:
                results = self.results[rank]
                assert [sorted(epoch) for epoch in results["epochs"]] == [self.share(rank), []]
                what = "RankLostError: The ranks cannot begin epoch 2 of a ShardReadingService together: "
                assert re.fullmatch(re.escape(what) + message, results["error"])

    def check_whole(self, epochs: int = 1) -> None:
        """Check that all ranks read all epochs to their end without an error."""
        for rank in self.ranks:
            results = self.results[rank]
            assert "error" not in results
            assert [sorted(epoch) for epoch in results["epochs"]] == epochs * [self.share(rank)]
            assert "Traceback" not in self.stderr[rank]
            assert self.codes[rank] == 0


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
    torchrun(2, "--max-restarts", "1", SCRIPT, "restarted", tmp_path)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert any(name.endswith("gate") for name in results[0]["found"])
    for ranks in zip(*(each["epochs"] for each in results), strict=True):
        assert sorted(itertools.chain(*ranks)) == list(range(2 * SHARE))


WAITED = r"rank \d waited 6 s \(timeout_s\) for rank {}, dead or busy elsewhere\."
ENDED = r"rank {} has ended its service\."
FAILED = r"rank {} has ended its service after {}\."


GONE = (
    r"the process group's store does not respond \(Dist.*Error: .+\): rank 0 or torchrun, which hosts it, has ended\."
)
SILENT = (
    r"the process group's store has not responded for 6 s \(timeout_s\): rank 0 or torchrun, which hosts it, is "
    r"unreachable\."
)


@pytest.mark.parametrize(
    ("scenario", "workers", "who", "code", "message"),
    [
        ("killed", 2, 1, -9, WAITED.format(1)),
        ("killed without workers", 0, 1, -9, WAITED.format(1)),
        ("killed at the gate", 2, 1, -9, WAITED.format(1)),
        ("killed with the store", 2, 0, -9, GONE),
        ("silent store", 2, 0, -9, SILENT),
        ("exits", 2, 1, 3, ENDED.format(1)),
        ("fails", 2, 1, 1, FAILED.format(1, "LookupError: no such label")),
        ("bad sample", 2, 1, 0, FAILED.format(1, r"ValueError: Caught .+ process \d\.")),
        ("epochs differ", 2, 0, 0, ENDED.format(0)),
    ],
)
def test_a_lost_rank_is_named(forked: Path, scenario: str, workers: int, who: int, code: int, message: str) -> None:
    outcome = Outcome(forked / scenario)
    outcome.check_survivors(who, message, workers)
    assert outcome.codes[who] == code
    if scenario == "fails":
        assert "Exception ignored" not in "".join(outcome.stderr)
    elif scenario == "bad sample":
        assert re.match(r"ValueError: .*is no sample", outcome.results[1]["error"], re.DOTALL)


def test_ranks_that_do_not_start_are_named(forked: Path) -> None:
    outcome = Outcome(forked / "cannot start")
    message = "RankLostError: The ranks cannot begin epoch 1 of a ShardReadingService together: " + FAILED
    assert outcome.results[1]["error"] == "OSError: no such disk"
    for rank in (0, 2):
        assert re.fullmatch(message.format(1, "OSError: no such disk"), outcome.results[rank]["error"])
    for results in Outcome(forked / "never starts").results[1:]:
        assert re.fullmatch(rf"RankLostError: The ranks cannot start .+ together: {WAITED.format(0)}", results["error"])


@pytest.mark.parametrize(
    ("scenario", "epochs"),
    [("ends first", 1), ("ends first with the store", 1), ("without shutdown", 2), ("file store", 3)],
)
def test_ranks_end_when_they_are_done_without_affecting_others(forked: Path, scenario: str, epochs: int) -> None:
    Outcome(forked / scenario).check_whole(epochs)


def test_a_waiting_rank_can_be_interrupted_and_retry(forked: Path) -> None:
    outcome = Outcome(forked / "interrupted")
    assert all(results["all have come"] for results in outcome.results)
    outcome.check_whole(3)


def test_a_single_rank_reads_everything(forked: Path) -> None:
    outcome = Outcome(forked / "alone, HashStore")
    outcome.check_whole(10)
    assert outcome.results[0]["keys"] == {"grown": 0, "left": 0}
