"""The samples of a step of a stream, as read from its log, are those that the loops of all ranks received."""

from __future__ import annotations

import shutil
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
from data_parallel_pipelines import open_service
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_shards import numbered_shards
from sweeps import WHOLE
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import ShardList, StatefulShards, explain, merge_states
from wds_datapipes.errors import ChangedShardError, MissingSidecarError, StateError
from wds_datapipes.loading.checkpoint.format import checkpoints_in
from wds_datapipes.samples.fields import WrongItemError
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.runs.steps import RunSteps

SIZES = [7, 0, 5, 9, 6, 8, 3, 4]

Epochs = list[list[list[str]]]

shards = numbered_shards(SIZES)


def samples_of(urls: str) -> Any:
    return ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(6)


def stream(batch: int, *, drop_last: bool = False, is_mixed: bool = False) -> Any:
    samples = samples_of("{0..7}.tar")
    if is_mixed:
        samples = samples_of("{0..3}.tar").mix_samples(samples_of("{4..7}.tar"), stop="never").with_epoch(29)
    pipe = samples.log_samples(first=0, positions="log").to_tuple("__key__")
    return pipe.batch(batch, drop_last=drop_last)


def keys_of(batch: Any) -> list[str]:
    return [key for (key,) in batch]


def steps_of(ranks: list[Epochs]) -> list[list[str]]:
    """Return the keys of all ranks in each step, from those of each rank in its epochs."""
    epochs = (zip_longest(*of_ranks, fillvalue=()) for of_ranks in zip(*ranks, strict=True))
    return [[*chain(*batches)] for batches in chain(*epochs)]


@settings(max_examples=8 if WHOLE else 5)
@given(
    batch=st.integers(1, 5),
    options=st.sampled_from([{}, {"drop_last": True}, {"is_mixed": True}]),
    ranks=st.sampled_from([1, 2]),
    workers=st.integers(0, 3),
    cut=st.integers(1, 4),
)
def test_a_step_has_the_samples_that_the_loops_of_all_ranks_received(
    batch: int, options: Any, ranks: int, workers: int, cut: int
) -> None:
    """The second epoch is interrupted after some batches, when workers have logged others that no loop received."""
    shutil.rmtree("log", ignore_errors=True)
    received, states = list[Epochs](), list[Any]()
    for rank in range(ranks):
        with open_service(stream(batch, **options), workers, distributed=(rank, ranks)) as loader:
            received.append([[*map(keys_of, loader)], [*map(keys_of, islice(loader, cut))]])
            states.append(loader.reading_service.state_dict())
    state = merge_states(states)
    for rank, epochs in enumerate(received):
        with open_service(stream(batch, **options), workers, distributed=(rank, ranks)) as loader:
            loader.reading_service.load_state_dict(state)
            if not all(each.is_over for each in checkpoints_in(state)):
                epochs[-1] += [*map(keys_of, loader)]
            epochs.append([*map(keys_of, loader)])
    expected = steps_of(received)
    run = RunSteps(stream(batch, **options), state)
    found = [run.samples(step) for step in range(len(expected))]
    assert [[each.key for each in samples] for samples in found] == expected
    assert [[sample["__key__"] for sample in run.read(step)] for step in range(len(expected))] == expected
    assert all(each.key == f"{each.shard[0]}-{each.number}" for each in chain(*found))
    assert {each.epoch for each in found[-1]} == {2}
    with pytest.raises(StateError, match="ends before epoch 3"):
        run.samples(len(expected))


def test_epochs_may_have_other_workers_and_loaders() -> None:
    with open_service(stream(2), 2) as loader:
        epochs = [[*map(keys_of, loader)] for _ in range(2)]
        state = loader.reading_service.state_dict()
    data = StatefulShards(stream(2), seed=7)
    data.load_state_dict(state)
    tracked = StatefulDataLoader(data, batch_size=None, num_workers=1)
    epochs.append([*map(keys_of, tracked)])
    expected = steps_of([epochs])
    assert [[each.key for each in explain(stream(2), state, step)] for step in range(len(expected))] == expected


def begun(pipe: Any) -> Any:
    data = StatefulShards(pipe, seed=1)
    next(iter(data))
    return data.state_dict()


def test_an_incomplete_log_is_an_error() -> None:
    state = begun(stream(2))
    (log,) = Path("log").rglob("*.positions")
    run = RunSteps(stream(2), state)
    with pytest.raises(StateError, match="A stream has only a log of positions"):
        next(run.replay(0))
    with pytest.raises(StateError, match="A stream has only a log of positions"):
        run.seen()
    shard, samples = run.samples(0)[0].shard, [{"__key__": "x", "txt": "t" * 5000}, {"__key__": "y", "cls": "1"}]
    build_shard(shard, samples)  # of the same size, as archives are padded
    with pytest.raises(ChangedShardError, match=shard):
        [*run.read(0)]
    build_shard(shard, [*samples, {"__key__": "z", "txt": "t" * 20_000}])
    with pytest.raises(StateError, match=naming("replaced", "in the log")):
        run.samples(0)
    log.rename(log.with_name("000000-0of2-0of1.positions"))
    with pytest.raises(StateError, match=naming("epoch 0", "workers")):
        run.samples(0)


def test_steps_before_the_first_batch_of_a_worker_without_a_log_are_known() -> None:
    """A run may be killed before all its workers have begun an epoch."""
    with open_service(stream(2), 2) as loader:
        first = next(iter(loader))
        state = loader.reading_service.state_dict()
    for log in Path("log").rglob("*-1of2.positions"):
        log.unlink()
    assert [each.key for each in explain(stream(2), state, 0)] == keys_of(first)
    with pytest.raises(StateError, match=naming("epoch 0", "workers")):
        explain(stream(2), state, 1)


def test_a_log_that_lacks_samples_before_a_state_is_not_continued() -> None:
    state = begun(stream(2))
    (log,) = Path("log").rglob("*.positions")
    changes: dict[str, Any] = {
        "it has only 0 of 2 samples before the loaded state": lambda: log.write_bytes(b"1234567"),
        "No such file or directory": log.unlink,
    }
    for message, change in changes.items():
        change()
        data = StatefulShards(stream(2), seed=1)
        data.load_state_dict(state)
        with pytest.raises(MissingSidecarError, match=f"The log .*000000-0of1-0of1.positions' cannot .*{message}"):
            next(iter(data))
    shutil.rmtree("log")
    Path("log").touch()
    with pytest.raises(MissingSidecarError, match="cannot be written: Not a directory"):
        begun(stream(2))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda samples: samples.batch(2), r"require the log of \.log_samples\(positions=\)"),
        (lambda samples: samples.log_samples(positions="log").shuffle_samples(5), r"\.shuffle_samples\(\) comes after"),
        (
            lambda samples: samples.log_samples(positions="log").filter(bool).batch(2),
            r"\.filter\(\) comes after the log",
        ),
    ],
)
def test_steps_that_do_not_follow_from_a_log_are_refused(add: Any, message: str) -> None:
    state = begun(add(samples_of("{0..7}.tar")))
    with pytest.raises(ValueError, match=message):
        explain(add(samples_of("{0..7}.tar")), state, 0)


def test_samples_without_a_place_in_a_run_are_not_logged() -> None:
    with pytest.raises(RuntimeError, match=naming("StatefulShards", "ShardReadingService")):
        list(stream(2))
    logged = samples_of("{0..3}.tar").log_samples(positions="log")
    with pytest.raises(RuntimeError, match=r"Put it after \.mix_samples\(\)"):
        list(StatefulShards(logged.mix_samples(samples_of("{4..7}.tar"), stop="never").with_epoch(99), seed=1))
    with pytest.raises(WrongItemError, match=r"needs samples.* before stages such as to_tuple"):
        begun(samples_of("{0..3}.tar").to_tuple("cls").log_samples(positions="log"))
