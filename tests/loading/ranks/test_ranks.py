"""Real ranks of torch.distributed, on gloo: the items of each rank, and the errors when one is lost."""

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

#: How many samples each shard has: fewer shards than four ranks have workers, with two each.
SIZES = (5, 1, 9, 2, 30, 3, 4)
KEYS = {f"{shard}/{number}" for shard, size in enumerate(SIZES) for number in range(size)}

RANKS = 4
WORKERS = (0, 2)

#: How many numbers each rank has in the scenarios.
SHARE = 20

#: The time limit of all scenarios together, in seconds: some minutes on a busy machine.
LIMIT_S = 400

# The fixtures run many scenarios at once.
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

Results = list[dict[str, Any]]
Sample = list[Any]  # its key, and the seed of a stage after the split


def torchrun(ranks: int, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun would otherwise print a notice about it
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of each rank of a run in which no rank is lost."""
    folder = tmp_path_factory.mktemp("together")
    for shard, size in enumerate(SIZES):
        build_shard(folder / f"{shard}.tar", [{"__key__": f"{shard}/{number}", "cls": "0"} for number in range(size)])
    torchrun(RANKS, SCRIPT, "together", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the ranks of all scenarios have left their results."""
    folder = tmp_path_factory.mktemp("lost")
    subprocess.run([sys.executable, SCRIPT, "lost", folder], check=True, timeout=LIMIT_S)
    return folder


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
        """The items of a rank in an epoch, with any number of workers: every item assigned to it in turn."""
        world = len(self.ranks)
        return [number for number in range(world * SHARE) if number % world == rank]

    def check_survivors(self, lost: int, message: str, workers: int = 2) -> None:
        """Check that all ranks but one have read an epoch to its end, and then got an error that names the lost one."""
        for rank in self.ranks:
            if rank != lost:
                results = self.results[rank]
                assert [sorted(epoch) for epoch in results["epochs"]] == [self.share(rank), []]
                what = "RankLostError: The ranks cannot begin epoch 2 of a ShardReadingService together: "
                assert re.fullmatch(re.escape(what) + message, results["error"])

    def check_whole(self, epochs: int = 1) -> None:
        """Check that all ranks have read all epochs to their end, without an error."""
        for rank in self.ranks:
            results = self.results[rank]
            assert "error" not in results
            assert [sorted(epoch) for epoch in results["epochs"]] == epochs * [self.share(rank)]
            assert "Traceback" not in self.stderr[rank]
            assert self.codes[rank] == 0


def keys(samples: Iterable[Sample]) -> list[str]:
    return [key for key, _ in samples]


def shards(samples: Iterable[Sample]) -> list[str]:
    """The shards in the order in which they were first read."""
    return list(dict.fromkeys(key.partition("/")[0] for key in keys(samples)))


def shares(ranks: int, workers: int) -> list[int]:
    """How many shards each rank reads."""
    instances = ranks * max(workers, 1)
    owners = [shard % instances % ranks for shard in range(len(SIZES))]
    return [owners.count(rank) for rank in range(ranks)]


def epochs_of(together: Results, name: str) -> list[list[list[Sample]]]:
    """For each epoch, the items of each rank."""
    return [list(ranks) for ranks in zip(*(results[name] for results in together), strict=True)]


@pytest.mark.parametrize("workers", WORKERS)
class TestShards:
    @pytest.mark.parametrize("name", ["seeded", "seeded again", "unseeded"])
    def test_every_sample_comes_once_per_epoch(self, together: Results, workers: int, name: str) -> None:
        for ranks in epochs_of(together, f"{name} {workers}"):
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

    def test_the_seed_of_rank_0_alone_decides(self, together: Results, workers: int) -> None:
        for results in together:
            assert results[f"seeded {workers}"] == results[f"seeded again {workers}"]
        unseeded = epochs_of(together, f"unseeded {workers}")
        assert len({json.dumps([shards(samples) for samples in ranks]) for ranks in unseeded}) > 1

    @pytest.mark.parametrize("name", ["seeded", "unseeded"])
    def test_stages_after_the_split_have_a_seed_for_each_epoch_rank_and_worker(
        self, together: Results, workers: int, name: str
    ) -> None:
        seeds: list[int] = []
        for ranks in epochs_of(together, f"{name} {workers}"):
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


@pytest.mark.parametrize("name", ["late", "no group", "after a fork"])
def test_every_number_comes_once(together: Results, name: str) -> None:
    epochs = [results[name] if name != "after a fork" else [results[name]] for results in together]
    for ranks in zip(*epochs, strict=True):
        assert sorted(itertools.chain(*ranks)) == list(range(len(together) * SHARE))


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


@pytest.mark.parametrize(("scenario", "workers"), [("killed", 2), ("killed without workers", 0)])
def test_a_killed_rank_is_named(lost: Path, scenario: str, workers: int) -> None:
    outcome = Outcome(lost / scenario)
    outcome.check_survivors(1, WAITED.format(1), workers)
    assert outcome.codes[1] == -9


def test_a_killed_rank_that_hosts_the_store_is_named(lost: Path) -> None:
    outcome = Outcome(lost / "killed with the store")
    outcome.check_survivors(
        0,
        r"the process group's store does not respond \(Dist.*Error: .+\): rank 0 or torchrun, which hosts it, has "
        r"ended\.",
    )
    assert outcome.codes == [-9, 1, 1]


def test_an_unresponsive_rank_that_hosts_the_store_is_named(lost: Path) -> None:
    outcome = Outcome(lost / "silent store")
    outcome.check_survivors(
        0,
        r"the process group's store has not responded for 6 s \(timeout_s\): rank 0 or torchrun, which hosts it, is "
        r"unreachable\.",
    )
    assert outcome.codes == [-9, 1, 1]  # rank 0 was killed after the others had ended


@pytest.mark.parametrize(("scenario", "who"), [("exits", 1), ("exits with the store", 0)])
def test_a_rank_that_exits_is_named(lost: Path, scenario: str, who: int) -> None:
    outcome = Outcome(lost / scenario)
    gone = r"the process group's store does not respond .+: rank 0 or torchrun, which hosts it, has ended\."
    outcome.check_survivors(who, f"({ENDED.format(who)}|{gone})" if who == 0 else ENDED.format(who))
    assert outcome.codes[who] == 3


def test_a_rank_that_fails_in_its_loop_is_named_with_the_error(lost: Path) -> None:
    outcome = Outcome(lost / "fails")
    outcome.check_survivors(1, FAILED.format(1, "LookupError: no such label"))
    assert "Exception ignored" not in "".join(outcome.stderr)


@pytest.mark.parametrize(
    ("workers", "error"),
    [(0, r"ValueError: \d\d is no sample"), (2, r"ValueError: Caught .+ process \d\.")],
)
def test_a_bad_sample_is_an_error_on_its_rank_and_reported_to_the_others(lost: Path, workers: int, error: str) -> None:
    outcome = Outcome(lost / f"bad sample, {workers} workers")
    outcome.check_survivors(1, FAILED.format(1, error), workers)
    assert re.match(r"ValueError: .*is no sample", outcome.results[1]["error"], re.DOTALL)
    assert len(outcome.results[1]["epochs"]) == 1


def test_a_rank_that_cannot_start_is_named_with_the_error(lost: Path) -> None:
    outcome = Outcome(lost / "cannot start")
    message = "RankLostError: The ranks cannot begin epoch 1 of a ShardReadingService together: " + FAILED
    assert outcome.results[1]["error"] == "OSError: no such disk"
    for rank in (0, 2):
        assert re.fullmatch(message.format(1, "OSError: no such disk"), outcome.results[rank]["error"])


def test_a_rank_with_fewer_epochs_is_named(lost: Path) -> None:
    outcome = Outcome(lost / "epochs differ")
    outcome.check_survivors(0, ENDED.format(0))
    assert "error" not in outcome.results[0]


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_does_not_start_is_named(lost: Path, who: int) -> None:
    outcome = Outcome(lost / f"rank {who} never starts")
    message = rf"RankLostError: The ranks cannot start .+ together: {WAITED.format(who)}"
    for rank in outcome.ranks:
        assert rank == who or re.fullmatch(message, outcome.results[rank]["error"])


@pytest.mark.parametrize(
    ("scenario", "epochs"),
    [("ends first", 1), ("ends first with the store", 1), ("without shutdown", 2), ("file store", 3)],
)
def test_ranks_end_when_they_are_done_without_affecting_others(lost: Path, scenario: str, epochs: int) -> None:
    Outcome(lost / scenario).check_whole(epochs)


def test_a_waiting_rank_can_be_interrupted_and_retry(lost: Path) -> None:
    outcome = Outcome(lost / "interrupted")
    assert all(results["all have come"] for results in outcome.results)
    outcome.check_whole(3)


@pytest.mark.parametrize("store", ["TCPStore", "HashStore"])
def test_a_single_rank_reads_everything(lost: Path, store: str) -> None:
    outcome = Outcome(lost / f"alone, {store}")
    outcome.check_whole(10)
    assert outcome.results[0]["keys"] == {"grown": 0, "left": 0}
