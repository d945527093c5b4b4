"""Samples that a stage held back, and that the stages before it would drop when they are read again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from loader_kinds import Service, Tracked, items_of
from numbered_shards import write_numbered
from pipeline_table import Build, Pipe, key_of, number_in, shards_of, split, tokens_of
from sweeps import WHOLE
from users_stages import Buckets

from wds_datapipes import ErrorBudget, IndexedSamples, ShardList, Stage, StatefulShards, merge_states
from wds_datapipes.counters import sum_skipped
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import checkpoints_in
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.shards.position import unpack_positions

shards = shards_of(20)

#: The keys that functions of this process have seen, and all calls of one of them, which fails for some keys.
SEEN, READ, DEAD = set[str](), list[str](), set[str]()


@pytest.fixture(autouse=True)
def flaky(shards: None) -> Iterator[Path]:
    """A file; while it exists, functions drop each sample the first time that they see it."""
    for known in (SEEN, READ, DEAD):
        known.clear()
    path = Path("flaky")
    yield path
    path.unlink(missing_ok=True)


def has_luck(sample: dict[str, Any]) -> bool:
    if not Path("flaky").exists() or sample["__key__"] in SEEN:
        return True
    SEEN.add(sample["__key__"])
    return False


def is_lucky(sample: dict[str, Any]) -> bool:
    return Random().random() < 0.9


def none_without_luck(sample: dict[str, Any]) -> Any:
    return sample if has_luck(sample) else None


def failing_without_luck(sample: dict[str, Any]) -> dict[str, Any]:
    sample["cls"] += b"0"  # in place, so that another attempt must get a new copy
    if not has_luck(sample):
        raise OSError("the store did not answer")
    return {**sample, "cls": sample["cls"][:-1]}


def read_unless_dead(sample: dict[str, Any]) -> dict[str, Any]:
    READ.append(sample["__key__"])
    if sample["__key__"] in DEAD:
        raise OSError("the link is dead")
    return sample


class Forgetful(set[str]):
    """Contains nothing."""

    def add(self, key: str) -> None:
        pass


class Lucky(Stage[Any]):
    """A user's stage that drops samples."""

    is_stateless = True

    def __init__(self, source: Pipe) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for sample in self.source:
            if has_luck(sample):
                yield sample


SOURCES: dict[str, Any] = {
    "stream": split,
    "open shards": lambda: ShardList("{0..5}.tar").sharding_filter().load_wds_shards(open_shards=3).group_samples(),
    "index": lambda: IndexedSamples("{0..5}.tar", remainder="keep"),
    "mixture": lambda: split("a").filter(has_luck).mix_samples(split("b"), stop="all"),
}
DROPPERS: dict[str, Any] = {
    "filter": lambda pipe: pipe.filter(has_luck),
    "None": lambda pipe: pipe.map_samples(none_without_luck),
    "an error": lambda pipe: pipe.map_samples(failing_without_luck, on_error="skip"),
    "a user's stage": Lucky,
    "between counters": lambda pipe: pipe.slice_samples(4, 200).filter(has_luck).log_samples().slice_samples(0, 190),
}
BUFFERS: dict[str, Any] = {
    "shuffle_samples": lambda pipe: pipe.shuffle_samples(40).map(key_of),
    "bucket_samples": lambda pipe: pipe.bucket_samples(number_in, boundaries=[7, 33], batch_size=11).map(keys_of),
    "pack_samples": lambda pipe: pipe.map_samples(tokens_of).pack_samples(9, "tokens").map(keys_of),
    "a user's stage": lambda pipe: Buckets(pipe, 30),
    "two shuffles": lambda pipe: pipe.shuffle_samples(20).filter(has_luck).shuffle_samples(10).map(key_of),
}


def keys_of(batch: Any) -> list[str]:
    return list(batch["__key__"]) if isinstance(batch, dict) else [key_of(each) for each in batch]


def flat(items: Iterable[Any]) -> list[str]:
    return [key for item in items for key in ([item] if isinstance(item, str) else item)]


def count_waiting(state: Any) -> int:
    """Return the number of samples that wait in all stages of all workers."""
    found = list[Any]()

    def note(part: dict[str, Any]) -> dict[str, Any]:
        found.extend(unpack_positions(part.get("waiting", ())))
        return part

    for part in (part for checkpoint in checkpoints_in(state) for part in checkpoint.parts):
        json.loads(part.text, object_hook=note)
    return len(found)


def check_all_come(build: Build, kind: Any, workers: int, flaky: Path, later: int | None = None) -> None:
    """Check that exactly the samples that waited come, if all others are dropped."""
    with closing(kind(build, workers)) as run:
        epoch = run.epoch()
        came, state = flat(items_of(epoch, 7)), run.state()
        del epoch
    flaky.touch()
    SEEN.clear()
    with closing(kind(build, workers if later is None else later, state)) as run:
        rest = flat(items_of(run.epoch()))
    assert count_waiting(state) > 0
    assert len(rest) == count_waiting(state)
    assert len({*came, *rest}) == len(came + rest)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dropper", DROPPERS)
@pytest.mark.parametrize("buffer", BUFFERS)
def test_samples_that_waited_come_although_they_would_be_dropped_now(
    source: str, dropper: str, buffer: str, flaky: Path
) -> None:
    check_all_come(lambda: BUFFERS[buffer](DROPPERS[dropper](SOURCES[source]())), Tracked, 0, flaky)


@pytest.mark.parametrize(("kind", "workers"), [(Service, 0), (Service, 1), (Service, 2), (Tracked, 2)])
@pytest.mark.parametrize("source", ["stream", "index", "mixture"])
def test_so_do_those_of_workers(kind: Any, workers: int, source: str, flaky: Path) -> None:
    check_all_come(lambda: SOURCES[source]().filter(has_luck).shuffle_samples(40).map(key_of), kind, workers, flaky)


ONE_BUFFER = [name for name in BUFFERS if name != "two shuffles"]


#: Sources, and the numbers of workers that read the rest.
RESUMED = [("stream", 1), ("stream", 3), ("open shards", 3), ("index", 1)]


@pytest.mark.parametrize(
    ("source", "workers"), [*itertools.product(["stream", "open shards", "index"], [1, 3])] if WHOLE else RESUMED
)
@pytest.mark.parametrize("buffer", ONE_BUFFER)
def test_samples_that_waited_come_on_other_workers(source: str, buffer: str, workers: int, flaky: Path) -> None:
    def build() -> Pipe:
        return BUFFERS[buffer](SOURCES[source]().filter(has_luck))

    check_all_come(build, Service, 2, flaky, workers)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "pipe",
    [
        lambda: BUFFERS["two shuffles"](split().filter(is_lucky)),
        lambda: BUFFERS["shuffle_samples"](SOURCES["mixture"]().filter(is_lucky)),
        lambda: split("a").filter(is_lucky).shuffle_samples(30).mix_samples(split("b"), stop="all").map(key_of),
    ],
    ids=["two shuffles", "after a mixture", "in a mixture"],
)
def test_on_other_workers_later_stages_may_drop_some_again_and_repeat_none(pipe: Build, workers: int) -> None:
    with closing(Service(pipe, 2)) as run:
        epoch = run.epoch()
        came, state = items_of(epoch, 7), run.state()
        del epoch
    with closing(Service(pipe, workers, state)) as run:
        rest = items_of(run.epoch())
    assert rest
    assert len({*came, *rest}) == len(came + rest)


@pytest.mark.parametrize("source", ["stream", "index"])
def test_samples_that_waited_come_after_ranks_and_workers_have_changed_twice(source: str, flaky: Path) -> None:
    """The second run is interrupted when some of the samples that waited in the first have been read."""

    def build() -> Pipe:
        return SOURCES[source]().filter(has_luck).shuffle_samples(40).map(key_of)

    with closing(Service(build, 2)) as run:
        epoch = run.epoch()
        came, state = items_of(epoch, 7), run.state()
        del epoch
    first = count_waiting(state)
    flaky.touch()
    runs, states = [Tracked(build, 0, state, distributed=(number, 3)) for number in range(3)], list[Any]()
    for rank in runs:
        SEEN.clear()
        epoch = rank.epoch()
        came += items_of(epoch, 3)
        states.append(rank.state())
        del epoch
    SEEN.clear()
    with closing(Service(build, 1, merge_states(states))) as run:
        rest = items_of(run.epoch())
    assert len({*came, *rest}) == len(came + rest) == 7 + first


def resumed(build: Build, cut: int = 7) -> tuple[list[str], Any]:
    """Return the first items of a pipeline, and a dataset with the state after them."""
    data = StatefulShards(build(), seed=1)
    came = flat(itertools.islice(data, cut))
    again = StatefulShards(build(), seed=1)
    again.load_state_dict(data.state_dict())
    return came, again


def skipped_by(data: Any) -> Any:
    """Return the numbers of items that the stages of a dataset have skipped."""
    counters = {id(each.counters): each.counters for each in graph_of(data.pipe).stages if isinstance(each, Stage)}
    return sum_skipped(each.skipped() for each in counters.values()).counts


@pytest.mark.parametrize("source", ["stream", "index", "mixture"])
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("budget", ["skip", ErrorBudget(max_errors=1, warn=False)])
def test_a_sample_whose_function_fails_ten_times_is_skipped_and_counted_once(
    source: str, buffer: str, budget: Any
) -> None:
    def build() -> Pipe:
        return BUFFERS[buffer](SOURCES[source]().map_samples(read_unless_dead, on_error=budget))

    came, data = resumed(build)
    waiting = next(key for key in READ if key not in came)
    left = flat(data)
    _, data = resumed(build)
    READ.clear()
    DEAD.add(waiting)
    assert sorted(flat(data)) == sorted({*left} - DEAD)
    assert READ.count(waiting) == 10
    assert skipped_by(data) == {"map_samples: OSError": 1}


@pytest.mark.parametrize("source", ["stream", "index", "mixture"])
@pytest.mark.parametrize("dropper", ["filter", "None", "a user's stage", "between counters"])
def test_a_sample_that_is_dropped_each_time_is_an_error_that_names_the_stages(
    source: str, dropper: str, flaky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wds_datapipes.shards.held_samples.MAX_DROPS", 50)
    _, data = resumed(lambda: BUFFERS["shuffle_samples"](DROPPERS[dropper](SOURCES[source]())))
    flaky.touch()
    monkeypatch.setattr(f"{__name__}.SEEN", Forgetful())
    name = {"filter": r"\.filter\(\)", "None": r"\.map_samples\(\)", "a user's stage": "Lucky"}.get(dropper, "")
    with pytest.raises(StateError, match=rf"SampleShuffler held back the sample '.*{name}.* drops it each time"):
        list(data)


def test_an_error_that_is_raised_is_not_tried_again(flaky: Path) -> None:
    _, data = resumed(lambda: split().map_samples(failing_without_luck).shuffle_samples(40).map(key_of))
    flaky.touch()
    with pytest.raises(OSError, match="did not answer"):
        list(data)


def test_failures_of_later_stages_are_counted_as_ever(flaky: Path) -> None:
    """Also while the source still waits to learn that the last of the samples has arrived."""

    def build() -> Pipe:
        return split().shuffle_samples(40).map_samples(failing_without_luck, on_error="skip").map(key_of)

    came, data = resumed(build)
    flaky.touch()
    assert flat(data) == []
    assert skipped_by(data) == {"map_samples: OSError": 360 - len(came)}


def test_shards_that_cannot_be_opened_any_more_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_numbered(tmp_path, [20] * 3)

    def build() -> Pipe:
        return ShardList("{0..2}.tar").load_wds_shards(on_error="skip").group_samples().shuffle_samples(30).map(key_of)

    came, data = resumed(build, 15)
    Path("0.tar").unlink()
    rest = flat(data)
    assert sorted(rest) == sorted({f"{shard}-{n}" for shard in (1, 2) for n in range(20)} - {*came})
    assert skipped_by(data) == {"load_wds_shards: ShardOpenError": 1}


@pytest.mark.parametrize("source", ["stream", "index", "mixture"])
def test_numbers_drawn_after_a_users_stage_with_a_buffer_are_those_of_an_undisturbed_run(source: str) -> None:
    def build() -> Pipe:
        return Buckets(SOURCES[source](), 7).map_samples_with_rng(lambda item, rng: (item, rng.random()))

    whole = list(StatefulShards(build(), seed=3))
    assert len({number for _, number in whole}) == len(whole)
    for cut in range(0, 60, 4):
        data = StatefulShards(build(), seed=3)
        assert list(itertools.islice(data, cut)) == whole[:cut]
        again = StatefulShards(build(), seed=3)
        again.load_state_dict(data.state_dict())
        assert list(again) == whole[cut:]
