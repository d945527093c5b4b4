"""States that resume with another number of ranks or workers: every remaining sample comes exactly once."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions, Manifest, ShardIndex, build_indexes
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in, state_of
from wds_datapipes.loading.checkpoint.resharding import state_of_rank
from wds_datapipes.loading.checkpoint.shard_assignment import assign_shards
from wds_datapipes.loading.progress import LoopPosition, SnapshotWriter
from wds_datapipes.loading.seeding import reset_pipeline
from wds_datapipes.loading.splitting import split_by_worker
from wds_datapipes.testing import build_shard
from wds_datapipes.writing import RecordWriter

SIZES = (7, 0, 13, 1, 9, 4, 11)
#: The same samples as records.
RECORDS = {shard: f"{shard}.{('jsonl', 'cbors', 'msgpack.gz')[shard % 3]}" for shard, size in enumerate(SIZES) if size}
KEYS = sorted(f"{shard}-{number}" for shard, size in enumerate(SIZES) for number in range(size))


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shard, size in enumerate(SIZES):
        samples = [
            {"__key__": f"{shard}-{number}", "cls": str(number), "txt": "x" * (137 * number % 1700)}
            for number in range(size)
        ]
        build_shard(f"{shard}.tar", samples)
        build_shard(f"{shard}-more.tar", [{"__key__": sample["__key__"], "more": "1"} for sample in samples])
        if samples:
            with RecordWriter(RECORDS[shard]) as records:
                for sample in samples:
                    records.write(sample)
    build_shard("cut.tar", samples)


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def same(url: str) -> str:
    return url


def not_threefold(sample: dict[str, Any]) -> bool:
    return int(sample["cls"]) % 3 != 0


def pipeline(
    buffer_size: int = 5, *, filtered: bool = False, twice: bool = False, mapped: bool = False, open_shards: int = 1
) -> IterDataPipe[Any]:
    urls = ShardList("{0..6}.tar").shuffle().sharding_filter()
    urls = urls.map(same) if mapped else urls
    samples = urls.load_wds_shards(open_shards=open_shards).group_samples()
    pipe: IterDataPipe[Any] = samples.shuffle_samples(buffer_size)
    pipe = pipe.filter(not_threefold) if filtered else pipe
    pipe = pipe.shuffle_samples(3) if twice else pipe
    return pipe.map(key_of)


def records(buffer_size: int, open_shards: int = 1) -> IterDataPipe[Any]:
    urls = ShardList([*RECORDS.values()]).shuffle().sharding_filter()
    keys: IterDataPipe[Any] = urls.load_wds_records(open_shards=open_shards).shuffle_samples(buffer_size).map(key_of)
    return keys


def mixture() -> IterDataPipe[Any]:
    first = ShardList("{0..2}.tar").shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(4)
    second = ShardList("{3..6}.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    mixed = first.mix_samples(second, weights=[1, 2], stop="all").shuffle_samples(3)
    keys: IterDataPipe[Any] = mixed.map(key_of)
    return keys


def tokens_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "tokens": [0] * (int(sample["cls"]) % 7)}


def parity(sample: dict[str, Any]) -> int:
    return int(sample["cls"]) % 2


def keys_of(batch: list[dict[str, Any]]) -> list[str]:
    return [key_of(sample) for sample in batch]


def samples() -> IterDataPipe[Any]:
    urls = ShardList("{0..6}.tar").shuffle().sharding_filter()
    pipe: IterDataPipe[Any] = urls.load_wds_shards().group_samples().shuffle_samples(3)
    return pipe


def buckets() -> IterDataPipe[Any]:
    batches: IterDataPipe[Any] = samples().bucket_samples(parity, batch_size=3).map(keys_of)
    return batches


def rows() -> IterDataPipe[Any]:
    packed: IterDataPipe[Any] = samples().map(tokens_of).pack_samples(8, "tokens", open_rows=2)
    return packed.map(operator.itemgetter("__key__"))


def indexed(
    remainder: Any = "drop",
    buffer_size: int = 1,
    *,
    size: int = 12,
    data: str | dict[str, str] = "{0..6}.tar",
    join: str = "",
    **options: Any,
) -> IterDataPipe[Any]:
    shards: Any = {name: manifest(each) for name, each in data.items()} if isinstance(data, dict) else manifest(data)
    joined: Any = manifest(join) if join else ()
    pipe: Any = IndexedSamples(shards, remainder=remainder, global_batch_size=size, join=joined, **options)
    pipe = pipe.shuffle_samples(buffer_size) if buffer_size > 1 else pipe
    return pipe.map(marked_key_of)  # type: ignore[no-any-return]  # torch's stages carry no types


@cache
def manifest_in(folder: str, shards: str) -> Manifest:
    """Return the manifest of some shards of the working directory; ``cut.tar`` becomes unreadable."""
    found = Manifest(build_indexes(shards, num_workers=1))
    if "cut" in shards:
        os.truncate("cut.tar", 100)
    return found


def marked_key_of(sample: dict[str, Any]) -> str:
    return key_of(sample) + ("+" if sample.get("__padding__") else "")


def manifest(shards: str) -> Manifest:
    return manifest_in(os.getcwd(), shards)


def lengths_in(index: ShardIndex) -> list[int]:
    return [137 * number % 1700 for number in range(len(index))]


def indexed_branches() -> IterDataPipe[Any]:
    first = IndexedSamples(manifest("{0..2}.tar"), global_batch_size=6)
    second = IndexedSamples(manifest("{3..6}.tar"), global_batch_size=12).shuffle_samples(4)
    return first.mix_samples(second, stop="all").shuffle_samples(3).map(key_of)  # type: ignore[no-any-return]


def flat(items: Iterable[Any]) -> list[str]:
    """Return the keys of items, which may be lists of keys."""
    return sorted(key for item in items for key in (item if isinstance(item, list) else [item]))


def unmarked(items: Iterable[Any]) -> list[str]:
    """Return the keys of the samples that are no padding."""
    return [key for key in flat(items) if not key.endswith("+")]


SEED = 17
PIPELINES: dict[str, Callable[[], IterDataPipe[Any]]] = {
    "in order": partial(pipeline, 1),
    "a small buffer": pipeline,
    "a buffer for more than all": partial(pipeline, 50),
    "two buffers": partial(pipeline, twice=True, mapped=True),
    "filtered between buffers": partial(pipeline, 4, filtered=True, twice=True),
    "a mixture": mixture,
    "shards in turn": partial(pipeline, 1, open_shards=3),
    "shards in turn, shuffled": partial(pipeline, 4, open_shards=2, filtered=True, twice=True),
    "records": partial(records, 4),
    "records in turn": partial(records, 1, open_shards=3),
    "buckets": buckets,
    "packed rows": rows,
}
UNREADABLE: Any = {"data": "{0,2,cut}.tar", "on_error": "skip"}
INDEXED: dict[str, Callable[[], IterDataPipe[Any]]] = {
    **{f"{each}, one by one": partial(indexed, each) for each in ("drop", "pad", "keep")},
    **{f"{each}, shuffled": partial(indexed, each, 7) for each in ("drop", "pad", "keep")},
    **{f"{each}, with unreadable samples": partial(indexed, each, 4, **UNREADABLE) for each in ("drop", "pad", "keep")},
    "windows": partial(indexed, buffer_size=3, order="window", epoch=EpochOptions(window_shards=2)),
    "in their order": partial(indexed, order="sequential", size=36),
    "a mixture of indexes": partial(
        indexed,
        buffer_size=5,
        data={"a": "{0..2}.tar", "b": "{3..6}.tar"},
        weights={"a": 2, "b": 1},
        epoch=EpochOptions(samples=64),
    ),
    "by length": partial(indexed, buffer_size=5, epoch=EpochOptions(bucket_by=lengths_in, bucket_window=2)),
    "padded, joined": partial(indexed, "pad", 5, join="{2..6}-more.tar", missing="skip"),
    "selected": partial(indexed, buffer_size=5, select=slice(1, None, 2), size=6),
    "branches": indexed_branches,
}
#: How many ranks a run has, and how many workers each of them has.
Topology = tuple[int, int]
START = WorkerState(None)


def worker_of(pipe: Any, topology: Topology, number: int, resumed: WorkerState) -> tuple[Any, Iterator[str]]:
    """Do what a worker does when an epoch starts or resumes: return its pipeline, and an iterator over the items."""
    (ranks, workers), (rank, worker) = topology, divmod(number, topology[1])
    pipe = apply_sharding(pipe, ranks, rank, SHARDING_PRIORITIES.DISTRIBUTED)
    info = WorkerInfo(workers, worker)
    pipe = split_by_worker(pipe, info)
    generator = SeedGenerator(SEED).spawn(rank, inplace=True).spawn(worker)
    reset_pipeline(pipe, info, generator, iter_reset_fn=None, worker_reset_fn=None)
    resumed.load(pipe)
    return pipe, iter(pipe)


def checkpoint_of(topology: Topology, rank: int, parts: list[WorkerState]) -> Checkpoint:
    """Return the state that a rank saves, as read back from a file."""
    ranks, workers = topology
    saved = Checkpoint(
        stages=["a pipeline"],
        seed=SEED,
        epoch=0,
        first=SEED,
        next=SEED + 1,
        engines=None,
        is_over=False,
        rank=rank,
        ranks=ranks,
        distributed=True,
        workers=workers,
        turn=0,
        parts=parts,
    )
    (found,) = checkpoints_in(state_of([saved]))
    return found


cuts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=12, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(PIPELINES)),
    chain=st.lists(st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4)), cuts), min_size=1, max_size=4),
    last=st.tuples(st.integers(1, 3), st.integers(1, 4)),
)
@example("two buffers", [((1, 1), [(9, 3)] * 12), ((2, 2), [(3, 0)] * 12), ((2, 2), [(0, 0)] * 12)], (1, 3))
@example("a mixture", [((2, 2), [(5, 2)] * 12), ((1, 3), [(2, 1)] * 12), ((3, 3), [(1, 0)] * 12)], (1, 2))
@example(
    "shards in turn, shuffled", [((2, 1), [(6, 2)] * 12), ((1, 2), [(2, 1)] * 12), ((2, 2), [(1, 0)] * 12)], (1, 1)
)
@example("in order", [((3, 4), [(4, 1)] * 12), ((1, 1), [(9, 0)] * 12), ((1, 2), [(2, 0)] * 12)], (3, 1))
def test_a_chain_of_runs_yields_each_sample_once_however_often_it_is_resharded(
    kind: str, chain: list[tuple[Topology, list[tuple[int, int]]]], last: Topology
) -> None:
    check_chain(PIPELINES[kind], chain, last)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(INDEXED)),
    chain=st.lists(st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4)), cuts), min_size=1, max_size=4),
    last=st.tuples(st.integers(1, 3), st.integers(1, 4)),
)
@example("drop, one by one", [((1, 1), [(5, 0)] * 12)], (2, 2))
@example("keep, one by one", [((1, 1), [(5, 0)] * 12), ((2, 2), [(0, 0), *[(3, 0)] * 11])], (1, 3))
@example("drop, shuffled", [((2, 3), [(5, 2)] * 12), ((3, 1), [(2, 1)] * 12)], (1, 1))
def test_a_chain_of_runs_yields_the_kept_samples_of_an_index_once(
    kind: str, chain: list[tuple[Topology, list[tuple[int, int]]]], last: Topology
) -> None:
    # An epoch that is interrupted within a batch may need less padding.
    check_chain(INDEXED[kind], chain, last, unmarked if kind.startswith("pad") else flat)


def check_chain(
    new: Callable[[], IterDataPipe[Any]],
    chain: list[tuple[Topology, list[tuple[int, int]]]],
    last: Topology,
    of_epoch: Callable[[Iterable[Any]], list[str]] = flat,
) -> None:
    """Resume again and again after each worker has delivered some items, and has made some more."""
    whole = of_epoch(worker_of(new(), (1, 1), 0, START)[1])
    came, saved = list[str](), list[Checkpoint]()
    expected: list[list[str]] = []  # the items that each instance would have yielded after the state
    before: Topology | None = None
    for topology, cuts in [*chain, (last, [(0, 0)] * 12)]:
        ranks, workers = topology
        places = [(rank, ranks, True, workers) for rank in range(ranks)]
        found = [state_of_rank(saved, new(), place).parts if saved else [START] * workers for place in places]
        pipes, rests, states = list[Any](), list[list[str]](), list[WorkerState]()
        for number, part in enumerate(itertools.chain(*found)):
            pipe, items = worker_of(new(), topology, number, part)
            delivered, ahead = cuts[number]
            trail, snapshots = LoopPosition(part), SnapshotWriter(pipe)
            made = []
            for item in itertools.islice(items, delivered + ahead):
                made.append(item)
                trail.add(snapshots.pack([snapshots.snapshot()]), 1)
            for _ in made[:delivered]:
                trail.deliver()
            states.append(trail.state())
            came += made[:delivered]
            rests.append(made[delivered:] + list(items))
            pipes.append(pipe)
            if topology == before:
                assert made[:delivered] + rests[-1] == expected[number]  # the same numbers resume exactly
        saved = [checkpoint_of(topology, rank, states[rank * workers : (rank + 1) * workers]) for rank in range(ranks)]
        before, expected = topology, rests
    came += itertools.chain(*expected)
    assert of_epoch(came) == whole
    # The next epoch is split as usual.
    following = [list(worker_of(pipe, last, number, START)[1]) for number, pipe in enumerate(pipes)]
    assert following == [list(worker_of(new(), last, number, START)[1]) for number in range(len(pipes))]
    assert of_epoch(itertools.chain(*following)) == whole


def test_a_state_does_not_grow_with_each_resharding() -> None:
    """A state that held the history of its epoch would grow."""
    part: list[Any] = [[{"next": [5, 512, ""]}], [{"next": [3, 0, ""]}]]
    sizes = []
    for instances in [3, 2] * 20:
        deals = assign_shards(part, instances)
        part = [[{"next": [0, 0, ""], "dealt": json.loads(json.dumps(deal.state_dict()))}] for deal in deals]
        sizes.append(len(json.dumps(part)))
    assert sizes[:2] * 20 == sizes


def loader_of(pipe: IterDataPipe[Any], workers: int, *, distributed: bool = False) -> DataLoader2[Any]:
    return DataLoader2(pipe, reading_service=ShardReadingService(workers, distributed=distributed, timeout_s=60))


@pytest.mark.parametrize(
    ("before", "after", "cut"), [(2, 3, 17), (3, 0, 30), (0, 2, 11), (1, 0, 25), (2, 1, 0), (1, 2, 40)]
)
def test_a_loader_resumes_with_another_number_of_workers(before: int, after: int, cut: int) -> None:
    with loader_of(pipeline(), before) as loader:
        loader.seed(5)
        iterator = iter(loader)
        came = list(itertools.islice(iterator, cut))
        state = loader.state_dict()
        next_epoch = (list(iterator), sorted(loader))[1]
    with loader_of(pipeline(), after) as loader:
        loader.load_state_dict(merge_states([state]))
        iterator = iter(loader)
        head = list(itertools.islice(iterator, 3))
        state = loader.state_dict()
        rest = list(iterator)
        assert sorted(came + head + rest) == KEYS
        assert sorted(loader) == next_epoch == KEYS
    with loader_of(pipeline(), after) as loader:
        loader.load_state_dict(state)
        assert list(loader) == rest


def test_resharding_draws_nothing_in_the_main_process() -> None:
    with loader_of(pipeline(), 2) as loader:
        loader.seed(5)
        came = list(itertools.islice(loader, 20))
        state = loader.state_dict()
    with loader_of(pipeline(), 1) as loader:
        before = torch.get_rng_state()
        loader.load_state_dict(state)
        assert sorted(came + list(loader)) == KEYS
        assert torch.equal(torch.get_rng_state(), before)


def read_as_rank(rank: int, folder: str, cut: int, saved: Sequence[dict[str, Any]], results: Any) -> None:
    """Be one of two ranks with 2 workers: resume, take some items, save, and take the rest."""
    init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    try:
        with loader_of(pipeline(), 2, distributed=True) as loader:
            loader.seed(5)
            if saved:
                loader.load_state_dict(merge_states(saved))
            iterator = iter(loader)
            came = list(itertools.islice(iterator, cut))
            state = loader.state_dict()
            results.put((rank, came, state, list(iterator), list(loader)))
    finally:
        destroy_process_group()


def run_ranks(folder: Path, cut: int, saved: Sequence[dict[str, Any]] = ()) -> list[Any]:
    """Run two ranks, and return their results in the order of the ranks."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=read_as_rank, args=(rank, str(folder), cut, saved, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = sorted((results.get() for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
        assert process.exitcode == 0
        process.close()
    results.close()
    return found


def test_an_epoch_resumes_on_one_rank_then_two_then_one(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path / "first", 8)
    came = [key for _, head, _, _, _ in ranks for key in head]
    states = [state for _, _, state, _, _ in ranks]
    # The same numbers of ranks and workers resume exactly.
    same_again = run_ranks(tmp_path / "second", 0, states[::-1])
    assert [result[3:] for result in same_again] == [result[3:] for result in ranks]
    with loader_of(pipeline(), 3) as loader:
        loader.load_state_dict(states[1])
        with pytest.raises(StateError, match="merge_states"):
            next(iter(loader))
    with loader_of(pipeline(), 3) as loader:
        loader.load_state_dict(merge_states(states))
        iterator = iter(loader)
        came += itertools.islice(iterator, 6)
        state = loader.state_dict()
        assert sorted(came + list(iterator)) == KEYS
        assert sorted(loader) == KEYS
    two = run_ranks(tmp_path / "third", 5, [state])
    assert sorted(came + [key for _, head, _, rest, _ in two for key in head + rest]) == KEYS
    came += [key for _, head, *_ in two for key in head]
    with loader_of(pipeline(), 1) as loader:
        loader.load_state_dict(merge_states([state for _, _, state, *_ in two]))
        assert sorted(came + list(loader)) == KEYS
        assert sorted(loader) == KEYS
    assert sorted(key for *_, epoch in two for key in epoch) == KEYS


def read_batches(rank: int, file: str, drop_last: bool, results: Any) -> None:
    """Be one of two ranks without workers, and take some batches of 2."""
    init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        with loader_of(pipeline().batch(2, drop_last=drop_last), 0, distributed=True) as loader:
            loader.seed(5)
            came = list(itertools.islice(loader, 4))
            results.put((came, loader.reading_service.state_dict()))
    finally:
        destroy_process_group()


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_may_be_larger_on_fewer_ranks(drop_last: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    arguments = [(rank, str(tmp_path / "ranks"), drop_last, results) for rank in range(2)]
    processes = [context.Process(target=read_batches, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
        process.close()
    results.close()
    state = merge_states([state for _, state in found])
    with loader_of(pipeline().batch(4, drop_last=drop_last), 0) as loader:
        loader.reading_service.load_state_dict(state)
        rest = list(loader)
    assert {*map(len, rest)} <= ({4} if drop_last else {1, 2, 3, 4})
    came = [key for batches in [*(batches for batches, _ in found), rest] for batch in batches for key in batch]
    assert len(came) == len(set(came)) == (len(KEYS) // 4 * 4 if drop_last else len(KEYS))
    for size, drops, message in [
        (3, drop_last, "batches of 2 on each of 2 ranks, but now there are batches of 3 on each of 1"),
        (4, not drop_last, "saved with a different pipeline"),
    ]:
        loader = loader_of(pipeline().batch(size, drop_last=drops), 0)
        loader.reading_service.load_state_dict(state)
        with loader, pytest.raises(StateError, match=message):
            next(iter(loader))


def test_batches_keep_their_size_on_the_same_number_of_ranks() -> None:
    with loader_of(pipeline().batch(2), 0) as loader:
        next(iter(loader))
        state = loader.reading_service.state_dict()
    for workers in (0, 2):
        loader = loader_of(pipeline().batch(4), workers)
        loader.reading_service.load_state_dict(state)
        with loader, pytest.raises(StateError, match="saved with a different pipeline"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda states: states[:1], "one state per rank"),
        (lambda states: states[:1] * 2, "one state per rank"),
        (lambda states: [], "no states"),
    ],
)
def test_incomplete_states_of_ranks_are_refused(spoil: Any, text: str) -> None:
    with loader_of(pipeline(), 0) as loader:
        next(iter(loader))
        (found,) = checkpoints_in(loader.state_dict())
    states = [state_of([replace(found, ranks=2, rank=rank)]) for rank in range(2)]
    assert merge_states(states)
    with pytest.raises(StateError, match=text):
        merge_states(spoil(states))
    with pytest.raises(StateError, match="from different epochs"):
        merge_states([states[0], state_of([replace(found, ranks=2, rank=1, epoch=7)])])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda urls: urls.load_wds_shards().group_samples(), "Put .sharding_filter"),
        (lambda urls: urls.sharding_filter().filter(bool).load_wds_shards().group_samples(), "from Filter"),
        (
            lambda urls: urls.sharding_filter().load_wds_shards().group_samples().rsample(0.5),
            "SampleRsampler records or counts what each worker has read",
        ),
        (
            lambda urls: (
                urls.sharding_filter()
                .load_wds_shards()
                .group_samples()
                .map(tokens_of)
                .pack_samples(4, "tokens", long_samples="split")
            ),
            "SamplePacker records or counts what each worker has read",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_resharded_is_named(make: Any, text: str) -> None:
    pipe = make(ShardList("{0..6}.tar"))
    with loader_of(pipe, 0) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of(pipe, 2) as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match=text):
            next(iter(loader))
