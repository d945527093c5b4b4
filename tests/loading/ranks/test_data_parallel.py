"""A data-parallel rank given as a pair ``(rank, world_size)``, without a process group."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parallel_pipelines import BATCH, KEYS, flat, open_service, stream, write_shards
from torch.utils.data import DataLoader

from wds_datapipes import ShardReadingService, StatefulShards, merge_states
from wds_datapipes.errors import StateError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("pairs"))


def loader_of(folder: Path, distributed: Any, *, seed: int | None = 7, state: Any = None) -> Any:
    pipe = stream(folder, distributed[1] if distributed else 1)
    return open_service(pipe, 0, state, distributed=distributed, seed=seed)


def test_states_resume_with_the_seed_in_them(folder: Path) -> None:
    states = []
    for rank in range(2):
        with loader_of(folder, (rank, 2)) as loader:
            whole = [list(loader), list(loader)]
        with loader_of(folder, (rank, 2)) as loader:
            begun = list(islice(loader, 1))
            states.append(loader.state_dict())
        with loader_of(folder, (rank, 2), seed=None, state=states[-1]) as loader:
            assert [begun + list(loader), list(loader)] == whole
    with loader_of(folder, False, seed=None, state=merge_states(states)) as loader:
        assert len(flat(loader)) == len(KEYS) - BATCH


def test_a_rank_that_had_ended_needs_the_states_of_all(folder: Path) -> None:
    """Without them, it cannot know whether the other ranks are still in the same epoch."""
    with loader_of(folder, (0, 2)) as loader:
        list(loader)
        ended = loader.state_dict()
        following = list(loader)
    with loader_of(folder, (1, 2)) as loader:
        next(iter(loader))
        begun = loader.state_dict()
    with (
        loader_of(folder, (0, 2), state=ended) as loader,
        pytest.raises(StateError, match="The epoch of rank 0 had ended"),
    ):
        list(loader)
    with loader_of(folder, (0, 2), state=merge_states([ended, begun])) as loader:
        assert [list(loader), list(loader)] == [[], following]


def test_duplicate_states_of_a_rank_count_once(folder: Path) -> None:
    states = []
    for rank in (0, 1, 0, 1):
        with loader_of(folder, (rank, 2)) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    assert merge_states(states) == merge_states(states[:2]) != merge_states(states[1:3])
    with loader_of(folder, (1, 2)) as loader:
        list(islice(loader, 2))
        later = loader.state_dict()
    with pytest.raises(StateError, match="two different states of rank 1 of 2"):
        merge_states([*states, later])


@pytest.mark.parametrize(
    ("distributed", "error", "text"),
    [
        ((2, 2), ValueError, r"\(2, 2\) is the pair \(rank, world_size\), whose rank must be from 0"),
        ((-1, 2), ValueError, "whose rank must be from 0"),
        ((0, 0), ValueError, "whose rank must be from 0"),
        ((0, 1, 2), TypeError, "must be a pair of integers"),
        ((np.int64(2), np.int64(2)), ValueError, "whose rank must be from 0"),
        ((True, 2), TypeError, "must be a pair of integers"),
        (("0", 2), TypeError, "must be a pair of integers"),
        ("dp", TypeError, r"must be True, False, None, a ProcessGroup, .* not 'dp'"),
    ],
)
def test_an_invalid_group_is_refused(folder: Path, distributed: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ShardReadingService(distributed=distributed)
    with pytest.raises(error, match=text):
        StatefulShards(stream(folder, 2), distributed=distributed)


def test_stateful_shards_ask_for_a_process_group(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"StatefulShards\(distributed=True\) requires a process group"):
        StatefulShards(stream(folder, 2), distributed=True)


def test_a_list_of_one_rank_is_not_split(folder: Path) -> None:
    data = StatefulShards(stream(folder, 2), distributed=False)
    assert sorted(flat(DataLoader(data, batch_size=None))) == KEYS
