"""States of ranks when one has reached the end of an epoch and another has not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from data_parallel_pipelines import open_service
from forked_ranks import on_ranks
from numbered_shards import key_of, numbered_shards

from wds_datapipes import ShardList, merge_states
from wds_datapipes.errors import RankLostError, StateError

#: Without a shuffle, one rank has far fewer samples than the other, with any number of workers.
SIZES = (2, 1, 20, 14)
KEYS = sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size))


shards = numbered_shards(SIZES)


def pipeline() -> Any:
    pipe = ShardList("{0..3}.tar").sharding_filter().load_wds_shards().group_samples()
    return pipe.shuffle_samples(4).map(key_of)


def loader_of(workers: int) -> Any:
    return open_service(pipeline(), workers, distributed=dist.is_initialized())


def of_all_ranks(own: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def resumed(workers: int, state: Any, epochs: int = 2) -> list[list[str]]:
    with loader_of(workers) as loader:
        loader.load_state_dict(state)
        return [list(loader) for _ in range(epochs)]


def save_and_resume(rank: int) -> list[Any]:
    """Check each cut on this rank; return the items up to then, and the state of all ranks."""
    merged = []
    for workers in (0, 2):
        with loader_of(workers) as loader:
            whole = [list(loader) for _ in range(3)]
        fewest, most = sorted(of_all_ranks(len(whole[0])))
        assert fewest + 5 < most
        # Both in the middle; all items seen but one end not reached; one end reached, ...; both ends reached.
        for cut in (2, fewest, fewest + 1, fewest + 5, most, most + 1):
            with loader_of(workers) as loader:
                list(loader)
                items = iter(loader)
                head = [key for key in (next(items, None) for _ in range(cut)) if key is not None]
                state = loader.state_dict()
            states = of_all_ranks(state)
            both_are_over = cut > most
            expected = whole[2:] if both_are_over else [whole[1][len(head) :], whole[2]]
            for each in (state, merge_states(states), merge_states(states[::-1])):
                assert resumed(workers, each, len(expected)) == expected, (workers, cut)
            if not both_are_over:
                came = of_all_ranks(head)
                rests = of_all_ranks(resumed(1, merge_states(states)))  # with a different number of workers
                assert sorted(itertools.chain(*came, *(rest[0] for rest in rests))) == KEYS, (workers, cut)
                assert sorted(itertools.chain(*(rest[1] for rest in rests))) == KEYS
                merged.append((came, merge_states(states)))
    return merged


def test_a_finished_rank_also_waits_for_the_others_after_a_resume(tmp_path: Path) -> None:
    first, second = on_ranks(2, save_and_resume)
    assert first == second
    assert len(first) == 2 * 5
    for came, state in first:  # and one rank resumes alone
        rest, following = resumed(3, state)
        assert sorted(itertools.chain(*came, rest)) == KEYS
        assert sorted(following) == KEYS


def resume_differently(rank: int) -> list[str]:
    def saved(epochs: int) -> Any:
        with loader_of(0) as loader:
            for _ in range(epochs):
                list(loader)
            next(iter(loader))
            return loader.state_dict()

    states = [saved(0), saved(1)]
    refusals = []
    for state in (states[rank], states[0] if rank == 0 else None):
        with loader_of(0) as loader:
            if state is not None:
                loader.load_state_dict(state)
            with pytest.raises((StateError, RankLostError)) as caught:
                next(iter(loader))
        refusals.append(str(caught.value))
    return refusals


def test_ranks_that_resume_in_different_epochs_are_an_error(tmp_path: Path) -> None:
    """Otherwise samples would silently repeat or be lost."""
    ranks = on_ranks(2, resume_differently)
    for number, what in enumerate(["a state of another epoch", "no state"]):
        messages = [refusals[number] for refusals in ranks]
        assert any(f"has {what}. Load the states that all ranks have saved" in message for message in messages), (
            messages
        )
