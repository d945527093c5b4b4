"""Global batches of indexed samples are the same on any ranks and workers, even if a run resumes on different ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from loader_kinds import Service, Stateful, Tracked
from numbered_shards import write_numbered
from torch.utils.data import IterDataPipe
from torchdata.dataloader2 import DataLoader2, reading_service
from torchdata.dataloader2.random import SeedGenerator

from wds_datapipes import IndexedSamples, ShardReadingService, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions, Manifest, build_indexes

SIZES = (7, 1, 30, 12, 5, 45)
BATCH = 12


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest(build_indexes(write_numbered(tmp_path_factory.mktemp("shards"), SIZES)))


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"]) + ("+" if sample.get("__padding__") else "")


def pipeline(manifest: Manifest, *, buffer: int = 1, ranks: int = 1, **options: Any) -> IterDataPipe[Any]:
    pipe: Any = IndexedSamples(manifest, global_batch_size=BATCH, **options)
    if buffer > 1:
        pipe = pipe.shuffle_samples(buffer)
    return pipe.map(key_of).batch(BATCH // ranks)  # type: ignore[no-any-return]  # torch's stages carry no types


def service_loader(workers: int, pipe: IterDataPipe[Any]) -> Any:
    loader: Any = DataLoader2(pipe, reading_service=ShardReadingService(num_workers=workers))
    loader.seed(3)
    return loader


@pytest.mark.parametrize(("remainder", "lanes"), [("drop", 1), ("pad", 1), ("keep", 1), ("drop", 4), ("pad", 6)])
def test_a_run_with_unreadable_samples_resumes_with_any_number_of_workers(
    tmp_path: Path, remainder: str, lanes: int
) -> None:
    damaged = Manifest(build_indexes(write_numbered(tmp_path, [20] * 4)))
    os.truncate(tmp_path / "1.tar", 100)

    def loader(workers: int) -> Any:
        return service_loader(workers, pipeline(damaged, remainder=remainder, lanes=lanes, on_error="skip"))

    with loader(0) as whole_loader:
        whole = list(chain.from_iterable(whole_loader))
    assert len(whole) == {"drop": 72, "pad": 84, "keep": 60}[remainder]
    assert remainder == "drop" or sum(not key.endswith("+") for key in whole) == 60
    for workers, cut, later in ((0, 2, 2), (2, 1, 3)) if lanes > 1 else ((0, 2, 3), (2, 3, 0)):
        with loader(workers) as first:
            iterator = iter(first)
            found = list(chain.from_iterable(next(iterator) for _ in range(cut)))
            state = first.state_dict()
        with loader(later) as second:
            second.load_state_dict(merge_states([state]))
            found += chain.from_iterable(second)
        assert sorted(found) == sorted(whole)
        assert found == whole or remainder == "keep"


def test_ranks_of_torchdata_read_one_order(manifest: Manifest) -> None:
    orders = []
    for rank in range(2):
        pipe: Any = pipeline(manifest)
        reading_service.set_graph_random_seed(pipe, SeedGenerator(3).spawn(rank))  # as DistributedReadingService does
        orders.append(list(pipe))
    assert orders[0] == orders[1]


def on_ranks(
    kind: Any, build: Callable[[int], Any], ranks: int, workers: int, cut: int | None, state: Any = None
) -> tuple[list[list[str]], list[Any]]:
    """Return the first global batches of a run, all if ``cut`` is None, and the state of each rank after them."""
    by_rank, states = list[list[Any]](), list[Any]()
    for rank in range(ranks):
        with closing(kind(lambda: build(ranks), workers, state, distributed=(rank, ranks))) as run:
            items = run.epoch()
            by_rank.append([*islice(items, cut)])
            states.append(run.state())
    return [[*chain.from_iterable(parts)] for parts in zip(*by_rank, strict=True)], states


@pytest.mark.parametrize(
    ("kind", "workers", "remainder", "lanes"),
    [
        *product([Tracked], [0], ["drop", "pad", "keep"], [1]),
        *((Service, 0, "pad", 1), (Service, 2, "keep", 1), (Tracked, 2, "drop", 1)),
        *((Stateful, 0, "keep", 1), (Stateful, 2, "pad", 1)),
        *((Tracked, 0, "pad", 3), (Service, 2, "drop", 12), (Tracked, 0, "keep", 4)),
    ],
)
def test_the_state_of_one_rank_resumes_all_ranks_of_any_run(
    manifest: Manifest, kind: Any, workers: int, remainder: str, lanes: int
) -> None:
    def build(ranks: int) -> Any:
        return pipeline(manifest, ranks=ranks, remainder=remainder, lanes=lanes)

    whole, ended = on_ranks(Tracked, build, 1, 0, None)
    following, _ = on_ranks(Tracked, build, 1, 0, None, ended[0])
    for cut in (3, None) if workers else (0, 3, len(whole) - 1, None):
        head, states = on_ranks(kind, build, 2, workers, cut)
        assert head == whole[:cut]
        assert merge_states(states[:1]) == merge_states(states[1:]) == merge_states(states)
        left = following if cut is None else whole[cut:]
        for other, ranks, others in ((Tracked, 4, 0), (Service, 1, 3), (Service, 2, workers)):
            rest, again = on_ranks(other, build, ranks, others, 1, states[-1])
            assert rest == left[:1]
            assert len({*map(str, again)}) == 1
        assert on_ranks(Tracked, build, 4, 0, None, merge_states([states[1], states[0]]))[0] == left


def test_a_state_after_the_last_whole_batch_is_that_of_a_rank_if_some_get_a_sample_more(manifest: Manifest) -> None:
    def build(ranks: int) -> Any:
        return pipeline(manifest, ranks=ranks, remainder="keep")

    whole, states = on_ranks(Tracked, build, 3, 0, None)
    assert [len(batch) for batch in whole] == [BATCH] * 8 + [4]
    with pytest.raises(StateError, match=naming("rank 0 of 3", "rank 1 of 3")):
        Tracked(lambda: build(3), 0, states[0], distributed=(1, 3))
    merged = merge_states(states)
    assert on_ranks(Tracked, build, 1, 0, 2, merged)[0] == on_ranks(Tracked, build, 3, 0, 2, merged)[0]


def resume(run: Any) -> None:
    with closing(run):
        next(run.epoch())


#: Stages after which the states of ranks differ.
OF_RANK: dict[str, Callable[[Any], Any]] = {
    ".shuffle_samples() has a different state on each": lambda pipe: pipe.shuffle_samples(9),
    ".filter() may yield fewer items": lambda pipe: pipe.filter(bool),
    ".map_samples() may yield fewer items": lambda pipe: pipe.map_samples(dict),
    ".wds_decode() may yield fewer items": lambda pipe: pipe.wds_decode(on_error="skip"),
    ".rsample() has a different state on each": lambda pipe: pipe.rsample(0.9),
    "EpochSetter has a different position on each": lambda pipe: pipe.with_epoch(20),
    "Shuffler has no position": lambda pipe: pipe.shuffle(buffer_size=4),
}


@pytest.mark.parametrize("reason", OF_RANK)
@pytest.mark.parametrize("kind", [Service, Tracked])
def test_a_stage_that_makes_the_states_of_ranks_differ_is_named(manifest: Manifest, kind: Any, reason: str) -> None:
    def build() -> Any:
        return OF_RANK[reason](IndexedSamples(manifest, global_batch_size=BATCH))

    with closing(kind(build, 0, distributed=(0, 2))) as run:
        next(run.epoch())
        state = run.state()
    with pytest.raises(StateError, match=naming("rank 0 of 2", "rank 1 of 2", reason)):
        resume(kind(build, 0, state, distributed=(1, 2)))
    with pytest.raises(StateError, match=naming("one state per rank", "merge_states", reason)):
        resume(kind(build, 2, state, distributed=(0, 2)))


@pytest.mark.parametrize("gone", ["excluded", "unreadable"])
@pytest.mark.parametrize(("kind", "workers"), [(Tracked, 0), (Service, 2), (Stateful, 2)])
def test_ranks_that_leave_samples_out_have_states_of_their_own(
    tmp_path: Path, gone: str, kind: Any, workers: int
) -> None:
    """All of them are in the parts of rank 1 of the first batches."""
    damaged = Manifest(build_indexes(write_numbered(tmp_path, [6, 6, 6, 18, 12])))
    every, options = keys_in(damaged), dict[str, Any](remainder="keep", order="sequential")
    if gone == "excluded":
        options["epoch"] = EpochOptions(exclude=[key for key in every if key.startswith(("1-", "3-"))])
    else:
        options["on_error"] = "skip"
        for shard in (1, 3):
            os.truncate(tmp_path / f"{shard}.tar", 100)

    def build(ranks: int) -> Any:
        return pipeline(damaged, ranks=ranks, **options)

    whole = {key for key in every if not key.startswith(("1-", "3-"))}
    came, states = on_ranks(kind, build, 2, workers, 1)
    for state in states if workers else states[:1]:
        with pytest.raises(StateError, match=naming("own state", "IndexedSamples")):
            on_ranks(kind, build, 2, workers, None, state)
    merged = merge_states(states)
    for ranks, other in ((2, workers), (1, 0), (3, 2)):
        kind_of_rest = kind if (ranks, other) == (2, workers) and kind is not Stateful else Tracked
        rest = [
            [*chain.from_iterable(on_rank(kind_of_rest, build, rank, ranks, other, merged))] for rank in range(ranks)
        ]
        assert sorted(chain(*came, *rest)) == sorted(whole)


def keys_in(manifest: Manifest) -> list[str]:
    return [str(sample["__key__"]) for sample in IndexedSamples(manifest, order="sequential", remainder="keep")]


def on_rank(kind: Any, build: Callable[[int], Any], rank: int, ranks: int, workers: int, state: Any) -> list[Any]:
    """Return the batches of a rank, which may have more than others."""
    with closing(kind(lambda: build(ranks), workers, state, distributed=(rank, ranks))) as run:
        return [*run.epoch()]


@pytest.mark.parametrize(("kind", "workers"), [(Service, 0), (Service, 2), (Tracked, 0), (Tracked, 2), (Stateful, 2)])
def test_each_epoch_is_the_same_for_one_process_and_for_any_ranks(manifest: Manifest, kind: Any, workers: int) -> None:
    """The second epoch is cut in a run without ranks, which ends on two."""

    def epochs(ranks: int, distributed: bool = True, state: Any = None, kind: Any = kind) -> list[list[list[str]]]:
        of_ranks = list[list[Any]]()
        for rank in range(ranks):
            options: Any = {"distributed": (rank, ranks)} if distributed else {}
            with closing(kind(lambda: pipeline(manifest, ranks=ranks), workers, state, **options)) as run:
                of_ranks.append([[*run.epoch()] for _ in range(3)])
        return [
            [[*chain.from_iterable(each)] for each in zip(*parts, strict=True)] for parts in zip(*of_ranks, strict=True)
        ]

    whole = epochs(1, distributed=False)
    assert epochs(1) == epochs(2) == whole
    with closing(kind(lambda: pipeline(manifest), workers)) as run:
        assert [*run.epoch()] == whole[0]
        assert [*islice(run.epoch(), 2)] == whole[1][:2]
        state = run.state()
    for ranks in (1, 2):
        resumed = epochs(ranks, state=state, kind=Tracked if kind is Stateful and ranks > 1 else kind)
        assert resumed[:2] == [whole[1][2:], whole[2]]
