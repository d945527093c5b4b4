"""One law for states: a run resumed from a state yields the rest of this epoch, and the next one.

It holds for a table of pipelines, which resume at their position or by replay, with each loader and number of workers.
Random pipelines, other ranks and other loaders than the one that saved the state are in test_random_pipelines.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torchdata.datapipes.iter  # noqa: F401 - registers its stages
from loader_kinds import Batches, InStateful, Persistent, Service, Stateful, Tracked, check_law, items_of
from pipeline_table import (
    CROPS,
    EXACT,
    IN_MAIN,
    REFUSED,
    REPLAYED,
    STREAMS,
    EverySecond,
    as_it_is,
    draw,
    length,
    more_of,
    shards_of,
    split,
    tokens_of,
    with_image,
)
from torch.utils.data import IterDataPipe

from wds_datapipes import ShardList
from wds_datapipes.errors import StateError
from wds_datapipes.loading.service.pinning import MemoryPinner

Pipe = Any
Build = Callable[[Pipe], Pipe]


shards = shards_of()


def is_member_wanted(member: Any) -> bool:
    return not member.name.endswith("3.cls")


def second(pair: Any) -> Any:
    return pair[1]


def every_second(items: Any) -> Any:
    return itertools.islice(items, 0, None, 2)


#: Pipelines of each kind. `nox -s nightly` runs all with worker processes, and `tests`, these.
SOME = (
    *("a long chain", "random crops in batches", "shuffles in a row", "a shuffle of few bytes", "drawn shards in turn"),
    *("a truncated shard", "skipped samples", "records and members", "a mixture in a mixture", "buckets of a mixture"),
    *("a mixture without end", "random buckets", "random parts", "indexed samples by length", "a stage with a state"),
    *("an indexed mixture by windows", "a stage that holds samples back", "columns of batches", "joined columns"),
    *("a cache on disk", "a state before a shuffle", "torch's shuffle", "a stage that declares nothing", "zipped"),
)
WHOLE = bool(os.environ.get("WHOLE_SWEEPS"))
WITH_WORKERS = (*EXACT, *REPLAYED) if WHOLE else SOME
STREAMS_WITH_WORKERS = [*STREAMS] if WHOLE else ["batches", "a filter after it", "packed rows"]


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 0) for name in (*EXACT, *REPLAYED)),
        *itertools.product([*WITH_WORKERS, *IN_MAIN], [1, 2, 3] if WHOLE else [3]),
    ],
)
def test_the_service_resumes(name: str, workers: int) -> None:
    build = {**EXACT, **REPLAYED, **IN_MAIN}[name]
    found = check_law(partial(Service, build, workers), cuts=3 if workers else 9)
    assert found == ("exact" if name in EXACT else "replay")


def number_keys(pipe: Any, info: Any) -> Any:
    return pipe.map(partial(numbered, info.worker_id))


def numbered(worker: int, item: Any) -> tuple[int, Any]:
    return worker, item


class Untracked(Tracked):
    """A loader without workers knows the position of its loop by itself."""

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
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Let the thread that pins run without CUDA, too.
    monkeypatch.setattr(
        "wds_datapipes.loading.service.service.pin_memory_of", lambda source: MemoryPinner(source, as_it_is)
    )
    new = partial(LOADERS[name][0], EXACT["keys"], workers)
    if "one rank" not in name and "distributed" not in name:
        assert check_law(new, cuts=5) == "exact"
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert check_law(new, cuts=5) == "exact"
    finally:
        dist.destroy_process_group()


KINDS: dict[str, Any] = {"service": Service, "tracked": Tracked, "stateful": Stateful}


def check_each_loader(name: str, saving: Any, workers: int, cut: int) -> None:
    """Check that all loaders resume from the state that one has saved after some items of the second epoch."""
    build = {**EXACT, **STREAMS}[name]
    with closing(saving(build, workers)) as run:
        items_of(run.epoch())
        epoch = run.epoch()
        head = items_of(epoch, cut)
        state, rest = run.state(), items_of(epoch)
        following = [items_of(run.epoch()) for _ in range(2)]
    for kind in (Service, Tracked, InStateful):
        with closing(kind(build, workers, state)) as run:
            found = [items_of(run.epoch()) for _ in range(2)]
        assert found == ([rest, following[0]] if rest or len(head) == cut else following), kind


@pytest.mark.parametrize(("workers", "cut"), [(0, 5), (2, 1), (2, 11), (3, 17), (2, 18), (2, 99)])
@pytest.mark.parametrize("saving", KINDS)
def test_each_loader_resumes_from_the_state_of_each(saving: str, workers: int, cut: int) -> None:
    check_each_loader("keys", KINDS[saving], workers, cut)


@pytest.mark.parametrize(("workers", "cut"), [(0, 4), (2, 3), (2, 99)])
@pytest.mark.parametrize("saving", [Service, Tracked])
@pytest.mark.parametrize("name", ["batches", "a shuffle after it"])
def test_each_loader_resumes_a_stream_from_the_state_of_each(name: str, saving: Any, workers: int, cut: int) -> None:
    check_each_loader(name, saving, workers, cut)


@pytest.mark.parametrize("saving", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_before_the_first_item_begins_its_epoch(saving: str, workers: int) -> None:
    """A loader that has loaded a state, and has not begun, saves it again."""
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
        *itertools.product(WITH_WORKERS[::2] if not WHOLE else WITH_WORKERS, [Tracked], [2]),
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
        *itertools.product(STREAMS_WITH_WORKERS, [Tracked, InStateful, Batches], [2]),
        *itertools.product(STREAMS_WITH_WORKERS, [Service, Persistent], [3]),
    ],
)
def test_a_stream_resumes(name: str, loader: Any, workers: int) -> None:
    new = partial(loader, STREAMS[name], workers)
    assert check_law(new, cuts=4 if workers else 7) == "exact"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("workers", [0, 1])
def test_pipelines_that_cannot_be_replayed_have_no_state(name: str, workers: int) -> None:
    build, message = REFUSED[name]
    with closing(Service(build, workers)) as run:
        next(run.epoch())
        with pytest.raises(StateError, match=message):
            run.state()


def test_declarations_of_user_stages_are_trusted_and_checked_by_check_resume() -> None:
    """The buffering of a class cannot be seen from outside: that is why `check_resume` exists."""
    with pytest.raises(AssertionError, match="after 1 of"):
        check_law(partial(Service, lambda: EverySecond(split()), 0), cuts=19)


# Every stage that is registered by torch, torchdata or this package -------------------------------------------------


#: What follows samples, for each functional name of this package that can stand there.
AFTER_SAMPLES: dict[str, Build] = {
    "add_columns": lambda pipe: pipe.add_columns(more_of),
    "bucket_samples": lambda pipe: pipe.bucket_samples(length, batch_size=2),
    "associate": lambda pipe: pipe.associate({f"{s}-{n}": {"n": n} for s in range(6) for n in range(9)}),
    "cache_samples": lambda pipe: pipe.cache_samples(),
    "compose": lambda pipe: pipe.compose(every_second),
    "extract_keys": lambda pipe: pipe.extract_keys("cls"),
    "log_samples": lambda pipe: pipe.log_samples(first=0),
    "map_dict": lambda pipe: pipe.map_dict(cls=as_it_is),
    "map_samples": lambda pipe: pipe.map_samples(as_it_is),
    "map_samples_with_rng": lambda pipe: pipe.map_samples_with_rng(draw),
    "map_tuple": lambda pipe: pipe.to_tuple("__key__", "cls").map_tuple(as_it_is, None),
    "mix_samples": lambda pipe: pipe.mix_samples(split(), stop="all"),
    "non_empty": lambda pipe: pipe.non_empty(),
    "decode_batch": lambda pipe: pipe.map(with_image).batch(2).decode_batch(CROPS),
    "pack_samples": lambda pipe: pipe.map(tokens_of).pack_samples(9, "tokens"),
    "rename": lambda pipe: pipe.rename(label="cls"),
    "rename_keys": lambda pipe: pipe.rename_keys(label="cls"),
    "rsample": lambda pipe: pipe.rsample(0.7),
    "select_fields": lambda pipe: pipe.select_fields("cls"),
    "shuffle_samples": lambda pipe: pipe.shuffle_samples(5),
    "slice_samples": lambda pipe: pipe.slice_samples(1, None, 2),
    "to_tuple": lambda pipe: pipe.to_tuple("__key__", "cls"),
    "unbatch_samples": lambda pipe: pipe.to_tuple("__key__", "cls").batch(2).collate().unbatch_samples(),
    "wds_decode": lambda pipe: pipe.wds_decode(),
    "wds_encode": lambda pipe: pipe.wds_decode().wds_encode(),
    "with_epoch": lambda pipe: pipe.with_epoch(9),
    "with_length": lambda pipe: pipe.with_length(18),
}

#: What stands before .load_wds_shards(), or is built from it. These are replayed from the same seeds.
BEFORE_SHARDS: dict[str, Build] = {
    "bucket_samples": lambda urls: urls.bucket_samples(len, batch_size=2).unbatch(),
    "concat": lambda urls: urls.concat(ShardList("more-{0..2}.tar")),
    "cache_samples": lambda urls: urls.cache_samples(),
    "cache_wds_shards": lambda urls: urls.cache_wds_shards("copies"),
    "compose": lambda urls: urls.compose(every_second),
    "cycle": lambda urls: urls.cycle(2),
    "fork": lambda urls: urls.fork(2, buffer_size=-1)[0],
    "in_batch_shuffle": lambda urls: urls.batch(4).in_batch_shuffle().unbatch(),
    "in_memory_cache": lambda urls: urls.in_memory_cache(),
    "mix_samples": lambda urls: urls.mix_samples(ShardList("more-{0..2}.tar"), stop="all"),
    "prefetch": lambda urls: urls.prefetch(3),
    "resample_wds_shards": lambda urls: ShardList("{0..4}.tar").resample_wds_shards(9),
    "rsample": lambda urls: urls.rsample(0.7),
    "shuffle_samples": lambda urls: urls.shuffle_samples(3),
    "with_epoch": lambda urls: urls.with_epoch(3),
}
AFTER_MEMBERS: dict[str, Build] = {
    "filter": lambda members: members.filter(is_member_wanted),
    "shuffle": lambda members: members.shuffle(buffer_size=1),
    "slice_samples": lambda members: members.slice_samples(0, 20),
}

#: After samples, these resume at their position, and all others by replay.
AT_POSITION = {
    *("bucket_samples", "decode_batch", "pack_samples"),
    *("extract_keys", "log_samples", "map_dict", "map_samples", "map_samples_with_rng", "map_tuple", "non_empty"),
    *("associate", "rename", "rename_keys", "rsample", "select_fields", "shuffle_samples", "slice_samples", "to_tuple"),
    *("mix_samples", "wds_decode", "wds_encode", "with_epoch", "with_length"),
}
#: In any position, this has no state if something before it draws: it keeps the order of the first epoch.
KEEPING = {"in_memory_cache"}
#: Names that stand in other positions in a pipeline. The file about process_shards has its law, as it uses no workers.
ELSEWHERE = {
    *("cache_wds_shards", "group_samples", "load_wds_records", "load_wds_shards", "process_shards"),
    *("resample_wds_shards", "write_wds_shards"),
}


def after_samples(build: Build) -> Pipe:
    return build(split())


def before_shards(build: Build) -> Pipe:
    return build(ShardList("{0..5}.tar").shuffle().sharding_filter()).load_wds_shards().group_samples()


def after_members(build: Build) -> Pipe:
    return build(ShardList("{0..5}.tar").shuffle().sharding_filter().load_wds_shards()).group_samples()


SWEPT = [
    pytest.param(name, partial(place, build), id=f"{name} {place.__name__.replace('_', ' ')}")
    for place, table in (
        (after_samples, AFTER_SAMPLES),
        (before_shards, BEFORE_SHARDS),
        (after_members, AFTER_MEMBERS),
    )
    for name, build in table.items()
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "build"), SWEPT)
def test_every_stage_resumes_exactly_or_by_replay(name: str, build: Callable[[], Pipe]) -> None:
    found = check_law(partial(Service, build, 0), cuts=5)
    if name in KEEPING:
        assert "cannot be replayed" in found
    elif build.func is after_samples:  # type: ignore[attr-defined]  # it is a partial
        assert found == ("exact" if name in AT_POSITION else "replay")
    elif name == "with_epoch":
        assert "continues from one epoch to the next" in found
    else:
        assert found in ("exact", "replay")


def test_every_stage_is_swept() -> None:
    functions: dict[str, Any] = IterDataPipe.functions
    own = {
        name
        for name, function in functions.items()
        if getattr(function, "__wrapped__", None) and function.__wrapped__.__module__.startswith("wds_datapipes.")
    }
    assert own == AFTER_SAMPLES.keys() | ELSEWHERE
