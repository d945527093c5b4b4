"""Streams that `with_epoch` cuts, in worker processes of torch's loaders with a tracked loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from loader_kinds import InStateful, Persistent, Service, Tracked, items_of
from pipeline_table import Pipe, drawn, key_of, shards_of, split
from torch.utils.data import DataLoader, get_worker_info

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import checkpoints_in, state_of

shards = shards_of()


def plain(n: int = 17) -> Pipe:
    return split().shuffle_samples(4).map(key_of).with_epoch(n)


def shuffled_after() -> Pipe:
    return drawn().with_epoch(19).shuffle_samples(5).map(key_of)


def is_even(key: str) -> bool:
    return int(key[-1]) % 2 == 0


def filtered_after() -> Pipe:
    return drawn().shuffle_samples(3).map(key_of).with_epoch(23).filter(is_even)


def batched() -> Pipe:
    return split().shuffle_samples(4).map(key_of).batch(2).with_epoch(7)


def epochs(run: Tracked, count: int) -> list[list[Any]]:
    return [list(run.epoch()) for _ in range(count)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("build", "batch_size"), [(plain, 3), (shuffled_after, None), (filtered_after, 2)])
def test_an_interrupted_epoch_is_followed_by_the_undelivered_items(
    build: Callable[[], Pipe], batch_size: int | None, persistent: bool
) -> None:
    """Workers repeat prefetched items, and the state is known before they make any."""
    options: dict[str, Any] = {"batch_size": batch_size, "persistent_workers": persistent}
    run = Tracked(build, 2, **options)
    broken, cuts = list[list[Any]](), (1, 0, 4)
    for cut in cuts:
        with closing(run.epoch()) as batches:
            broken.append(list(itertools.islice(batches, cut)))
    batches = run.epoch()
    first = next(batches)  # the other worker has not delivered anything yet
    state = run.state()
    rest = [list(batches), *epochs(run, 2)]
    resumed = Tracked(build, 2, state, **options)
    assert epochs(resumed, 3) == rest
    # Another run interrupted at the same points reads the same items, however far ahead its workers were.
    other = Tracked(build, 2, prefetch_factor=1, **options)
    for cut, wanted in zip(cuts, broken, strict=True):
        with closing(other.epoch()) as batches:
            assert list(itertools.islice(batches, cut)) == wanted
    assert epochs(other, 3) == [[first, *rest[0]], *rest[1:]]


def test_each_worker_returns_to_its_own_stream_after_an_epoch_resumed_with_another() -> None:
    """The loader starts with process 0, which had the share of worker 1 in that epoch."""
    run = Tracked(batched, 2)
    batches = run.epoch()
    head = [next(batches)]
    state = run.state()
    wanted = [list(batches), *epochs(run, 2)]
    resumed = Tracked(batched, 2, state, persistent_workers=True)
    assert len(head) + len(wanted[0]) == 7
    assert epochs(resumed, 3) == wanted


def refuse(key: str) -> str:
    if get_worker_info() is not None and "5-" in key:
        raise ValueError("no such label")
    return key


def test_a_loop_ended_by_an_error_resumes_where_it_stopped() -> None:
    run = Tracked(lambda: split().map(key_of).map(refuse).with_epoch(50), 1)
    batches = run.epoch()
    found: list[str] = []
    with pytest.raises(ValueError, match="no such label"):
        found.extend(batches)
    assert 0 < len(found) == len(set(found))
    # The sample is not lost.
    resumed = Tracked(lambda: split().map(key_of).with_epoch(50), 1)
    (own,), (saved,) = checkpoints_in(resumed.state()), checkpoints_in(run.state())
    resumed.data.load_state_dict(state_of([replace(saved, stages=own.stages)]))
    assert "5-" in next(resumed.epoch())


def test_workers_of_an_untracked_loop_refuse_a_stream() -> None:
    run = Tracked(plain, 1)
    with pytest.raises(StateError, match=r"Loop over data\.tracked\(loader\), and save data\.state_dict\(\)"):
        next(iter(run.loader))
    assert len(list(run.epoch())) == 17


def test_the_state_of_a_stateful_loader_names_that_of_the_data_set() -> None:
    run = InStateful(plain, 1, batch_size=2)
    batches = run.epoch()
    next(batches)
    state = run.loader.state_dict()
    batches.close()
    match = r"save and load the dataset: data\.state_dict\(\)"
    with pytest.raises(StateError, match=match):
        run.data.load_state_dict(state)
    with pytest.raises(StateError, match=match):
        InStateful(plain, 1, batch_size=2).loader.load_state_dict(state)


@pytest.mark.parametrize(("before", "after", "cut"), [(2, 1, 2), (0, 2, 99), (2, 0, 99)])
def test_a_stream_with_a_different_number_of_workers_is_refused(before: int, after: int, cut: int) -> None:
    run = Tracked(batched, before)
    batches = run.epoch()
    assert len(list(itertools.islice(batches, cut))) == min(cut, 7)
    state = run.state()
    with pytest.raises(StateError, match="invalid with a different number of ranks or workers"):
        next(Tracked(batched, after, state).epoch())
    batches.close()
    loader = DataLoader[Any](
        run.data, batch_size=None, num_workers=after, multiprocessing_context="fork" if after else None
    )
    with pytest.raises(StateError, match=f"but there are {after} now"):
        next(run.data.tracked(loader))


@pytest.mark.parametrize("kind", [Service, Tracked, Persistent])
def test_a_worker_that_has_delivered_nothing_begins_the_same_stream_again(kind: Any) -> None:
    """With the seeds of another epoch, it would share another order of the shards than the other worker."""
    with closing(kind(lambda: plain(8), 2)) as run:
        whole = items_of(run.epoch())
    with closing(kind(lambda: plain(8), 2)) as run:
        items_of(run.epoch(), 1)
        items = run.epoch()
        following = items_of(items, 1)
        state = run.state()
        following += items_of(items)
    assert following[1::2] == whole[1::2]
    assert following[:-2:2] == whole[2::2]
    with closing(kind(lambda: plain(8), 2, state)) as run:
        assert items_of(run.epoch()) == following[1:]
