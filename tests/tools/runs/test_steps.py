"""The samples of a step, computed from a state, are those that the loops of all ranks received."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, islice, repeat
from random import Random
from typing import Any

import pytest
from data_parallel_pipelines import open_service
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numbered_shards import numbered_shards
from readers import keys_of
from sweeps import WHOLE
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import IndexedSamples, ShardList, StatefulShards, explain, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions, Manifest
from wds_datapipes.loading.checkpoint.format import checkpoints_in, state_of
from wds_datapipes.runs import provenance as runs_provenance
from wds_datapipes.runs import steps as runs_steps
from wds_datapipes.tools.runs.provenance import as_markdown, provenance
from wds_datapipes.tools.runs.steps import RunSteps
from wds_datapipes.types import ShardInfo

SIZES = [7, 0, 5, 9, 6, 8, 3]
BATCH = 12
SCHEDULE = [(0, {"a": 1, "b": 2}), (1, {"a": 0, "b": 1}), (3, {"a": 3, "b": 1}), (6, {"a": 1, "b": 1}, "linear")]

Batches = list[list[str]]


shards = numbered_shards(SIZES)


def indexed(ranks: int, exclude: list[str] | None = None, **options: Any) -> Any:
    names: Any = exclude
    if options.get("weights"):
        names = {
            name: [key for key in exclude or () if key[0] in shards] for name, shards in (("a", "012"), ("b", "34"))
        }
    options["epoch"] = EpochOptions(window_shards=2, exclude=names)
    shards = {"a": "{0..2}.tar", "b": "{3,4}.tar"} if options.get("weights") else "{0..4}.tar"
    return IndexedSamples(shards, global_batch_size=BATCH, **options).batch(BATCH // ranks)


def run(
    pipes: list[Any], workers: int, steps: int, state: Any = None, epoch: int | None = None, amend: bool = False
) -> tuple[Any, Batches]:
    """Read some steps on all ranks, one rank after the other; return the state of rank 0 and the global batches."""
    ranks: list[Batches] = []
    states = []
    for rank, pipe in enumerate(pipes):
        with open_service(pipe, workers, distributed=(rank, len(pipes))) as loader:
            if state is not None:
                loader.reading_service.load_state_dict(state, amend=amend)
            if epoch is not None:
                loader.set_epoch(epoch)
            batches, items = list[list[str]](), iter(loader)
            while len(batches) < steps:
                if (batch := next(items, None)) is None:
                    items = iter(loader)
                else:
                    batches.append(keys_of(batch))
            ranks.append(batches)
            states.append(loader.reading_service.state_dict())
    assert all(each == states[0] for each in states)
    return states[0], [[key for batch in of_ranks for key in batch] for of_ranks in zip(*ranks, strict=True)]


PIPELINES = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["global", "window", "sequential"]),
        "lanes": st.sampled_from([1, 2, 3, 12]),
        "remainder": st.sampled_from(["drop", "pad"]),
        "weights": st.sampled_from([None, {"a": 1, "b": 2}, SCHEDULE]),
    }
)
TOPOLOGIES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 2))


EVERY = [f"{shard}-{n}" for shard, size in enumerate(SIZES[:5]) for n in range(size)]
EXCLUDED = st.lists(st.sampled_from(EVERY), unique=True, max_size=5)


@settings(max_examples=8 if WHOLE else 5)
@given(PIPELINES, TOPOLOGIES, TOPOLOGIES, st.integers(1, 8), st.integers(1, 6), EXCLUDED, st.integers(0, 5))
def test_a_step_has_the_samples_that_the_loops_of_all_ranks_received(
    options: Any, first: tuple[int, int], second: tuple[int, int], begun: int, more: int, excluded: list[str], now: int
) -> None:
    """Some samples are left out from the beginning, and others after the interruption."""
    (ranks, workers), (others, other_workers) = first, second
    state, batches = run([indexed(ranks, excluded[:now], **options) for _ in range(ranks)], workers, begun)
    later, following = run([indexed(others, excluded, **options) for _ in range(others)], other_workers, more, state)
    whole = RunSteps(indexed(others, **options), without_exclusions(later))
    for step, batch in enumerate(batches + following):
        out = {*excluded} if step >= begun else {*excluded[:now]}
        assert out.isdisjoint(batch)
        for each, key in zip(whole.samples(step), batch, strict=True):
            assert each.key == key or each.key in out, "no other sample moves"
            assert not options["weights"] or each.dataset == ("a" if key[0] in "012" else "b")
    for saved, of_ranks, steps in ((state, ranks, begun), (later, others, begun + more)):
        found = RunSteps(indexed(of_ranks, excluded, **options), saved)
        for step, batch in enumerate((batches + following)[:steps]):
            samples = found.samples(step)
            assert [each.key for each in samples] == batch
            ranks_of_samples = [rank for rank in range(of_ranks) for _ in range(BATCH // of_ranks)]
            assert [each.rank for each in samples] == ranks_of_samples
            for each in samples:
                assert each.key == f"{each.shard[0]}-{each.number}"
                assert each.dataset == (("a" if each.shard[0] in "012" else "b") if options["weights"] else "")


def without_exclusions(state: Any) -> Any:
    return state_of(
        [
            replace(each, phases=[phase for phase in each.phases if "excluded" not in phase])
            for each in checkpoints_in(state)
        ]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_after_set_epoch(workers: int) -> None:
    state, batches = run([indexed(1, order="window")], workers, 2, epoch=4)
    steps = RunSteps(indexed(1, order="window"), state)
    assert [[each.key for each in steps.samples(8 + number)] for number in range(2)] == batches
    later, following = run([indexed(1, order="window")], workers, 2, epoch=6)
    assert [[each.key for each in steps.samples(12 + number)] for number in range(2)] == following
    assert {each.epoch for each in steps.samples(12)} == {6}
    assert later != state


def test_other_loaders_have_the_same_steps() -> None:
    data = StatefulShards(indexed(1, lanes=2), seed=9)
    before = data.state_dict()
    batches = [keys_of(batch) for _ in range(3) for batch in data]
    for state in (before, data.state_dict()):
        assert [[each.key for each in explain(indexed(1, lanes=2), state, step)] for step in range(6)] == batches


def test_the_samples_of_a_step_are_read_as_the_source_reads_them() -> None:
    state, batches = run([indexed(1, remainder="pad")], 0, 3)
    steps = RunSteps(indexed(1, remainder="pad"), state)
    assert keys_of(steps.read(2)) == batches[2]
    assert [each.is_padding for each in steps.samples(2)] == [False] * 3 + [True] * 9
    assert [each.key for each in steps.samples(2, keys=False)] == [""] * 12


@pytest.mark.parametrize("change", ["weights", "batch"])
def test_substitutes_before_an_amendment_are_those_of_the_order_at_that_time(change: str) -> None:
    """A substitute is a sample at another position of the epoch, which the amendment may give to another sample."""
    excluded = {"a": [f"{shard}-{n}" for shard in range(3) for n in range(1, SIZES[shard], 2)]}

    def build(*, is_amended: bool) -> Any:
        weights = {"a": 1, "b": 3} if is_amended and change == "weights" else {"a": 3, "b": 1}
        size = 4 if is_amended and change == "batch" else 8
        names = {"a": "{0..2}.tar", "b": "{3..5}.tar"}
        epoch = EpochOptions(exclude=excluded, samples=64)
        return IndexedSamples(names, weights=weights, global_batch_size=size, lanes=2, epoch=epoch).batch(size)

    state, received = run([build(is_amended=False)], 0, 4)
    state, following = run([build(is_amended=True)], 0, 7, state, amend=True)
    steps = RunSteps(build(is_amended=True), state)
    assert [[each.key for each in steps.samples(step)] for step in range(11)] == received + following
    for step, batch in enumerate(received + following):
        assert [*chain.from_iterable(keys_of(each) for _, each in steps.replay(step))] == batch


def draw(sample: Any, rng: Random) -> Any:
    return {**sample, "draw": rng.random()}


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_a_step_is_replayed_with_the_random_numbers_of_the_run(ranks: int, workers: int) -> None:
    def build(exclude: list[str]) -> Any:
        samples = IndexedSamples(
            "{0..4}.tar", global_batch_size=4, remainder="pad", epoch=EpochOptions(exclude=exclude)
        )
        return samples.map_samples_with_rng(draw).batch(4 // ranks)

    state: Any = None
    received = list[Any]()
    for exclude in ([], ["0-1", "3-2", "4-0"]):  # each for nine steps
        of_ranks, following = list[Any](), list[Any]()
        for rank in range(ranks):
            with open_service(build(exclude), workers, distributed=(rank, ranks)) as loader:
                if state is not None:
                    loader.reading_service.load_state_dict(state)
                of_ranks.append([*islice(chain.from_iterable(repeat(loader)), 9)])
                following.append(loader.reading_service.state_dict())
        state = merge_states(following)
        received += [[*enumerate(items)] for items in zip(*of_ranks, strict=True)]
    with pytest.warns(UserWarning, match="If .map_samples_with_rng.. drops samples"):
        steps = RunSteps(build(exclude), state)
    assert [[*steps.replay(step)] for step in range(18)] == received


def is_even(sample: Any) -> bool:
    return int(sample["cls"]) % 2 == 0


def test_pipelines_whose_steps_do_not_follow_from_their_state_are_refused() -> None:
    state, _ = run([indexed(1)], 0, 1)
    with pytest.raises(StateError, match="different pipeline"):
        explain(indexed(1, order="window"), state, 0)
    with pytest.raises(StateError, match="before the run began"):
        explain(indexed(1), state_of([replace(each, stages=[]) for each in checkpoints_in(state)]), 0)
    with pytest.raises(ValueError, match="step must be"):
        explain(indexed(1), state, -1)
    stream = ShardList("{0..4}.tar").load_wds_shards().group_samples()
    with pytest.raises(ValueError, match="steps of a stream require the log"):
        explain(stream, begun(stream), 0)
    shuffled = IndexedSamples("{0..4}.tar").shuffle_samples(5)
    with pytest.raises(ValueError, match=r"\.shuffle_samples\(\) holds samples back"):
        explain(shuffled, begun(shuffled), 0)
    filtered = IndexedSamples("{0..4}.tar").filter(is_even)
    with pytest.warns(UserWarning, match=r"If \.filter\(\) drops samples"):
        explain(filtered, begun(filtered), 0)


def test_a_run_whose_epochs_were_selected_one_by_one_is_known_in_part() -> None:
    state, _ = run([indexed(1)], 0, 3)
    checkpoint = state_of([replace(each, epoch=replace(each.epoch, seed=1)) for each in checkpoints_in(state)])
    with pytest.raises(StateError, match="known for epoch 1 only"):
        explain(indexed(1), checkpoint, 0)


def test_exclusions_grow_only_at_their_end() -> None:
    state, _ = run([indexed(1, ["0-1", "4-2"])], 0, 1)
    for exclude, message in {
        ("0-1",): r"they were 2 \(#[0-9a-f]{12}\), and are 1\. Append new ones at the end",
        ("4-2", "0-1", "3-3"): r"they were 2 \(#[0-9a-f]{12}\), and the first 2 are now others \(#",
    }.items():
        for use in (explain, lambda pipe, state, _: run([pipe], 0, 1, state)):
            with pytest.raises(
                StateError, match=r"EpochOptions\(exclude=\) must begin with .* in the same order.*" + message
            ):
                use(indexed(1, [*exclude]), state, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_loaders_record_when_exclusions_were_added(workers: int) -> None:
    state: Any = None
    batches, exclude = list[list[str]](), list[str]()
    for steps in (1, 3, 3):
        data = StatefulShards(indexed(1, exclude, lanes=2), seed=3)
        loader = StatefulDataLoader(data, batch_size=None, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        while steps:
            for batch in loader:
                batches.append(keys_of(batch))
                state, steps = loader.state_dict(), steps - 1
                if not steps:
                    break
        assert [
            (each["epoch"], each["position"]) for each in checkpoints_in(state)[0].phases if "excluded" in each
        ] == [(0, 12), (1, 24)][: len(exclude) // 2]
        exclude = [*exclude, *(key for key in batches[-1] if key not in exclude)][: len(exclude) + 2]
    assert [[each.key for each in explain(indexed(1, exclude, lanes=2), state, step)] for step in range(7)] == batches
    text = as_markdown(provenance(indexed(1, exclude, lanes=2), state))
    assert re.search(r"\| 1 \|  \|  \| without 4 of the samples \(`\w+`\) from position 24 on \|", text)


def test_no_array_has_an_element_for_each_sample(tracing: Any) -> None:
    """Ten billion samples in 10,000 shards: an array of their numbers would take 80 GB."""
    shards = Manifest(ShardInfo(f"{number}.tar", samples=10**6, bytes=10**9) for number in range(10**4))
    pipe = IndexedSamples(shards, order="window", global_batch_size=4096, lanes=512).batch(4096)
    tracing.start()
    steps = RunSteps(pipe, StatefulShards(pipe, seed=1).state_dict())
    assert len({(each.shard, each.number) for each in steps.samples(1_234_567, keys=False)}) == 4096
    assert tracing.get_traced_memory()[1] < 100_000_000


def begun(pipe: Any) -> Any:
    data = StatefulShards(pipe, seed=1)
    next(iter(data))
    return data.state_dict()


PHASES = st.fixed_dictionaries(
    {
        "shards": st.sampled_from([{}, {"b": [3, 4, 5]}, {"c": [6]}, {"b": [3, 4, 5], "c": [6]}]),
        "weights": st.fixed_dictionaries({"a": st.integers(1, 4), "b": st.integers(0, 3), "c": st.integers(0, 3)}),
        "batch": st.sampled_from([4, 8, 12]),
        "steps": st.integers(1, 7),
        "topology": TOPOLOGIES,
    }
)


@settings(max_examples=6, phases=[Phase.generate])
@given(st.lists(PHASES, min_size=2, max_size=4), st.sampled_from([1, 2]), st.sampled_from(["global", "window"]))
def test_amended_runs_read_each_dataset_pass_by_pass_in_exact_proportions(
    phases: list[Any], lanes: int, order: Any
) -> None:
    state: Any = None
    batches, drawn = Batches(), dict[str, list[tuple[str, set[str]]]]()
    known = {"a": [0, 1, 2], "b": [3, 4]}
    for number, phase in enumerate(phases):
        known |= phase["shards"]  # shards of b are only added, and c comes late
        datasets = {name: [f"{each}.tar" for each in shards] for name, shards in known.items()}
        weights = {name: phase["weights"][name] for name in known}
        ranks, workers = phase["topology"]
        options = {"weights": weights, "lanes": lanes, "order": order, "global_batch_size": phase["batch"]}
        pipes = [IndexedSamples(datasets, **options).batch(phase["batch"] // ranks) for _ in range(ranks)]
        state, found = run(pipes, workers, phase["steps"], state, amend=number > 0)
        batches += found
        keys = [key for batch in found for key in batch]
        for name, numbers in known.items():
            samples = {f"{n}-{at}" for n in numbers for at in range(SIZES[n])}
            own = [key for key in keys if key in samples]
            drawn.setdefault(name, []).extend((key, samples) for key in own)
            share = weights[name] / sum(weights.values())
            assert abs(len(own) - len(keys) * share) < (1 if lanes == 1 else 2 * lanes)
    for draws in drawn.values() if lanes == 1 else ():
        left = set[str]()
        for key, samples in draws:
            left = left or {*samples}  # a pass uses the shards known when it began
            left.remove(key)
    steps = RunSteps(pipes[0], state)
    assert [[each.key for each in steps.samples(step)] for step in range(len(batches))] == batches
    facts = provenance(pipes[0], state)
    assert facts["steps"] == len(batches)
    assert {name: known["samples_seen"] for name, known in facts["datasets"].items()} == {
        name: len(draws) for name, draws in drawn.items()
    }
    assert as_markdown(facts).count("\n| `") == len(drawn)


def test_the_public_modules_of_runs_have_the_documented_names() -> None:
    assert runs_steps.RunSteps is RunSteps
    assert (runs_provenance.provenance, runs_provenance.as_markdown) == (provenance, as_markdown)
