"""Step t is the t-th global batch that the loop received, even if it has left epochs early."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import closing
from functools import partial
from itertools import chain, islice, pairwise, zip_longest
from typing import Any

import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_kinds import InStateful, Persistent, Service, Stateful, Tracked
from numbered_shards import numbered_shards
from readers import keys_of
from sweeps import WHOLE
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import IndexedSamples, ShardList, StatefulShards, explain, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions
from wds_datapipes.loading.checkpoint.format import checkpoints_in, state_of
from wds_datapipes.received_epochs import UNKNOWN, ReceivedEpochs
from wds_datapipes.tools.runs.provenance import provenance
from wds_datapipes.tools.runs.steps import RunSteps

SIZES = [7, 0, 5, 9, 6, 8, 3]
BATCH = 4
SCHEDULE = [(0, {"a": 1, "b": 1}), (3, {"a": 1, "b": 0}), (8, {"a": 1, "b": 3}), (14, {"a": 1, "b": 1}, "linear")]

Batches = list[list[str]]

shards = numbered_shards(SIZES)


def indexed(ranks: int = 1, **options: Any) -> Any:
    shards: Any = {"a": "{0..2}.tar", "b": "{3,4}.tar"} if options.get("weights") else "{0..4}.tar"
    return IndexedSamples(shards, global_batch_size=BATCH, **options).batch(BATCH // ranks)


def run(
    kind: Any, workers: int, build: Any, takes: list[int | None], parts: list[tuple[int, int]]
) -> tuple[Any, Batches]:
    """Return the merged state of a run and its global batches.

    Args:
        kind: the kind of loader.
        workers: the number of workers.
        build: builds the pipeline for a number of ranks.
        takes: the number of steps that the loop receives of each epoch; None for all.
        parts: the first epoch of each part of the run, which resumes from a state, and its number of ranks.
    """
    batches, state = Batches(), None
    for (first, ranks), (end, _) in pairwise([*parts, (len(takes), 0)]):
        of_ranks, states = list[Batches](), list[Any]()
        for rank in range(ranks):
            with closing(kind(partial(build, ranks), workers, state, distributed=(rank, ranks))) as loader:
                of_ranks.append([keys_of(batch) for take in takes[first:end] for batch in islice(loader.epoch(), take)])
                states.append(loader.state())
        state = states[0] if ranks == 1 else merge_states(states)
        batches += [[*chain.from_iterable(each)] for each in zip(*of_ranks, strict=True)]
    return state, batches


LOADERS = [
    (Service, 0),
    (Service, 2),
    (Tracked, 0),
    (Tracked, 2),
    (Persistent, 2),
    (InStateful, 2),
    (Stateful, 0),
    (Stateful, 3),
]


#: Each loader with workers reads one of the sources, and those without read all.
SOURCES: list[dict[str, Any]] = [
    {"weights": SCHEDULE},
    {},
    {"remainder": "pad", "order": "window", "lanes": 2},
    {"weights": {"a": 1, "b": 2}},
]


@pytest.mark.parametrize(
    ("kind", "workers", "options"),
    [
        (kind, workers, options)
        for number, (kind, workers) in enumerate(LOADERS)
        for options in (SOURCES[number % 4 :][:1] if workers else SOURCES)
    ],
)
def test_every_loader_records_where_it_left_its_epochs(kind: Any, workers: int, options: Any) -> None:
    """Epochs of six steps and more; some are left after a few, as often in a row, or before the first one."""
    takes = [3, 3, 1, None, 2, 2]
    state, batches = run(kind, workers, lambda ranks: indexed(ranks, **options), takes, [(0, 1)])
    steps = RunSteps(indexed(**options), state)
    assert [[each.key for each in steps.samples(step)] for step in range(len(batches))] == batches
    assert len(checkpoints_in(state)[0].epoch.received.rows) <= 6
    facts = provenance(indexed(**options), state)
    assert facts["steps"] == len(batches)
    seen = Counter(("a" if key[0] in "012" else "b") if options.get("weights") else "" for key in chain(*batches))
    if options.get("remainder") != "pad":
        assert {name: each["samples_seen"] for name, each in facts["datasets"].items()} == seen
    if options.get("weights") is SCHEDULE:
        check_schedule_of(batches)


def check_schedule_of(batches: Batches) -> None:
    """Check the shares of the datasets in the steps between the points of the schedule."""
    shares = [sum(key[0] in "34" for key in batch) for batch in batches]
    assert shares[:8] == [2, 2, 2, 0, 0, 0, 0, 0][: len(shares)]
    assert shares[8:9] in ([], [3])
    assert all(share in (2, 3) for share in shares[8:])


TAKES = st.lists(st.sampled_from([None, 0, 1, 2, 3, 6]), min_size=1, max_size=6)


@settings(max_examples=15 if WHOLE else 8)
@given(
    takes=TAKES,
    loader=st.sampled_from(LOADERS),
    parts=st.dictionaries(st.integers(1, 5), st.sampled_from([1, 2, 4]), max_size=2),
    ranks=st.sampled_from([1, 2, 4]),
    options=st.fixed_dictionaries(
        {
            "order": st.sampled_from(["global", "window", "sequential"]),
            "lanes": st.sampled_from([1, 4]),
            "remainder": st.sampled_from(["drop", "pad"]),
            "weights": st.sampled_from([None, {"a": 1, "b": 2}, SCHEDULE]),
        }
    ),
)
def test_steps_of_random_runs(takes: Any, loader: Any, parts: dict[int, int], ranks: int, options: Any) -> None:
    """A run that resumes from a state of an epoch that the loop has left continues in that epoch."""
    later = [part for part in sorted(parts.items()) if part[0] < len(takes)]
    if loader[0] is Stateful:  # its states are those of the same workers on one rank
        later = [(first, 1) for first, _ in later] if ranks == 1 else []
    kind, workers = loader
    state, batches = run(kind, workers, lambda ranks: indexed(ranks, **options), takes, [(0, ranks), *later])
    ranks = [(0, ranks), *later][-1][1]
    steps = RunSteps(indexed(ranks, **options), state)
    assert [[each.key for each in steps.samples(step)] for step in range(len(batches))] == batches
    assert provenance(indexed(ranks, **options), state)["steps"] == len(batches)
    if options["weights"] is SCHEDULE and options["remainder"] == "drop":
        check_schedule_of(batches)


@pytest.mark.parametrize(("kind", "workers"), [(Service, 2), (Tracked, 0)])
@pytest.mark.parametrize(("ranks", "take"), [(2, None), (4, None), (2, 7), (4, 7)])
def test_ranks_that_share_the_last_batch_unevenly_record_the_same_steps(
    kind: Any, workers: int, ranks: int, take: int | None
) -> None:
    """The loops receive all 7 steps of an epoch, with or without its end, although some ranks have fewer samples."""
    options, takes = {"remainder": "keep", "weights": SCHEDULE}, [take, take, 2]
    _, batches = run(Tracked, 0, lambda ranks: indexed(ranks, **options), takes, [(0, 1)])
    pipe, states, of_ranks = partial(indexed, ranks, **options), list[Any](), list[list[Batches]]()
    for rank in range(ranks):
        with closing(kind(pipe, workers, distributed=(rank, ranks))) as loader:
            of_ranks.append([[*map(keys_of, islice(loader.epoch(), each))] for each in takes])
            states.append(loader.state())
    steps = chain.from_iterable(zip_longest(*epochs, fillvalue=[]) for epochs in zip(*of_ranks, strict=True))
    assert [[*chain.from_iterable(step)] for step in steps] == batches
    known = RunSteps(pipe(), merge_states(states))
    assert [[each.key for each in known.samples(step)] for step in range(len(batches))] == batches


# epochs that were left at a place that no loader reports


@pytest.mark.parametrize("options", [{}, {"weights": SCHEDULE}])
def test_steps_after_an_unknown_number_of_steps_are_refused(options: Any) -> None:
    data = StatefulShards(indexed(**options), seed=3)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    first = [keys_of(batch) for batch in islice(loader, 2)]
    if options:  # the weights of the next epoch depend on it
        with pytest.raises(StateError, match=r"step \d+ are unknown: the loop left epoch 0 .*data\.tracked\(loader\)"):
            next(data.tracked(loader))
        return
    next(data.tracked(loader))
    steps = RunSteps(indexed(), data.state_dict())
    for refused in (lambda: steps.samples(0), lambda: steps.samples(9), steps.seen):
        with pytest.raises(StateError, match=r"step \d are unknown: the loop left epoch 0 within a global batch, or"):
            refused()
    assert len(first) == 2


def test_a_stateful_loader_that_seldom_takes_snapshots_does_not_know_its_steps() -> None:
    data = StatefulShards(indexed(), seed=3)
    loader = StatefulDataLoader(data, batch_size=None, num_workers=2, snapshot_every_n_steps=2)
    received = [keys_of(batch) for take in (2, 3, 2) for batch in islice(loader, take)]
    steps = RunSteps(indexed(), loader.state_dict())
    assert [[each.key for each in steps.samples(step)] for step in range(2)] == received[:2]
    for step in (2, 6):
        with pytest.raises(StateError, match=rf"step {step} are unknown: the loop left epoch 1 "):
            steps.samples(step)


def test_a_step_of_which_the_loop_received_a_part_is_refused() -> None:
    samples = IndexedSamples("{0..4}.tar", global_batch_size=BATCH)
    data = StatefulShards(samples, seed=3)
    received = [sample["__key__"] for take in (6, 4) for sample in islice(data, take)]
    steps = RunSteps(samples, data.state_dict())
    assert [each.key for each in steps.samples(0)] == received[:4]
    assert [each.key for each in steps.samples(2)] == received[6:]
    with pytest.raises(StateError, match=naming("step 1", "epoch 0", "global batch")):
        steps.samples(1)
    with pytest.raises(StateError, match="unknown"):
        provenance(samples, data.state_dict())


# epochs that set_epoch selects


def test_epochs_may_be_repeated_and_left_out() -> None:
    data, received = StatefulShards(indexed(), seed=3), Batches()
    for epoch, take in ((0, 2), (0, None), (3, 1), (1, 3)):
        data.set_epoch(epoch)
        received += [keys_of(batch) for batch in islice(data, take)]
    steps = RunSteps(indexed(), data.state_dict())
    assert [[each.key for each in steps.samples(step)] for step in range(len(received))] == received
    assert [steps.samples(step)[0].epoch for step in (0, 2, 8, 9)] == [0, 0, 3, 1]


def test_a_schedule_needs_epochs_that_follow_each_other() -> None:
    data = StatefulShards(indexed(weights=SCHEDULE), seed=3)
    for epoch in (2, 3):  # a run that continues without a state
        data.set_epoch(epoch)
        next(iter(data))
    data.set_epoch(3)
    with pytest.raises(RuntimeError, match=naming("set_epoch()", "epoch 3")):
        next(iter(data))


def test_repeated_epochs_of_an_amended_run_are_refused() -> None:
    data = StatefulShards(indexed(), seed=3)
    next(iter(data))
    later = StatefulShards(indexed(order="global", epoch=EpochOptions(exclude=["0-1"])), seed=3)
    later.load_state_dict(data.state_dict())
    next(iter(later))
    later.set_epoch(0)
    next(iter(later))
    with pytest.raises(StateError, match=naming("epochs", "data, batches or exclusions")):
        explain(indexed(epoch=EpochOptions(exclude=["0-1"])), later.state_dict(), 0)


# ends of epochs


def test_an_epoch_can_be_ended_between_two_loops() -> None:
    data = StatefulShards(indexed(), seed=3)
    received = [keys_of(batch) for batch in islice(data, 2)]
    data.end_epoch()
    for state in (data.state_dict(), None):
        again = data if state is None else StatefulShards(indexed(), seed=3)
        if state is not None:
            again.load_state_dict(state)
        following = [keys_of(batch) for batch in islice(again, 3)]
        steps = RunSteps(indexed(), again.state_dict())
        assert [[each.key for each in steps.samples(step)] for step in range(5)] == received + following


def test_the_record_of_a_run_stays_small() -> None:
    epochs = ReceivedEpochs()
    for epoch in range(1000):
        epochs = epochs.begin(epoch).leave((7, 7) if epoch != 500 else None)
    assert epochs.rows == ((0, 500, 7, 7), (500, 1), (501, 499, 7, 7))
    assert epochs.leave((7, 7)) == epochs
    assert epochs.leave(UNKNOWN).begin(1000).rows[-2:] == ((999, 1, -1, 0), (1000, 1))


# streams


def stream(drop_last: bool = False) -> Any:
    samples = ShardList("{0..6}.tar").shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(5)
    return samples.log_samples(first=0, positions="log").batch(2, drop_last=drop_last)


@pytest.mark.parametrize(
    ("kind", "workers", "drop_last"),
    [
        (kind, workers, drop_last)
        for number, (kind, workers) in enumerate(LOADERS)
        for drop_last in ([number % 2 == 0] if workers else [False, True])
    ],
)
def test_a_log_of_positions_has_more_than_the_loop_received(kind: Any, workers: int, drop_last: bool) -> None:
    shutil.rmtree("log", ignore_errors=True)
    parts = [(0, 1), (3, 1)]
    state, batches = run(kind, workers, lambda _: stream(drop_last), [3, None, 4, 2, 1], parts)
    assert [[each.key for each in explain(stream(drop_last), state, step)] for step in range(len(batches))] == batches


def test_the_loops_of_ranks_may_leave_an_epoch_of_a_stream_at_different_steps() -> None:
    shutil.rmtree("log", ignore_errors=True)
    of_ranks, states = list[Any](), list[Any]()
    for rank in range(2):
        data = StatefulShards(stream(), seed=3, distributed=(rank, 2))
        of_ranks.append([[keys_of(batch) for batch in islice(data, take)] for take in (2 + rank, 1)])
        states.append(data.state_dict())
    expected = [
        [*chain(*parts)] for epochs in zip(*of_ranks, strict=True) for parts in zip_longest(*epochs, fillvalue=())
    ]
    steps = RunSteps(stream(), merge_states(states))
    assert [[each.key for each in steps.samples(step)] for step in range(len(expected))] == expected
    with pytest.raises(StateError, match=naming("2 ranks", "states of 1", "merge_states")):
        explain(stream(), states[0], 0)


def test_a_run_whose_ranks_left_an_epoch_at_different_steps_continues_on_other_workers() -> None:
    states = list[Any]()
    for rank in range(2):
        data = StatefulShards(indexed(2), seed=3, distributed=(rank, 2))
        for take in (2 + rank, 1):
            [*map(keys_of, islice(data, take))]
        states.append(data.state_dict())
    with pytest.raises(StateError, match=naming("ranks", "different steps")):
        explain(indexed(2), merge_states([replaced(each, rank) for rank, each in enumerate(states)]), 0)
    data = StatefulShards(indexed(), seed=3)
    data.load_state_dict(merge_states([replaced(each, rank) for rank, each in enumerate(states)]))
    next(iter(data))
    with pytest.raises(StateError, match=naming("step 0", "epoch 0")):
        explain(indexed(), data.state_dict(), 0)


def replaced(state: Any, rank: int) -> Any:
    """Make the state of all ranks that of one, as that of a stream is."""
    return state_of([each.on_rank(rank) for each in checkpoints_in(state)])


def test_a_stream_whose_loop_left_at_an_unknown_place_is_refused() -> None:
    shutil.rmtree("log", ignore_errors=True)
    data = StatefulShards(stream(), seed=3)
    loader = DataLoader(data, batch_size=None, num_workers=2)
    next(iter(loader))
    next(data.tracked(loader))
    with pytest.raises(StateError, match=naming("step 7", "epoch 0")):
        explain(stream(), data.state_dict(), 7)


@settings(max_examples=8 if WHOLE else 5)
@given(
    takes=st.lists(st.sampled_from([None, 1, 2, 3]), min_size=3, max_size=6),
    changes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 4, 8])), min_size=2, max_size=3
    ),
    loader=st.sampled_from([(Service, 2), (Tracked, 0), (InStateful, 2)]),
)
def test_amended_runs_that_leave_epochs(takes: Any, changes: Any, loader: Any) -> None:
    """Weights and batches change after an epoch, or within one that the loop was about to leave."""
    kind, workers = loader

    def build(weight: int, batch: int) -> Any:
        names = {"a": "{0..2}.tar", "b": "{3,4}.tar"}
        return IndexedSamples(names, weights={"a": weight, "b": 1}, global_batch_size=batch).batch(batch)

    state: Any = None
    batches = Batches()
    for weight, epochs, batch in changes:
        with closing(kind(partial(build, weight, batch), workers)) as run:
            if state is not None:
                data = run.loader if kind is Service else run.data
                data.load_state_dict(state, amend=True)
            batches += [keys_of(each) for take in takes[:epochs] for each in islice(run.epoch(), take)]
            state = run.state()
    steps = RunSteps(build(weight, batch), state)
    assert [[each.key for each in steps.samples(step)] for step in range(len(batches))] == batches
    facts = provenance(build(weight, batch), state)
    seen = Counter("a" if key[0] in "012" else "b" for key in chain(*batches))
    assert facts["steps"] == len(batches)
    assert {name: each["samples_seen"] for name, each in facts["datasets"].items()} == seen
