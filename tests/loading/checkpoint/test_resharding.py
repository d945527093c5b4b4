"""States that resume with a different number of ranks or workers: every remaining sample comes exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from loader_kinds import Service, Stateful, Tracked, comparable, items_of
from pipeline_table import EXACT, REPLAYED, SIZES, STREAMS, Pipe, draw, is_even, key_of, packed, shards_of, split

from wds_datapipes import IndexedSamples, ShardList, merge_states
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions
from wds_datapipes.shards.position import Resharding, SamplePosition, assign_shards

shards = shards_of(3)

#: The number of samples in each shard, unless a test says otherwise.
SAMPLES = 3 * sum(SIZES[""])
#: The number of ranks in each run of a chain, and the number of items that each rank takes.
CHAINS = (((1, 2), (4, 1), (2, 1), (2, 0), (1, 2)), ((4, 1), (1, 1), (1, 0), (4, 0), (2, 1)))
#: Pipelines that can be resharded.
RESHARDED: dict[str, Callable[[], Pipe]] = {
    **{
        name: EXACT[name]
        for name in (
            *("keys", "a chain", "random crops", "a shuffle of few bytes", "shards in turn", "all shards in turn"),
            *("records", "records and members", "a mixture of shards in turn", "buckets", "packed rows"),
            *("indexed samples by windows", "indexed samples by length"),
            *("packed indexed samples", "a stage that holds samples back"),
        )
    },
    "in order": split,
    "two buffers": lambda: split().shuffle_samples(50).filter(is_even).shuffle_samples(3),
    "a mixture in a mixture": lambda: split().mix_samples(
        split("a").mix_samples(split("b"), weights=[2, 1], stop="all"), stop="all"
    ),
    "padded samples of an index": lambda: IndexedSamples("{0..5}.tar", global_batch_size=4, remainder="pad"),
    "padded samples of an index in lanes": lambda: IndexedSamples(
        "{0..5}.tar", global_batch_size=12, lanes=6, remainder="pad"
    ),
    "kept samples of an index": lambda: IndexedSamples(
        "{0..5}.tar", global_batch_size=4, remainder="keep"
    ).shuffle_samples(4),
    "an indexed mixture": lambda: IndexedSamples(
        {"a": "a{0..3}.tar", "b": "b{0..1}.tar"},
        weights={"a": 2, "b": 1},
        global_batch_size=4,
        epoch=EpochOptions(samples=24),
    ).shuffle_samples(4),
    "branches of indexes": lambda: (
        IndexedSamples("a{0..3}.tar", global_batch_size=4)
        .mix_samples(IndexedSamples("b{0..1}.tar", global_batch_size=4).shuffle_samples(3), stop="all")
        .shuffle_samples(3)
    ),
    "selected indexed samples": lambda: IndexedSamples(
        "{0..5}.tar", global_batch_size=4, select=slice(1, None, 2)
    ).shuffle_samples(3),
}


def keys_in(item: Any) -> Iterator[str]:
    """Yield the keys of an item, which may be a sample, a tuple or a batch; those of padding are left out."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict):
        if not item.get("__padding__"):
            yield from keys_in(item["__key__"])
    elif isinstance(item, tuple):
        yield from keys_in(item[0])
    else:
        for each in item:
            yield from keys_in(each)


def bag(items: Iterable[Any]) -> Counter[str]:
    return Counter(key for item in items for key in keys_in(item))


def of_rank(build: Callable[[], Pipe], rank: int, ranks: int, state: Any = None) -> Tracked:
    return Tracked(build, 0, state, distributed=(rank, ranks) if ranks > 1 else None)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", RESHARDED)
def test_a_chain_of_runs_yields_each_sample_once_after_any_number_of_reshardings(name: str, chain: Any) -> None:
    build = RESHARDED[name]
    came, whole, states = Counter[str](), Counter[str](), list[Any]()
    expected: list[Any] = []
    for ranks, count in (*chain, (1, 0)):
        merged = merge_states(states) if states else None
        states, rests, following = [], [], Counter[str]()
        for rank in range(ranks):
            run = of_rank(build, rank, ranks, merged)
            epoch = run.epoch()
            head = list(itertools.islice(epoch, count))
            states.append(run.state())
            rests.append(list(epoch))
            if len(expected) == ranks:  # the same number of ranks resumes exactly
                assert comparable([*head, *rests[-1]]) == expected[rank]
            came += bag(head)
            following += bag(run.epoch())
        left = bag(itertools.chain(*rests))
        whole = whole or came + left
        assert came + left == whole
        assert following.total() == whole.total()  # the next epoch is split as usual
        expected = [comparable(rest) for rest in rests]
    assert whole.total() > 10


@pytest.mark.parametrize(
    "chain",
    [
        [(Service, 2), (Tracked, 3), (Stateful, 1), (Service, 0)],
        [(Stateful, 0), (Service, 3), (Tracked, 2), (Stateful, 3)],
        [(Tracked, 3), (Stateful, 2), (Service, 2), (Tracked, 1)],
    ],
)
@pytest.mark.parametrize("name", ["keys", "a mixture in a mixture", "indexed samples by windows"])
def test_an_epoch_is_resharded_from_loader_to_loader(chain: list[tuple[Any, int]], name: str) -> None:
    came, whole, rest = Counter[str](), Counter[str](), list[Any]()
    state, before = None, -1
    for kind, workers in chain:
        new = Tracked if kind is Stateful and state is not None else kind  # its own method accepts only its own states
        with closing(new(RESHARDED[name], workers, None if state is None else merge_states([state]))) as run:
            epoch = run.epoch()
            head = list(itertools.islice(epoch, 3))
            state = run.state()
            left = list(epoch)
            if workers == before:
                assert comparable([*head, *left]) == comparable(rest)
            rest, came = left, came + bag(head)
            whole = whole or came + bag(rest)
            assert came + bag(rest) == whole
            assert bag(run.epoch()).total() == whole.total()
        before = workers


def test_the_rest_of_an_open_shard_is_assigned_before_single_samples() -> None:
    """An instance with the rest of an open shard, of unknown size, gets no other shards if others can take them."""
    held = [SamplePosition(0, 0, 5000), SamplePosition(1, 0, 5000)]
    shares = [share for share, _ in assign_shards(Resharding([{"next": [2, 512, "k"]}], lambda _: held, 3, range(3)))]
    assert [share.pieces for share in shares] == [{2: [(512, -1)]}, {0: [(0, 5000)]}, {1: [(0, 5000)]}]


def test_resharding_draws_nothing_in_the_main_process() -> None:
    with closing(Service(EXACT["keys"], 2)) as run:
        came = list(itertools.islice(run.epoch(), 9))
        state = run.state()
    with closing(Service(EXACT["keys"], 1)) as run:
        before = torch.get_rng_state()
        run.loader.load_state_dict(state)
        assert (bag(came) + bag(run.epoch())).total() == SAMPLES
        assert torch.equal(torch.get_rng_state(), before)


def test_a_drawn_number_is_the_same_on_other_workers() -> None:
    def build() -> Pipe:
        return split().shuffle_samples(5).map_samples_with_rng(draw).to_tuple("__key__", "drawn")

    with closing(Service(build, 2)) as run:
        epoch = run.epoch()
        head = list(itertools.islice(epoch, 7))
        state, whole = run.state(), sorted([*head, *epoch])
    with closing(Service(build, 3, state)) as run:
        assert sorted([*head, *run.epoch()]) == whole


def test_a_state_between_two_epochs_begins_that_of_any_number_of_workers() -> None:
    with closing(Service(EXACT["keys"], 2)) as run:
        items_of(run.epoch())
        state = run.state()
    with closing(Service(EXACT["keys"], 3)) as run:
        items_of(run.epoch())
        expected = items_of(run.epoch())
    with closing(Service(EXACT["keys"], 3, state)) as run:
        assert items_of(run.epoch()) == expected


def test_a_state_does_not_grow_with_each_resharding() -> None:
    """A state that contained the history of its epoch would grow."""
    sizes, states = list[int](), list[Any]()
    for number in range(16):
        ranks, merged = (2, 4)[number % 2], merge_states(states) if states else None
        runs = [of_rank(RESHARDED["in order"], rank, ranks, merged) for rank in range(ranks)]
        for run in runs:
            next(run.epoch(), None)
        states = [run.state() for run in runs]
        sizes.append(len(str(merge_states(states))))
    assert max(sizes[-4:]) <= max(sizes[:4])


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_may_be_larger_on_fewer_ranks(drop_last: bool) -> None:
    def build(size: int, drops: bool = drop_last) -> Any:
        return lambda: split().shuffle_samples(5).map(key_of).batch(size, drop_last=drops)

    runs = [of_rank(build(2), rank, 2) for rank in range(2)]
    came = [batch for run in runs for batch in itertools.islice(run.epoch(), 2)]
    state = merge_states([run.state() for run in runs])
    rest = list(of_rank(build(4), 0, 1, state).epoch())
    assert {*map(len, rest)} <= ({4} if drop_last else {1, 2, 3, 4})
    found = bag([*came, *rest])
    assert found.total() == len(found) == (SAMPLES // 4 * 4 if drop_last else SAMPLES)
    with pytest.raises(StateError, match="saved with a different pipeline"):
        next(of_rank(build(4, not drop_last), 0, 1, state).epoch())
    with closing(of_rank(build(2), 0, 1)) as one:  # and keep their size on the same number of ranks
        next(one.epoch())
        state = one.state()
    for workers in (0, 2):
        with (
            closing(Service(build(4), workers, state)) as service,
            pytest.raises(StateError, match="different pipeline"),
        ):
            next(service.epoch())


def test_states_of_some_ranks_or_of_different_epochs_are_refused() -> None:
    runs = [of_rank(EXACT["keys"], rank, 2) for rank in range(2)]
    for run in runs:
        next(run.epoch())
    states = [run.state() for run in runs]
    assert merge_states(states)
    for some, text in [(states[:1], "one state per rank"), (states[:1] * 2, "one state per rank"), ([], "no states")]:
        with pytest.raises(StateError, match=text):
            merge_states(some)
    items_of(runs[1].epoch())
    next(runs[1].epoch())
    with pytest.raises(StateError, match="from different epochs"):
        merge_states([states[0], runs[1].state()])
    with closing(Service(EXACT["keys"], 3, states[1])) as alone, pytest.raises(StateError, match="merge_states"):
        next(alone.epoch())


#: Pipelines that only the same number of ranks and workers can resume, and the reason.
FIXED: dict[str, tuple[Callable[[], Pipe], str]] = {
    "not split": (lambda: ShardList("{0..5}.tar").load_wds_shards().group_samples(), "Put .sharding_filter"),
    "filtered shards": (
        lambda: ShardList("{0..5}.tar").sharding_filter().filter(bool).load_wds_shards().group_samples(),
        "from Filter",
    ),
    "drawn samples": (lambda: split().rsample(0.5), "SampleRsampler records or counts what each worker has read"),
    "split samples": (lambda: packed(long_samples="split"), "SamplePacker records or counts what each worker has read"),
    "a mixture up to an end": (
        lambda: split("a").mix_samples(split("b"), stop="first"),
        "SampleMixer records or counts what each worker has read",
    ),
    "a stream": (STREAMS["batches"], "invalid with a different number of ranks or workers"),
    "replayed": (REPLAYED["torch's shuffle"], "Shuffler .*replaying its items, which requires as many"),
}


@pytest.mark.parametrize("kind", [Service, Tracked])
@pytest.mark.parametrize("name", FIXED)
def test_a_pipeline_that_cannot_be_resharded_is_named(name: str, kind: Any) -> None:
    build, message = FIXED[name]
    with closing(kind(build, 2)) as run:
        next(run.epoch())
        state = merge_states([run.state()])
    with closing(kind(build, 1, state)) as run, pytest.raises(StateError, match=message):
        next(run.epoch())
