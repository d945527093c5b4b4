"""One state for three loaders: ``DataLoader2``, ``StatefulDataLoader``, and torch's ``DataLoader``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from error_facts import naming
from loader_kinds import InStateful, Service, Tracked
from pipeline_table import EXACT, all_keys, key_of, of, shards_of, split
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardReadingService, StatefulShards, merge_states
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import WorkerState, checkpoints_in, state_of
from wds_datapipes.loading.stateful_dataset.tracking import RecordedBatch
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Instance

KEYS = all_keys(2)


shards = shards_of(2)
pipeline = EXACT["keys"]


def batches_of(data: StatefulShards, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader[Any](
        data, num_workers=workers, collate_fn=list, multiprocessing_context="fork" if workers else None, **options
    )


def test_an_interrupted_epoch_is_followed_by_the_next_one() -> None:
    data = StatefulShards(pipeline())
    loader = batches_of(data, 2, batch_size=2, persistent_workers=True)
    epochs = []
    for cut in (1, 3, 0, 99):
        with closing(data.tracked(loader)) as batches:  # type: ignore[type-var]  # it is a generator
            epochs.append(list(itertools.islice(batches, cut)))
    other = StatefulShards(pipeline())
    loader = batches_of(other, 2, batch_size=2)
    wanted = [list(other.tracked(loader)) for _ in range(3)]
    assert epochs == [wanted[0][:1], wanted[1][:3], [], wanted[2]]


def refuse(key: str) -> str:
    if Path("refused").exists() and key == Path("refused").read_text():
        raise ValueError(key)
    return key


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize(
    ("kind", "workers", "batch_size"),
    [(Service, 0, None), (Tracked, 0, None), (Tracked, 0, 3), (Tracked, 2, 3), (InStateful, 0, 3)],
)
def test_an_error_within_a_batch_loses_nothing_that_was_read_for_it(
    kind: Any, workers: int, batch_size: int | None, batch: int
) -> None:
    def run(state: Any = None) -> Any:
        pipe = split().shuffle_samples(6).map(key_of).map(refuse)
        options = {"batch_size": batch_size} if batch_size else {}
        return kind(lambda: pipe if batch_size else pipe.batch(3), workers, state, **options)

    whole: list[list[str]] = list(run().epoch())
    Path("refused").write_text(whole[batch][1])
    loop, begun = run(), list[list[str]]()
    with pytest.raises(ValueError, match=whole[batch][1]):
        begun.extend(loop.epoch())
    assert begun == whole[:batch]
    Path("refused").unlink()
    assert begun + list(run(loop.state()).epoch()) == whole


def interrupt(key: str) -> str:
    try:
        return refuse(key)
    except ValueError:
        raise KeyboardInterrupt from None


@pytest.mark.parametrize(("kind", "batch_size"), [(Service, None), (Tracked, 3)])
def test_a_stream_continues_in_the_same_process_with_the_batch_that_ctrl_c_has_ended(
    kind: Any, batch_size: int | None
) -> None:
    def run() -> Any:
        pipe = split().shuffle_samples(6).map(key_of).map(interrupt)
        options = {"batch_size": batch_size} if batch_size else {}
        return kind(lambda: pipe.with_epoch(12) if batch_size else pipe.batch(3).with_epoch(4), 0, **options)

    loop = run()
    whole: list[list[str]] = [batch for _ in range(2) for batch in loop.epoch()]
    Path("refused").write_text(whole[2][1])
    loop, begun = run(), list[list[str]]()
    with pytest.raises(KeyboardInterrupt):
        begun.extend(loop.epoch())
    Path("refused").unlink()
    assert [*begun, *loop.epoch()] == whole[:6]


def test_an_untracked_loop_ended_by_an_error_has_no_state() -> None:
    run = Tracked(lambda: split().map(key_of).map(refuse), 0, batch_size=3)
    Path("refused").write_text(KEYS[7])
    with pytest.raises(ValueError, match=KEYS[7]):
        list(run.loader)
    Path("refused").unlink()
    with pytest.raises(StateError, match=r"what was read for it would be lost.*loop over data\.tracked\(loader\)"):
        run.state()


def test_an_epoch_without_batches_has_a_state() -> None:
    build_shard("empty.tar", [])
    data = StatefulShards(of("empty.tar"))
    loader = batches_of(data, 2, batch_size=None)
    assert list(data.tracked(loader)) == list(data.tracked(loader)) == []
    (found,) = checkpoints_in(data.state_dict())
    assert (found.epoch.number, found.is_over) == (1, True)


def test_a_loader_with_spawned_workers_is_tracked() -> None:
    pipe = split().shuffle_samples(6).to_tuple("__key__")
    data = StatefulShards(pipe)
    batches = data.tracked(DataLoader[Any](data, batch_size=4, num_workers=1, multiprocessing_context="spawn"))
    head = list(itertools.islice(batches, 3))
    state, rest = data.state_dict(), list(batches)
    assert sorted(key for (keys,) in head + rest for key in keys) == KEYS
    data = StatefulShards(pipe)
    data.load_state_dict(state)
    loader = DataLoader[Any](data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert list(data.tracked(loader)) == rest


def test_loops_of_other_loaders_are_unchanged() -> None:
    data = StatefulShards(pipeline())
    loader = batches_of(data, 2, batch_size=2, persistent_workers=True)
    collate = loader.collate_fn
    list(data.tracked(loader))
    assert loader.collate_fn is collate
    # Another loop over the same workers takes batches, and the dataset knows that this one has not seen them.
    assert sorted(key for batch in loader for key in batch) == KEYS
    with pytest.raises(StateError, match="positions of the worker processes"):
        data.state_dict()


def test_workers_not_started_by_a_tracked_loop_are_refused() -> None:
    data = StatefulShards(pipeline())
    loader = batches_of(data, 1, batch_size=2, persistent_workers=True)
    list(loader)
    with pytest.raises(StateError, match="from the first epoch on"):
        next(data.tracked(loader))
    with pytest.raises(ValueError, match="a loader of this dataset"):
        next(StatefulShards(pipeline()).tracked(loader))


def test_a_state_for_running_workers_is_refused() -> None:
    data = StatefulShards(pipeline())
    loader = batches_of(data, 1, batch_size=2, persistent_workers=True)
    batches = data.tracked(loader)
    next(batches)
    state = data.state_dict()
    list(batches)
    data.load_state_dict(state)
    with pytest.raises(StateError, match="started before the state was loaded"):
        list(loader)
    with closing(Service(pipeline, 1)) as run:
        next(run.epoch())
        with pytest.raises(StateError, match="before the first epoch begins"):
            run.loader.reading_service.load_state_dict(state)


def test_another_epoch_than_that_of_the_state_is_refused() -> None:
    data = StatefulShards(pipeline())
    next(iter(data))
    data.load_state_dict(data.state_dict())
    data.set_epoch(5)
    with pytest.raises(StateError, match=naming("set_epoch(5)", "epoch 0")):
        list(data)


@pytest.mark.parametrize("loading", [Service, InStateful, Tracked])
@pytest.mark.parametrize("saving", [Service, Tracked])  # workers of a StatefulDataLoader have reported states before
def test_a_state_contains_a_chosen_epoch_that_has_not_begun(saving: Any, loading: Any) -> None:
    with closing(saving(pipeline, 2)) as run:
        epoch = run.epoch()
        head = list(itertools.islice(epoch, 7))
        (run.loader if saving is Service else run.data).set_epoch(6)
        state = run.state()
        rest, following = list(epoch), list(run.epoch())
    with closing(loading(pipeline, 2, state)) as run:
        assert [list(run.epoch()), list(run.epoch())] == [rest, following]
    assert sorted(head + rest) == sorted(following) == KEYS


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_different_number_of_workers_in_another_epoch_is_refused(before: int, after: int) -> None:
    data = StatefulShards(pipeline())
    list(data.tracked(batches_of(data, before, batch_size=2)))
    state = data.state_dict()
    with pytest.raises(StateError, match=f"but there are {after} now"):
        list(batches_of(data, after, batch_size=2))
    other = StatefulShards(pipeline())
    other.load_state_dict(state)
    assert sorted(key for batch in batches_of(other, after, batch_size=2) for key in batch) == KEYS


@dataclass
class Pinned:
    """An object that torch pins by calling its method."""

    keys: list[str]
    is_pinned: bool = False

    def pin_memory(self) -> Pinned:
        return Pinned(self.keys, True)


def test_torch_pins_the_batch_and_not_its_record() -> None:
    # The function called by the thread of a loader with pin_memory=True, which exists only with an accelerator.
    pin: Callable[[Any], Any] = pin_memory
    assert pin(RecordedBatch(Pinned(["a"]), 1, 0, b"[]", True)) == RecordedBatch(Pinned(["a"], True), 1, 0, b"[]", True)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def state_dict(self) -> dict[str, Any]:
        return {"number": 3}


def state_with(**options: Any) -> Any:
    loader = StatefulDataLoader[Any](
        StatefulShards(pipeline()), batch_size=2, collate_fn=list, multiprocessing_context="fork", **options
    )
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    return loader.state_dict()


def state_of_numbers() -> Any:
    loader = StatefulDataLoader[Any](Numbers(), batch_size=2)
    next(iter(loader))
    return loader.state_dict()


def own_state(**changes: Any) -> Any:
    data = StatefulShards(pipeline())
    next(iter(data))
    return state_of([replace(checkpoint, **changes) for checkpoint in checkpoints_in(data.state_dict())])


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (lambda: {"format": "x"}, "not the state of a loader, which has the key 'wds_datapipes'; its keys: 'format'"),
        (lambda: own_state(stages=["x"]), "different pipeline. Counted from the end, stage 0 was x"),
        (lambda: state_with(num_workers=2, snapshot_every_n_steps=2), "1 step before it was saved"),
        (
            lambda: state_with(num_workers=1)["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"],
            "one worker",
        ),
        (state_of_numbers, "dataset is not a StatefulShards"),
        (lambda: "{", "a JSON text with its version"),
        (lambda: b"\x80\x04junk", "a JSON text with its version"),
        (
            lambda: b'{"version": 99, "ranks": []}',
            "version 99, but this release .* only version 14.* restart the epoch",
        ),
        (lambda: b'{"version": 14}\n{}', "its checksum differs"),
        (lambda: b'{"version": 14, "crc32": 0}', "contains no ranks"),
        (lambda: [3], "not the state of a loader"),
    ],
)
def test_states_that_cannot_be_loaded_are_named(state: Callable[[], Any], text: str) -> None:
    found = state()
    with pytest.raises(StateError, match=text):
        StatefulShards(pipeline()).load_state_dict(found)
    if not any(part in text for part in ("one worker", "seed", "another", "pipeline")):
        with pytest.raises(StateError, match=text):
            ShardReadingService().load_state_dict(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"instance": Instance(ranks=1 << 62, workers=0)},
        {"instance": Instance(workers=cast("int", "2"))},
        {"epoch": Epoch(seed=cast("int", [3]))},
        {"parts": [WorkerState.of([{"next": 3}, {}])]},
    ],
)
def test_values_that_no_loader_has_saved_are_refused_despite_a_valid_checksum(changes: dict[str, Any]) -> None:
    state, data = own_state(**changes), StatefulShards(pipeline())
    with pytest.raises(StateError, match=r"state of a loader is corrupt|requires one state per rank"):  # noqa: PT012
        merge_states([state])
        data.load_state_dict(state)
        next(iter(data))


def test_a_state_of_another_seed_is_refused_by_the_dataset_but_not_the_service() -> None:
    with closing(Service(pipeline, 0, seed=5)) as run:
        epoch = run.epoch()
        next(epoch)
        state, rest = run.state(), list(epoch)
    with pytest.raises(StateError, match=naming("seed 5", "seed here is 3")):
        StatefulShards(pipeline(), seed=3).load_state_dict(state)
    with closing(Service(pipeline, 0, state)) as run:
        assert list(run.epoch()) == rest
