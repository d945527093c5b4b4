"""One law for states: a run resumed from a state yields the rest of this epoch, and the next one.

It holds for a table of pipelines, which resume at their position or by replay, with each loader and number of workers.
Random pipelines, other ranks and other loaders than the one that saved the state are in test_random_pipelines.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from loader_kinds import Batches, InStateful, Persistent, Service, Stateful, Tracked, check_law, items_of
from pipeline_table import EXACT, IN_MAIN, REFUSED, REPLAYED, STREAMS, EverySecond, as_it_is, shards_of, split
from sweeps import WHOLE
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardList
from wds_datapipes.errors import StateError
from wds_datapipes.loading.service.pinning import MemoryPinner
from wds_datapipes.pipes.graph import graph_of

Pipe = Any
Build = Callable[[Pipe], Pipe]


shards = shards_of()


def is_member_wanted(member: Any) -> bool:
    return not member.name.endswith("3.cls")


def every_second(items: Any) -> Any:
    return itertools.islice(items, 0, None, 2)


#: Pipelines with each kind of state. `nox -s nightly` runs all with worker processes, and `tests`, these: workers send
#: the states that the tests without workers check.
SOME = (
    *("a long chain", "random crops in batches", "drawn shards in turn", "a truncated shard", "records and members"),
    *("a mixture in a mixture", "random buckets", "an indexed mixture by windows", "a stage with a state"),
    *("a cache on disk", "torch's shuffle", "zipped"),
)
WITH_WORKERS = (*EXACT, *REPLAYED) if WHOLE else SOME
#: Streams with worker processes, and the loaders of each.
STREAMS_WITH_WORKERS: dict[str, Any] = (
    dict.fromkeys(STREAMS, (Tracked, InStateful, Batches, Persistent))
    if WHOLE
    else {"batches": (Tracked, Persistent), "a filter after it": (InStateful,), "packed rows": (Batches,)}
)


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 0) for name in (*EXACT, *REPLAYED)), *itertools.product(WITH_WORKERS, [1, 2, 3] if WHOLE else [2])],
)
def test_the_service_resumes(name: str, workers: int) -> None:
    build = {**EXACT, **REPLAYED}[name]
    found = check_law(partial(Service, build, workers), cuts=3 if workers else 9 if WHOLE else 6)
    assert found == ("exact" if name in EXACT else "replay")


def number_keys(pipe: Any, info: Any) -> Any:
    return pipe.map(partial(numbered, info.worker_id))


def numbered(worker: int, item: Any) -> tuple[int, Any]:
    return worker, item


class Untracked(Tracked):
    """A loader without workers tracks the position of its loop itself."""

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)


#: Loaders with other options than those of the table.
LOADERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "nothing ahead": (partial(Service, worker_prefetch_cnt=0, main_prefetch_cnt=0), (1, 3)),
    "a function for each worker": (partial(Service, worker_init_fn=number_keys), (0, 2)),
    "pinned": (partial(Service, pin_memory=True), (0, 2)),
    "one rank": (partial(Service, distributed=True), (0, 2)),
    "batches": (partial(Tracked, batch_size=4, prefetch_factor=7), (1, 2)),
    "whole batches": (partial(Tracked, batch_size=4, drop_last=True), (0, 3)),
    "batches of persistent workers": (partial(Persistent, batch_size=3), (2,)),
    "not tracked": (partial(Untracked, batch_size=3), (0,)),
    "snapshots": (partial(Stateful, batch_size=3, snapshot_every_n_steps=3), (0, 1, 2)),
    "snapshots of persistent workers": (partial(Stateful, batch_size=3, persistent_workers=True), (2,)),
}


@pytest.mark.parametrize(
    ("name", "workers"), [(name, count) for name, (_, workers) in LOADERS.items() for count in workers]
)
def test_a_loader_with_other_options_resumes(
    name: str, workers: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Let the thread that pins run without CUDA, too.
    monkeypatch.setattr(
        "wds_datapipes.loading.service.service.pin_memory_of", lambda source: MemoryPinner(source, as_it_is)
    )
    new = partial(LOADERS[name][0], EXACT["keys"], workers)
    if name == "one rank":
        request.getfixturevalue("one_rank")
    assert check_law(new, cuts=3 if workers and not WHOLE else 5) == "exact"


KINDS: dict[str, Any] = {"service": Service, "tracked": Tracked, "stateful": Stateful}
#: Numbers of workers, and of items before a state is saved.
AFTER_KEYS = [(0, 5), (2, 1), (2, 11), (3, 17), (2, 18), (2, 99)]
AFTER_BATCHES = [(0, 4), (2, 3), (2, 99)]


@pytest.mark.parametrize(
    ("name", "saving", "at"),
    [
        *itertools.product(["keys"], ["service"], AFTER_KEYS),
        *itertools.product(["keys"], ["tracked", "stateful"], AFTER_KEYS if WHOLE else [(0, 5), (2, 11), (2, 18)]),
        *itertools.product(["batches"], ["service", "tracked"], AFTER_BATCHES),
        *itertools.product(["a shuffle after it"], ["service", "tracked"], AFTER_BATCHES if WHOLE else [(2, 3)]),
    ],
)
def test_each_loader_resumes_from_the_state_of_each(name: str, saving: str, at: tuple[int, int]) -> None:
    """The state is saved after some items of the second epoch."""
    build, (workers, cut) = {**EXACT, **STREAMS}[name], at
    with closing(KINDS[saving](build, workers)) as run:
        items_of(run.epoch())
        epoch = run.epoch()
        head = items_of(epoch, cut)
        state, rest = run.state(), items_of(epoch)
        following = [items_of(run.epoch()) for _ in range(2)]
    for kind in (Service, Tracked, InStateful):
        with closing(kind(build, workers, state)) as run:
            found = [items_of(run.epoch()) for _ in range(2)]
        assert found == ([rest, following[0]] if rest or len(head) == cut else following), kind


@pytest.mark.parametrize("saving", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_before_the_first_item_begins_its_epoch(saving: str, workers: int) -> None:
    """A loader that has loaded a state saves it unchanged before it begins."""
    with closing(KINDS[saving](EXACT["keys"], workers)) as run:
        state = run.state()
        whole = [items_of(run.epoch()) for _ in range(2)]
    for kind in (Service, Tracked, InStateful):
        with closing(kind(EXACT["keys"], workers, state)) as run:
            again = run.state()
        with closing(Service(EXACT["keys"], workers, again)) as run:
            assert [items_of(run.epoch()) for _ in range(2)] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unseeded_loader_resumes_in_its_own_order(workers: int) -> None:
    with closing(Service(EXACT["keys"], workers, seed=None)) as run:
        epoch = run.epoch()
        items_of(epoch, 7)
        state, rest = run.state(), items_of(epoch)
    with closing(Service(EXACT["keys"], workers, state, seed=None)) as run:
        assert items_of(run.epoch()) == rest


#: With a ``StatefulDataLoader``, whose workers save their states themselves.
SAVED_BY_WORKERS = ("a chain", "a mixture in a mixture", "batches taken apart", "a cache on disk")


@pytest.mark.parametrize(
    ("name", "loader", "workers"),
    [
        *itertools.product(WITH_WORKERS if WHOLE else WITH_WORKERS[::3], [Tracked], [2]),
        *itertools.product(SAVED_BY_WORKERS, [Stateful], [0, 2]),
    ],
)
def test_a_dataset_resumes(name: str, loader: Any, workers: int) -> None:
    new = partial(loader, {**EXACT, **REPLAYED}[name], workers)
    assert check_law(new, cuts=3) == ("exact" if name in EXACT else "replay")


@pytest.mark.parametrize(
    ("name", "loader", "workers"),
    [
        *itertools.product(STREAMS, [Service, Tracked, Batches], [0]),
        *itertools.product(STREAMS, [Service], [2]),
        *((name, loader, 2) for name, loaders in STREAMS_WITH_WORKERS.items() for loader in loaders),
        *itertools.product(STREAMS if WHOLE else ["batches"], [Service], [3]),
    ],
)
def test_a_stream_resumes(name: str, loader: Any, workers: int) -> None:
    new = partial(loader, STREAMS[name], workers)
    assert check_law(new, cuts=7 if not workers else 4 if WHOLE else 3) == "exact"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("workers", [0, 1])
def test_pipelines_that_cannot_be_replayed_have_no_state(name: str, workers: int) -> None:
    build, message = REFUSED[name]
    with closing(Service(build, workers)) as run:
        next(run.epoch())
        with pytest.raises(StateError, match=message):
            run.state()


@pytest.mark.parametrize("name", IN_MAIN)
def test_a_stage_in_the_main_process_has_no_state(name: str) -> None:
    message = r"runs in the main process, where no stage has a state\. Move it before the workers"
    with closing(Service(IN_MAIN[name], 1)) as run:
        next(run.epoch())
        with pytest.raises(StateError, match=message):
            run.state()


def test_declarations_of_user_stages_are_trusted_and_checked_by_check_resume() -> None:
    """Buffering in a class is invisible from outside, which is why `check_resume` exists."""
    with pytest.raises(AssertionError, match="after 1 of"):
        check_law(partial(Service, lambda: EverySecond(split()), 0), cuts=19)


# Every stage of this package, and those that may stand before shards are loaded ---------------------------------------


def one_for_one() -> Pipe:
    """Return a pipeline of the stages that yield one item for each, and that no other table contains."""
    pipe = split().map_dict(cls=as_it_is).wds_decode().wds_encode().rename(label="cls").rename_keys(cls="label")
    pipe = pipe.associate({f"{s}-{n}": {"n": f"{s}-{n}"} for s in range(6) for n in range(9)})
    return pipe.select_fields("n").with_length(18).extract_keys("n").map_tuple(as_it_is)


#: Stages before .load_wds_shards(), or built from it, which are replayed from the same seeds.
BEFORE_SHARDS: dict[str, Build] = {
    "bucket_samples": lambda urls: urls.bucket_samples(len, batch_size=2).unbatch(),
    "cache_wds_shards": lambda urls: urls.cache_wds_shards("copies"),
    "compose": lambda urls: urls.compose(every_second),
    "cycle": lambda urls: urls.cycle(2),
    "fork": lambda urls: urls.fork(2, buffer_size=-1)[0],
    "in_memory_cache": lambda urls: urls.in_memory_cache(),
    "mix_samples": lambda urls: urls.mix_samples(ShardList("more-{0..2}.tar"), stop="all"),
    "prefetch": lambda urls: urls.prefetch(3),
    "resample_wds_shards": lambda urls: ShardList("{0..4}.tar").resample_wds_shards(9),
    "rsample": lambda urls: urls.rsample(0.7),
    "with_epoch": lambda urls: urls.with_epoch(3),
}
AFTER_MEMBERS: dict[str, Build] = {
    "filter": lambda members: members.filter(is_member_wanted),
    "shuffle": lambda members: members.shuffle(buffer_size=1),
    "slice_samples": lambda members: members.slice_samples(0, 20),
}
#: These have no state, because they repeat the order of the first epoch, or continue from one epoch to the next.
WITHOUT_STATE = {"in_memory_cache": "cannot be replayed", "with_epoch": "continues from one epoch to the next"}
ELSEWHERE = {"ShardCacher", "SampleWriter"}


def before_shards(build: Build) -> Pipe:
    return build(ShardList("{0..5}.tar").shuffle().sharding_filter()).load_wds_shards().group_samples()


def after_members(build: Build) -> Pipe:
    return build(ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards()).group_samples()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "place", "build"),
    [
        *((name, before_shards, build) for name, build in BEFORE_SHARDS.items()),
        *((name, after_members, build) for name, build in AFTER_MEMBERS.items()),
    ],
)
def test_a_stage_before_the_samples_is_replayed_or_refused(name: str, place: Any, build: Build) -> None:
    found = check_law(partial(Service, partial(place, build), 0), cuts=5)
    assert found in ("exact", "replay") if name not in WITHOUT_STATE else WITHOUT_STATE[name] in found


def test_stages_that_yield_one_item_for_each_resume_exactly() -> None:
    assert check_law(partial(Service, one_for_one, 0), cuts=5) == "exact"


def test_every_stage_of_this_package_is_in_a_table() -> None:
    builds = [*EXACT.values(), *REPLAYED.values(), *STREAMS.values(), one_for_one]
    swept = {kind.__name__ for build in builds for stage in graph_of(build()).stages for kind in type(stage).__mro__}
    functions: list[Any] = [getattr(each, "__wrapped__", None) for each in IterDataPipe.functions.values()]
    own = {each.__name__ for each in functions if getattr(each, "__module__", "").startswith("wds_datapipes.")}
    assert own - swept == ELSEWHERE
