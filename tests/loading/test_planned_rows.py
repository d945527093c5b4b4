"""Planned rows are the same on any ranks and workers, as many on each, and a run resumes with exactly the next ones."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import chain, islice, zip_longest
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_kinds import Service, Stateful, Tracked
from numbered_shards import key_of
from packed_shards import as_tokens, joined_key, lengths_of, packed, planned, write_texts
from sweeps import WHOLE

from wds_datapipes import IndexedSamples, explain, merge_states
from wds_datapipes.errors import EmptySourceError, SampleSizeError, StateError
from wds_datapipes.index import EpochOptions, IndexOptions, Join, Manifest, Pack, build_indexes
from wds_datapipes.index.order.rows import row_plan
from wds_datapipes.index.order.rows.packed_windows import pack_windows
from wds_datapipes.index.order.rows.row_columns import Samples, measure_rows
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.testing import build_shard

SIZES = (70, 1, 90, 40, 0, 60)
STEP = 12
KINDS = {"tracked": Tracked, "service": Service, "stateful": Stateful}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    pattern = write_texts(tmp_path_factory.mktemp("texts"), SIZES)
    build_indexes(pattern, progress=False, options=IndexOptions())
    return pattern


def on_ranks(
    kind: Any, shards: Any, ranks: int = 1, workers: int = 0, cut: int | None = None, state: Any = None, **options: Any
) -> tuple[list[list[list[str]]], Any]:
    """Return the batches of each rank, and the state of rank 0 after them."""
    found, states = list[list[list[str]]](), list[Any]()
    for rank in range(ranks):
        build = lambda: packed(shards, STEP, ranks, **options)  # noqa: E731
        with closing(kind(build, workers, state, distributed=(rank, ranks))) as run:
            found.append([*islice(run.epoch(), cut)])
            states.append(run.state())
    return found, states[0]


def steps_of(by_rank: list[list[list[str]]]) -> list[list[str]]:
    """Return the rows of each step."""
    assert len({*map(len, by_rank)}) == 1, "ranks have different numbers of steps"
    for parts in zip(*by_rank, strict=True):
        assert len({*map(len, parts)}) == 1, "ranks have different numbers of rows in a step"
    return [[*chain.from_iterable(parts)] for parts in zip(*by_rank, strict=True)]


def keys_in(steps: list[list[str]]) -> list[str]:
    return [key for step in steps for row in step for key in row.split("+") if key]


EVERY = sorted(f"{shard}-{n}" for shard, size in enumerate(SIZES) for n in range(size))
RANKS = st.sampled_from([1, 2, 3, 4])
OPTIONS = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["global", "window", "sequential"]),
        "lanes": st.sampled_from([1, 1, 2, 4, 12]),
        "remainder": st.sampled_from(["drop", "pad"]),
        "window": st.sampled_from([None, 13, 40, 200]),
        "balance": st.sampled_from(["mixed", "similar"]),
        "select": st.sampled_from([None, slice(5, None), slice(None, None, 2)]),
        "exclude": st.sampled_from([None, EVERY[3:9], EVERY[::5]]),
        "mixed": st.sampled_from([False, False, True]),
    }
)


def drawn(shards: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a drawn pipeline."""
    options = {**options}
    is_mixed = options.pop("mixed")
    if not is_mixed:
        return {"shards": shards, **options}
    names = {"a": shards.replace("{0..5}", "{0..2}"), "b": shards.replace("{0..5}", "{3..5}")}
    options["select"] = None
    if (exclude := options["exclude"]) is not None:
        options["exclude"] = {
            name: [key for key in exclude if key[0] in of] for name, of in (("a", "012"), ("b", "345"))
        }
    return {"shards": names, "weights": {"a": 2, "b": 1}, **options}


def in_process(known: dict[str, Any], ranks: int, workers: int) -> list[list[list[str]]]:
    """Return the batches of each rank if its workers take turns, without starting any."""
    by_rank = []
    for rank in range(ranks):
        turns = []
        for worker in range(workers):
            source = planned(**known, step=STEP).set_seed(5)
            source.groups = {2: (ranks, rank), 3: (workers, worker)}
            turns.append([*source.map_samples(as_tokens).pack_rows("tokens").map(joined_key).batch(STEP // ranks)])
        by_rank.append([batch for turn in zip_longest(*turns) for batch in turn if batch is not None])
    return by_rank


@settings(max_examples=100 if WHOLE else 25, deadline=None)
@given(OPTIONS, st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4))
def test_each_rank_has_as_many_rows_in_each_step_and_each_sample_comes_once(
    shards: str, options: dict[str, Any], ranks: int, workers: int
) -> None:
    known = drawn(shards, options)
    whole = steps_of(in_process(known, 1, 1))
    assert all(len(step) == STEP for step in whole)
    assert steps_of(in_process(known, ranks, workers)) == whole
    keys = keys_in(whole)
    if not options["mixed"]:
        assert len(keys) == len({*keys})
        chosen = IndexedSamples(shards, select=options["select"], order="sequential", remainder="keep")
        wanted = {sample["__key__"] for sample in chosen} - {*(options["exclude"] or ())}
        assert {*keys} <= wanted
        if options["remainder"] == "pad":
            assert {*keys} == wanted


@settings(max_examples=60 if WHOLE else 12, deadline=None)
@given(OPTIONS, RANKS, st.integers(0, 9), RANKS, st.sampled_from([*KINDS]))
def test_a_run_resumes_with_the_next_rows_on_any_ranks(
    shards: str, options: dict[str, Any], ranks: int, cut: int, others: int, kind: str
) -> None:
    known = drawn(shards, options)
    whole = steps_of(on_ranks(Tracked, **known, ranks=1, workers=0)[0])
    cut = min(cut, len(whole) - 2)
    head, state = on_ranks(KINDS[kind], **known, ranks=ranks, workers=0, cut=cut)
    assert steps_of(head) == whole[:cut]
    rest, again = on_ranks(Service, **known, ranks=others, workers=0, cut=2, state=state)
    assert steps_of(rest) == whole[cut : cut + 2]
    last, _ = on_ranks(Tracked, **known, ranks=ranks, workers=0, state=again)
    assert steps_of(last) == whole[cut + 2 :]


@pytest.mark.parametrize("kind", [*KINDS.values()])
@pytest.mark.parametrize("lanes", [1, 6])
def test_a_run_resumes_with_the_next_rows_with_any_workers(shards: str, kind: Any, lanes: int) -> None:
    known: dict[str, Any] = {"shards": shards, "lanes": lanes, "order": "window", "remainder": "pad"}
    whole = steps_of(on_ranks(Tracked, **known, ranks=1, workers=0)[0])
    for cut in (1, len(whole) - 1):
        head, state = on_ranks(kind, **known, ranks=2, workers=2, cut=cut)
        assert steps_of(head) == whole[:cut]
        for other, ranks, workers in ((Tracked, 1, 3), (Service, 3, 1), (Tracked, 4, 0)):
            rest, _ = on_ranks(other, **known, ranks=ranks, workers=workers, state=state)
            assert steps_of(rest) == whole[cut:]


@pytest.mark.parametrize(("kind", "workers"), [(Tracked, 0), (Service, 2), (Stateful, 2)])
def test_each_epoch_has_its_own_rows_and_a_state_at_its_end_continues_with_the_next(
    shards: str, kind: Any, workers: int
) -> None:
    epochs = []
    for ranks in (1, 2):
        build = lambda: packed(shards, STEP, ranks)  # noqa: B023, E731
        runs = [kind(build, workers, distributed=(rank, ranks)) for rank in range(ranks)]
        epochs.append([steps_of([[*run.epoch()] for run in runs]) for _ in range(2)])
        state = runs[0].state()
        third = steps_of([[*run.epoch()] for run in runs])
        for run in runs:
            run.close()
        resumed = Tracked if kind is Stateful else kind
        assert steps_of(on_ranks(resumed, shards, 4, 0, state=state)[0]) == third
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("options", [{}, {"lanes": 4}, {"order": "window", "weights": {"a": 1, "b": 3}}])
def test_the_samples_of_each_row_are_explained(shards: str, remainder: Any, options: Any) -> None:
    names: Any = shards
    if "weights" in options:
        names = {"a": shards.replace("{0..5}", "{0..2}"), "b": shards.replace("{0..5}", "{3..5}")}
    whole, _ = on_ranks(Tracked, names, 1, 0, remainder=remainder, **options)
    for ranks in (1, 3):
        _, state = on_ranks(Service, names, ranks, 0, None, remainder=remainder, **options)
        with closing(Service(lambda: packed(names, STEP, ranks, remainder=remainder, **options), 0, state)) as run:  # noqa: B023
            second = [*islice(run.epoch(), 3)] if ranks == 1 else []
            state = run.state() if second else state
        pipe = packed(names, STEP, ranks, remainder=remainder, **options)
        for step, rows in enumerate([*whole[0], *second]):
            samples = explain(pipe, state, step)
            found = dict[int, list[str]]()
            for each in samples:
                found.setdefault(each.row, []).extend([each.key] * (not each.is_padding))
            assert ["+".join(keys) for keys in found.values()] == rows
            assert [each.rank for each in samples] == sorted(each.rank for each in samples)
            assert len(found) == STEP


SCHEDULE = [(0, {"a": 1, "b": 0}), (2, {"a": 1, "b": 1}), (5, {"a": 0, "b": 1}, "linear")]


@pytest.mark.parametrize("lanes", [1, 3])
def test_weights_change_by_step_about_where_they_say(shards: str, lanes: int) -> None:
    names = {"a": shards.replace("{0..5}", "{0..2}"), "b": shards.replace("{0..5}", "{3..5}")}
    known: dict[str, Any] = {"shards": names, "weights": SCHEDULE, "lanes": lanes, "order": "window"}

    def epochs(ranks: int, state: Any = None) -> tuple[list[list[str]], Any]:
        found, states = list[list[list[str]]](), list[Any]()
        for rank in range(ranks):
            build = lambda: packed(step=STEP, ranks=ranks, **known)  # noqa: E731
            with closing(Service(build, 0, state, distributed=(rank, ranks))) as run:
                found.append([*chain.from_iterable([*run.epoch()] for _ in range(2 if state is None else 1))])
                states.append(run.state())
        return steps_of(found), states[0]

    whole, _ = epochs(1)
    assert epochs(3)[0] == whole
    parts = [sum(key[0] in "345" for key in keys_in([step])) / len(keys_in([step])) for step in whole]
    assert parts[0] == 0
    assert parts[1] < 0.3, "its rows may be from a window that lies across the change"
    assert 0.2 < parts[3] < 0.8
    assert set(parts[7:]) == {1.0}
    with closing(Service(lambda: packed(step=STEP, **known), 0)) as run:
        head = [*islice(run.epoch(), 4)]
        state = run.state()
    rest, later = epochs(2, state)
    assert head + rest == whole[: len(head) + len(rest)]
    for step in (0, 3, len(rest) + 3):
        found = dict[int, list[str]]()
        for each in explain(packed(step=STEP, ranks=2, **known), later, step):
            found.setdefault(each.row, []).append(each.key)
        assert ["+".join(keys) for keys in found.values()] == whole[step]
    with closing(Service(lambda: packed(step=STEP, **known), 0)) as run:
        [*islice(run.epoch(), 2)]
        with pytest.raises(RuntimeError, match="left an epoch early"):
            [*run.epoch()]


def test_a_state_shows_how_its_rows_were_planned(shards: str) -> None:
    _, state = on_ranks(Tracked, shards, cut=1)
    with pytest.raises(StateError, match=r"was IndexedSamples.*row=32, window=40.* is .*row=64, window=40"):
        on_ranks(Tracked, shards, state=state, row=64)


def test_later_exclusions_and_growth_move_no_other_sample(shards: str, tmp_path: Path) -> None:
    head, state = on_ranks(Tracked, shards, 2, 0, 1)
    whole = steps_of(on_ranks(Tracked, shards, 1, 0)[0])
    out = {*whole[1][0].split("+"), *whole[2][5].split("+")[:1]}
    rest, later = on_ranks(Service, shards, 3, 2, None, state, exclude=sorted(out))
    expected = [["+".join(key for key in row.split("+") if key not in out) for row in step] for step in whole]
    assert steps_of(head) + steps_of(rest) == [*whole[:1], *expected[1:]]
    sample = explain(packed(shards, STEP, 3, exclude=sorted(out)), later, 1)
    assert {each.key for each in sample if each.is_padding}.isdisjoint(out)


def test_a_run_grows_at_the_end_of_an_epoch(shards: str) -> None:
    def costs(index: Any) -> Any:
        return lengths_of(index) * (99.5 if len(index) == SIZES[5] else 1.5)  # the largest is new

    few = shards.replace("{0..5}", "{0..3}")
    with closing(Service(lambda: packed(few, STEP, cost=costs), 0)) as run:
        steps = len([*run.epoch()])
        state = run.state()
    service = Service(lambda: packed(shards, STEP, cost=costs), 0)
    with closing(service):
        service.loader.reading_service.load_state_dict(state, amend=True)
        grown = [*service.epoch()]
        later = service.state()
    assert {key[0] for key in keys_in(grown)} >= {"5"}
    for step, rows in ((0, None), (steps, grown[0]), (steps + 1, grown[1])):
        found = dict[int, list[str]]()
        for each in explain(packed(shards, STEP, cost=costs), later, step):
            found.setdefault(each.row, []).append(each.key)
            assert step or each.key[0] in "0123"
        assert rows is None or ["+".join(keys) for keys in found.values()] == rows
    with closing(Service(lambda: packed(few, STEP, cost=costs), 0)) as run:
        [*islice(run.epoch(), 1)]
        state = run.state()
    with closing(Service(lambda: packed(shards, STEP, cost=costs), 0)) as run:
        run.loader.reading_service.load_state_dict(state, amend=True)
        with pytest.raises(StateError, match="only at the end of an epoch"):
            run.epoch()


def test_the_last_rows_that_ranks_share_unevenly_need_the_states_of_all(shards: str) -> None:
    whole = on_ranks(Tracked, shards, remainder="keep")[0][0]
    assert 0 < len(whole[-1]) < STEP, "the last step is not whole"
    states = list[Any]()
    for rank in range(4):
        build = lambda: packed(shards, STEP, 4, remainder="keep")  # noqa: E731
        with closing(Tracked(build, 0, distributed=(rank, 4))) as run:
            [*islice(run.epoch(), len(whole) - 1)]
            states.append(run.state())
    rest, _ = on_ranks(Service, shards, 2, 0, None, merge_states(states), remainder="keep")
    assert sorted(chain.from_iterable(rows for [rows] in rest)) == sorted(whole[-1])
    with pytest.raises(StateError, match=naming("last batch is not whole", "merge_states")):
        on_ranks(Service, shards, 2, 0, None, states[1], remainder="keep")


def test_a_shuffle_of_rows_is_not_to_be_put_where_it_would_break_them(shards: str) -> None:
    def build(ranks: int) -> Any:
        rows = planned(shards, STEP).map_samples(as_tokens).pack_rows("tokens")
        return rows.shuffle_samples(5).batch(STEP // ranks)

    with closing(Service(lambda: build(1), 0)) as run:
        next(run.epoch())
        state = run.state()
    with (
        pytest.raises(StateError, match=naming("SampleShuffler", "Leave it out")),
        closing(Service(lambda: build(2), 0, state, distributed=(0, 2))) as run,
    ):
        next(run.epoch())


def test_a_state_within_a_row_resumes_there_but_only_on_the_same_ranks(shards: str) -> None:
    def samples(_: int = 1) -> Any:
        return planned(shards, STEP).map(key_of)

    with closing(Tracked(samples, 0)) as run:
        whole = [*run.epoch()]
    with closing(Tracked(samples, 0)) as run:
        head = [*islice(run.epoch(), 23)]
        state = run.state()
    with closing(Tracked(samples, 0, state)) as run:
        assert [*head, *run.epoch()] == whole
    with closing(Tracked(samples, 2, state)) as run, pytest.raises(StateError, match="in the middle of a planned row"):
        [*run.epoch()]


@pytest.mark.parametrize("lost", ["first", "middle", "last", "every"])
@pytest.mark.parametrize("kind", [*KINDS.values()])
def test_a_stage_that_drops_whole_rows_is_an_error(shards: str, kind: Any, lost: str) -> None:
    whole = [row.split("+") for step in steps_of(on_ranks(Tracked, shards)[0]) for row in step]
    dropped = {"first": whole[0], "middle": whole[20], "last": whole[-1], "every": EVERY}[lost]

    def build() -> Any:
        samples = planned(shards, STEP).map_samples(as_tokens)
        return samples.filter(partial(is_kept, dropped)).pack_rows("tokens").batch(STEP)

    with closing(kind(build, 1)) as run, pytest.raises(SampleSizeError, match="Between IndexedSamples and"):
        [*run.epoch()]


def is_kept(dropped: list[str], sample: dict[str, Any]) -> bool:
    return sample["__key__"] not in dropped


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_run_resumes_without_planning_the_windows_before(
    shards: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_windows = list[range]()

    def counted(windows: Any, *arguments: Any) -> Any:
        planned_windows.extend(windows)
        return pack_windows(windows, *arguments)

    monkeypatch.setattr(row_plan, "pack_windows", counted)
    known: dict[str, Any] = {"shards": shards, "lanes": lanes, "window": 20, "remainder": "pad"}
    whole = steps_of(on_ranks(Tracked, **known)[0])
    assert len(planned_windows) >= sum(SIZES) // 20
    for kind, cut in ((Tracked, len(whole) - 2), (Service, len(whole) - 1)):
        _, state = on_ranks(kind, **known, cut=cut)
        for ranks in (1, 3):
            planned_windows.clear()
            rest, _ = on_ranks(Tracked, **known, ranks=ranks, state=state)
            assert steps_of(rest) == whole[cut:]
            assert len(planned_windows) <= ranks * lanes * 8, "each rank plans the last windows only"


def test_joined_fields_are_packed_too(shards: str, tmp_path: Path) -> None:
    for shard, size in enumerate(SIZES):
        samples = [{"__key__": f"{shard}-{n}", "cls": f"{shard * 1000 + n}"} for n in range(0, size, 2)]
        build_shard(tmp_path / f"{shard}.tar", samples[::-1])
    known: dict[str, Any] = {"step": STEP, "remainder": "pad", "join": Join(f"{tmp_path}/{{0..5}}.tar", "skip")}
    found: list[list[Any]] = []
    for ranks in (1, 3):
        rows = list[Any]()
        for rank in range(ranks):
            pipe = planned(shards, **known).set_seed(1)
            pipe.groups = {2: (ranks, rank)}
            rows += pipe.map_samples(with_class).pack_rows("tokens", lists=["class"])
        found.append(sorted(((row["__key__"], row["class"]) for row in rows), key=str))
    assert found[0] == found[1]
    pairs = [pair for keys, classes in found[0] for pair in zip(keys, classes, strict=True)]
    assert dict(pairs) == {f"{s}-{n}": s * 1000 + n for s, size in enumerate(SIZES) for n in range(0, size, 2)}
    assert len(pairs) == len(dict(pairs))


def with_class(sample: dict[str, Any]) -> dict[str, Any]:
    return {**as_tokens(sample), "class": int(sample["cls"])}


def test_samples_that_cannot_be_read_leave_their_space_empty(tmp_path: Path) -> None:
    shards = write_texts(tmp_path, [60, 60])
    manifest = Manifest(build_indexes(shards, progress=False))
    whole = steps_of(on_ranks(Tracked, manifest, 1, 0)[0])
    damaged = tmp_path / "1.tar"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    for ranks in (1, 2):
        found = steps_of(on_ranks(Tracked, manifest, ranks, 0, on_error="skip")[0])
        lost = {*keys_in(whole)} - {*keys_in(found)}
        assert lost
        assert all(key.startswith("1-") for key in lost)
        kept = [["+".join(key for key in row.split("+") if key not in lost) for row in step] for step in whole]
        assert found == kept
    rows = planned(manifest, STEP, order="sequential", window=40, on_error=lambda _: False)
    rows = rows.map_samples(as_tokens).pack_rows("tokens").map(joined_key)
    read, total = [str(row) for row in rows], len(rows)
    assert 0 < len(read) < total
    assert all(key.startswith("0-") for row in read for key in row.split("+"))
    counts = count_skipped(rows).counts
    assert counts == {"IndexedSamples: ChangedShardError": 1, "IndexedSamples: rows not read": total - len(read)}


def test_the_length_is_that_of_the_epoch(shards: str) -> None:
    pipe = packed(shards, STEP, order="sequential")
    assert len(pipe) == len([*pipe])
    pipe = packed(shards, STEP, 2)
    with pytest.raises(TypeError, match="no length yet"):
        len(pipe)
    with closing(Service(lambda: packed(shards, STEP, 2, window=7), 0, distributed=(1, 2))) as run:
        for _ in range(2):
            items = run.epoch()
            first = next(items)
            assert len(run.loader) == len([first, *items])
    source = planned(shards, STEP).set_seed(3)
    assert len(source) == len([*source.map_samples(as_tokens).pack_rows("tokens")])


# Wrong arguments


WRONG: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "a sample longer than a row": ({"row": 5}, SampleSizeError, ["1-1", "9", "5", "2 samples", "split"]),
    "too many in a sample": ({"second": ("images", 2)}, SampleSizeError, ["0-1", "3", "images", "limit"]),
    "a missing column": ({"length": "lengths"}, KeyError, ["lengths", "images", "build_indexes"]),
    "a missing cost": ({"cost": "work"}, KeyError, ["work", "build_indexes"]),
    "a length that is not a number": ({"length": "part"}, ValueError, ["nan", "1-0", "build_indexes", "select"]),
    "a negative length": ({"length": "negative"}, ValueError, ["-1", "0-2", "select"]),
    "a fraction": ({"length": "fraction"}, ValueError, ["0.5", "0-0", "integer"]),
    "a negative cost": ({"cost": "negative"}, ValueError, ["-1", "0-2", "finite"]),
    "text": ({"length": "name"}, TypeError, ["length", "<U1", "0.tar.wdsidx"]),
    "too few": (
        {"length": lambda index: index.columns["length"][1:]},
        ValueError,
        ["3 values", "0.tar.wdsidx", "(2,)"],
    ),
    "lengths of other samples": ({"length": [1, 2]}, ValueError, ["6 values", "(2,)"]),
}


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> str:
    pattern = f"{tmp_path_factory.mktemp('columns')}/{{0,1}}.tar"
    lengths = {"0": (2, 4, 6), "1": (3, 9, 1)}
    for shard, own in lengths.items():
        samples = [{"__key__": f"{shard}-{n}", "json": f"{[n] * length}"} for n, length in enumerate(own)]
        build_shard(pattern.replace("{0,1}", shard), samples)
    values: dict[str, list[Any]] = {
        "images": [0, 3, 1, 1, 1, 1],
        "part": [1.0, 2.0, 3.0, nan, 1.0, 1.0],
        "negative": [1, 1, -1, 1, 1, 1],
    }
    values |= {"fraction": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0], "name": [*"abcdef"]}

    def compute(sample: dict[str, Any]) -> dict[str, Any]:
        shard, number = map(int, sample["__key__"].split("-"))
        own = {name: column[3 * shard + number] for name, column in values.items()}
        return {"length": lengths[str(shard)][number], **own}

    build_indexes(pattern, columns=compute, progress=False, num_workers=0)
    return pattern


@pytest.mark.parametrize("wrong", WRONG)
def test_columns_that_cannot_be_planned_are_refused_when_the_dataset_is_opened(columns: str, wrong: str) -> None:
    options, error, facts = WRONG[wrong]
    pack = Pack(**{"length": "length", "row": 20, **options})
    with pytest.raises(error, match=naming(*facts)):
        IndexedSamples(columns, global_batch_size=1, epoch=EpochOptions(pack=pack))
    if wrong not in ("a missing column", "a missing cost", "text", "too few", "lengths of other samples"):
        chosen = [0] if wrong not in ("a fraction",) else [1]
        epoch = EpochOptions(pack=pack if not isinstance(pack.length, list) else Pack(length=[1], row=20))
        IndexedSamples(columns, global_batch_size=1, epoch=epoch, select=chosen)


@pytest.mark.parametrize("argument", ["select", "bucket_by", "exclude", "length", "cost"])
def test_an_error_of_a_function_of_indexes_says_for_which_one(columns: str, argument: str) -> None:
    def fail(index: Any) -> Any:
        return index.keys[9]

    packs = {"length": Pack(length=fail, row=9), "cost": Pack(length="length", row=9, cost=fail)}
    options = {argument: fail} if argument in ("bucket_by", "exclude") else {"pack": packs.get(argument)}
    select = fail if argument == "select" else None
    with pytest.raises(IndexError) as caught:
        [*IndexedSamples(columns, global_batch_size=1, select=select, epoch=EpochOptions(**options))]
    notes = getattr(caught.value, "__notes__", [f"{argument}=, for 0.tar.wdsidx"])  # Python 3.10 has none
    assert any(f"{argument}=, for" in text and ".tar.wdsidx" in text for text in notes)


def test_a_step_that_no_rows_fill_and_ranks_that_do_not_divide_it_are_refused(columns: str) -> None:
    def samples(step: int, ranks: int = 1, **options: Any) -> Any:
        epoch = EpochOptions(pack=Pack(length="length", row=10))
        pipe = IndexedSamples(columns, global_batch_size=step, epoch=epoch, order="sequential", **options)
        pipe.groups = {2: (ranks, 0)}
        return pipe

    with pytest.raises(EmptySourceError, match=naming("3 rows", "4", "global_batch_size", "pad")):
        next(iter(samples(4)))
    assert len([*samples(4, remainder="pad").wds_decode()]) >= 6
    with pytest.raises(ValueError, match=naming("3", "2 ranks", "multiple of 2")):
        next(iter(samples(3, 2)))
    with pytest.raises(ValueError, match="global_batch_size"):
        IndexedSamples(columns, epoch=EpochOptions(pack=Pack(length="length", row=10)))
    with pytest.raises(ValueError, match="bucket_by"):
        EpochOptions(pack=Pack(length="length", row=10), bucket_by=[1])
    for name, wrong in (("length", {"length": None}), ("second", {"length": "length", "second": (None, 3)})):
        with pytest.raises(TypeError, match=naming(name, "name of a column", "None")):
            Pack(row=10, **wrong)
    with pytest.raises(ValueError, match=naming("row", "below 2**31")):
        Pack(length="length", row=1 << 31)
    with pytest.raises(ValueError, match=naming("the limit of second", "below 2**31")):
        Pack(length="length", row=10, second=("images", 1 << 40))
    for facts, build in (
        (["rows", ".batch(2)", ".pack_rows()"], lambda: samples(2).batch(2)),
        (["2 rows per rank", ".batch(3)"], lambda: samples(2).wds_decode().pack_rows("json").batch(3)),
    ):
        with closing(Tracked(build, 0)) as run, pytest.raises(ValueError, match=naming(*facts)):
            next(iter(run.epoch()))


def test_costs_that_are_not_integers_are_scaled_alike_on_all_machines() -> None:
    known = Samples(np.zeros(3, np.int64), np.arange(3), np.zeros(1, np.int64), lambda _: None, str)  # type: ignore[arg-type,return-value]
    pack = Pack(length=[1, 2, 3], row=9, cost=[0.1, 2.5, 3.999])
    found = measure_rows(pack, known, np.array([3]))
    assert found.costs_of(np.arange(3)).tolist() == [26843546, 671088640, 1073473389]
