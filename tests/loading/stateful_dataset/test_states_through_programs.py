"""States that other programs save and load at any point, compared with an uninterrupted run."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from forked_ranks import on_ranks
from loader_kinds import Stateful, Tracked
from pipeline_table import EXACT, all_keys, shards_of
from sweeps import WHOLE
from torch.distributed import all_gather_object
from torchdata.dataloader2 import DataLoader2
from torchdata.stateful_dataloader import StatefulDataLoader
from users_stages import Unchanged

from wds_datapipes import ShardReadingService, merge_states
from wds_datapipes.errors import StateError

pytestmark = [
    # A distributed checkpoint of a single process warns that there is only one.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
]

KEYS = all_keys(2)
BATCH_SIZE = 3

Epoch = list[list[str]]


shards = shards_of(2)
pipeline = EXACT["keys"]


def new_run(workers: int, *, stateful: bool = False) -> Any:
    """Return torch's loader, whose loop is tracked, or torchdata's."""
    return (Stateful if stateful else Tracked)(pipeline, workers, batch_size=BATCH_SIZE)


def keys_of(*epochs: Epoch) -> list[str]:
    return sorted(key for epoch in epochs for batch in epoch for key in batch)


@pytest.mark.parametrize(
    ("workers", "cut"), [*itertools.product([0, 2], [0, 4, 99])] if WHOLE else [(0, 0), (0, 4), (0, 99), (2, 4)]
)
@pytest.mark.parametrize("stateful", [False, True])
def test_an_epoch_can_be_chosen_after_loading_a_state(stateful: bool, workers: int, cut: int) -> None:
    """Trainers call set_epoch() before each epoch, including the epoch of the state."""

    def choose(run: Any, epoch: int) -> Any:
        run.data.set_epoch(epoch)
        return run.epoch()

    run = new_run(workers, stateful=stateful)
    list(choose(run, 4))
    if cut:
        epoch = choose(run, 5)
        head = list(itertools.islice(epoch, cut))
        state = run.state()
        rest = list(epoch)
        assert keys_of(head, rest) == KEYS
    else:
        state = run.state()
        rest = list(choose(run, 5))
    following = [list(choose(run, 6)), list(choose(run, 7))]
    new = new_run(workers, stateful=stateful)
    new.load(state)
    if rest:
        assert list(choose(new, 5)) == rest
    assert [list(choose(new, 6)), list(choose(new, 7))] == following


@pytest.mark.parametrize("drop", ["worker_0", "worker_1"])
def test_a_state_with_fewer_parts_than_workers_is_refused(drop: str) -> None:
    run = new_run(2, stateful=True)
    next(run.epoch())
    state = run.state()
    del state["_snapshot"]["_worker_snapshots"][drop]
    if drop == "worker_0":
        state["_snapshot"]["_worker_snapshots"]["worker_0"] = state["_snapshot"]["_worker_snapshots"].pop("worker_1")
    with pytest.raises(StateError, match=naming("2 workers")):
        run.data.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stateful", [False, True])
def test_loaded_states_merge_before_any_epoch_begins(stateful: bool, workers: int) -> None:
    run = new_run(workers, stateful=stateful)
    expected = list(run.epoch())
    state = new_run(workers, stateful=stateful).state()
    for _ in range(3):
        state = merge_states([state])
        data = new_run(workers).data
        data.load_state_dict(state)
        state = data.state_dict()
    run = new_run(workers)
    run.data.load_state_dict(merge_states([state, state]))
    assert list(run.epoch()) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_stateful_loader_directly_over_a_pipeline_warns(last: bool, workers: int) -> None:
    def new() -> StatefulDataLoader[Any]:
        pipe = Unchanged(pipeline()) if last else pipeline()
        return StatefulDataLoader[Any](pipe, batch_size=BATCH_SIZE, collate_fn=list, num_workers=workers)

    loader = new()
    first = copy.deepcopy(loader.state_dict())
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(
        UserWarning, match=r"does not contain the position of its pipeline .* Pass StatefulShards\(pipe\)"
    ) as found:
        state = copy.deepcopy(loader.state_dict())
    assert found[0].filename == __file__
    loader = new()
    with pytest.raises(StateError, match=r"after the first batch, .* Pass StatefulShards\(pipe\)"):
        loader.load_state_dict(state)
    loader.load_state_dict(first)
    assert keys_of(list(loader)) == KEYS


def test_a_stateful_loader_over_anything_else_is_left_alone() -> None:
    loader = StatefulDataLoader[Any](range(9), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(map(list, iterator))
    loader = StatefulDataLoader[Any](range(9), batch_size=2)
    loader.load_state_dict({})
    loader.load_state_dict(state)
    assert list(map(list, loader)) == rest


def checkpoint_on_ranks(rank: int, *, checkpoint: Any, folder: Path, workers: int, cut: int) -> Any:
    """Save a state under one key, under keys of the ranks, and merged, and resume from each."""
    run = new_run(workers)
    epoch = run.epoch()
    head = list(itertools.islice(epoch, cut))
    state = run.data.state_dict()
    rest = list(epoch)
    following = list(run.epoch())
    states: list[Any] = [None, None]
    all_gather_object(states, state)
    parts = {"one": state, f"rank {rank}": state, "all": merge_states(states)}
    checkpoint.save(parts, checkpoint_id=folder / "checkpoint")
    found = list[Any]()
    for key in ("one", f"rank {rank}", "all"):
        new = new_run(workers)
        template = {key: new.data.state_dict()}
        checkpoint.load(template, checkpoint_id=folder / "checkpoint")
        try:
            new.data.load_state_dict(template[key])
            found.append([list(new.epoch()), list(new.epoch())])
        except StateError as error:
            found.append(str(error))
    return head, rest, following, found


@pytest.mark.parametrize(("workers", "cut"), [(0, 0), (0, 3), (2, 3)])
def test_ranks_resume_from_distributed_checkpoints(tmp_path: Path, workers: int, cut: int) -> None:
    from torch.distributed import checkpoint  # which takes seconds, before ranks are forked, which would all import it

    ranks = on_ranks(2, partial(checkpoint_on_ranks, checkpoint=checkpoint, folder=tmp_path, workers=workers, cut=cut))
    assert keys_of(*(part for head, rest, *_ in ranks for part in (head, rest))) == KEYS
    for rank, (_, rest, following, (one, own, merged)) in enumerate(ranks):
        assert own == merged == [rest, following]
        if rank == 0 or cut == 0:  # no rank has begun
            assert one == own
        else:
            assert "the state of rank 0 of 2, but it was loaded on rank 1 of 2" in one
            assert "merge_states" in one
            assert "its own name" in one


def test_a_state_of_the_service_follows_one_of_the_loader() -> None:
    def opened() -> DataLoader2[Any]:
        loader: DataLoader2[Any] = DataLoader2(pipeline(), reading_service=ShardReadingService(2))
        loader.seed(3)
        return loader

    with opened() as loader:
        loader.state_dict()  # before the first epoch, as a distributed checkpoint requests it
        list(loader)
        state = loader.reading_service.state_dict()
        following = list(loader)
    with opened() as loader:
        loader.load_state_dict(state)
        assert list(loader) == following
