"""The cost of a state of 512 ranks with 8 workers each for a rank, by counting operations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from error_facts import naming
from sweeps import WHOLE

from wds_datapipes import ShardList, merge_states
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, checkpoints_in, state_of
from wds_datapipes.loading.checkpoint.resharding import outline_state, ranks_to_read, state_of_rank
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.shards import position
from wds_datapipes.shards.packed_rows import pack_rows, unpack_rows
from wds_datapipes.types import Instance

RANKS, WORKERS, BUFFER = 512, 8, 1000 if WHOLE else 250
PARTS = RANKS * WORKERS


def pipeline() -> Any:
    urls = ShardList([f"train-{number:05}.tar" for number in range(20_000)]).shuffle().sharding_filter()
    return urls.load_wds_shards().group_samples().shuffle_samples(BUFFER)


@pytest.fixture(scope="module")
def merged() -> dict[str, str]:
    """The states of all ranks after three shards of each worker, with as many samples as a buffer."""
    rows = [[number * 7 % 3, 10_240 * number, 10_240 * (number + 1)] for number in range(0, 3 * BUFFER, 3)]
    waiting = pack_rows(sorted(rows, key=lambda row: row[1] * 7919 % 10_007))
    listed = [[3 * PARTS, "0123456789abcdef" * 2, "train-12287.tar"]]
    states: list[dict[str, Any]] = [
        {"next": [3, 512, "003-0001"], "shard_list": listed},
        {"waiting": waiting, "draws": 2000, "buffer_size": BUFFER},
    ]
    facts: dict[str, Any] = {"stages": descriptions(pipeline()), "parts": [WorkerState.of(states)] * WORKERS}
    instances = [Instance(rank, RANKS, workers=WORKERS) for rank in range(RANKS)]
    return merge_states([state_of([Checkpoint(epoch=Epoch(1, 0, 1, 2), instance=each, **facts)]) for each in instances])


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the lists of positions that are unpacked."""
    found = Counter[str]()

    def counted(packed: Any) -> Any:
        found["unpacked"] += isinstance(packed, str)
        return unpack_rows(packed)

    monkeypatch.setattr(position, "unpack_rows", counted)
    return found


def parsed(checkpoints: list[Checkpoint]) -> int:
    return sum("stages" in vars(part) for checkpoint in checkpoints for part in checkpoint.parts)


def test_a_waiting_sample_takes_six_bytes_of_the_state(merged: dict[str, str]) -> None:
    assert len(merged["wds_datapipes"]) <= 6 * PARTS * BUFFER


def test_merging_parses_no_part(merged: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerState, "stages", None)
    by_rank = [state_of([checkpoint]) for checkpoint in checkpoints_in(merged)]
    assert merge_states(by_rank[::-1]).keys() == merged.keys()


def test_a_rank_parses_its_own_parts(merged: dict[str, str], counts: Counter[str]) -> None:
    saved = checkpoints_in(merged)
    own = state_of_rank(saved, pipeline(), Instance(5, RANKS, workers=WORKERS))
    own.log_replay("")
    assert own.parts == saved[5].parts
    assert parsed(saved) == WORKERS
    assert not counts


@pytest.mark.parametrize("ranks", [64, 384, 511, 513, 4096])
def test_a_rank_unpacks_the_positions_that_it_takes_over(
    merged: dict[str, str], counts: Counter[str], ranks: int
) -> None:
    own = state_of_rank(checkpoints_in(merged), pipeline(), Instance(ranks=ranks, workers=WORKERS))
    assert len(own.parts) == WORKERS
    assert counts["unpacked"] <= -(-PARTS // (ranks * WORKERS)) * WORKERS
    assert sum(len(part.text) for part in own.parts) <= 1024 * WORKERS + 6 * BUFFER * counts["unpacked"]


@pytest.mark.parametrize("ranks", [64, 512, 513, 4096])
def test_a_rank_reads_the_states_that_it_takes_over_and_outlines_of_others(merged: dict[str, str], ranks: int) -> None:
    saved = checkpoints_in(merged)
    outlines = [outline_state(state_of([checkpoint])) for checkpoint in saved]
    assert sum(len(outline["wds_datapipes"]) for outline in outlines) <= 400 * PARTS
    own = ranks_to_read(outlines, pipeline(), rank=5, ranks=ranks, workers=WORKERS)
    assert len(own) <= max(RANKS // ranks, 1) + (WORKERS if ranks % RANKS and RANKS % ranks else 0)
    read = merge_states([state_of([saved[n]]) if n in own else outlines[n] for n in range(RANKS)])
    instance = Instance(5, ranks, workers=WORKERS)
    if ranks != RANKS:
        with pytest.raises(StateError, match=naming("outline", "waiting samples")):
            state_of_rank(checkpoints_in(merge_states(outlines)), pipeline(), instance)
    assert state_of_rank(checkpoints_in(read), pipeline(), instance) == state_of_rank(saved, pipeline(), instance)
