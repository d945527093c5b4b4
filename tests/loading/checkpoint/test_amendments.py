"""A run may change anything that no position depends on; an error names what it may not change."""

from __future__ import annotations

from typing import Any

import pytest
from data_parallel_pipelines import open_service
from numbered_shards import key_of, numbered_shards
from torchdata.stateful_dataloader import StatefulDataLoader

from wds_datapipes import IndexedSamples, ShardList, StatefulShards
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions, Pack, build_indexes
from wds_datapipes.loading.checkpoint.format import checkpoints_in

KEYS = sorted(f"{shard}-{n}" for shard in range(6) for n in range(8))


shards = numbered_shards([8] * 6)


def marked(sample: Any) -> str:
    return f"{sample['__key__']}!"


def is_wanted(sample: Any) -> bool:
    return bool(sample["cls"] != b"7")


def stream(pattern: str = "{0..5}.tar", buffer: int = 5) -> Any:
    pipe = ShardList(pattern).shuffle().sharding_filter().load_wds_shards().group_samples()
    return pipe.shuffle_samples(buffer)


def begun(loader: Any, count: int) -> tuple[Any, list[str]]:
    """Return the state after some batches, and their items."""
    items = iter(loader)
    found = [next(items) for _ in range(count)]
    return loader.state_dict(), [key for batch in found for key in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_filters_and_batches_of_a_stream_may_change(workers: int) -> None:
    with open_service(stream().map(key_of).batch(3), workers) as loader:
        state, before = begun(loader, 4)
    changed = stream().filter(is_wanted).map(marked).batch(2)
    with open_service(changed, workers) as loader:
        with pytest.raises(StateError, match=r"stage 1 was Mapper.* stage 2 was absent, and .*amend=True\), or remove"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, amend=True)
        after = [key for batch in loader for key in batch]
        [saved] = checkpoints_in(loader.state_dict())
        loader.seed(2)
        assert not checkpoints_in(loader.state_dict())[0].phases, "another run begins"
    assert all(key[-1] == "!" for key in after)
    assert sorted([*before, *(key[:-1] for key in after)]) == sorted(
        key for key in KEYS if key in before or key[-1] != "7"
    )
    [phase] = saved.phases
    assert phase["epoch"] == 0
    assert len(phase["changes"]) == 3


@pytest.mark.parametrize(
    ("first", "changed"),
    [
        (lambda: stream().map(key_of).batch(3), lambda: stream().filter(is_wanted).map(marked).batch(2)),
        (lambda: indexed("{0..5}.tar"), lambda: indexed("{0..5}.tar").map(str)),
    ],
    ids=["stream", "index"],
)
@pytest.mark.parametrize("kind", ["DataLoader2", "service", "StatefulShards"])
def test_a_state_that_is_saved_before_the_first_item_is_that_of_the_changed_run(
    kind: str, first: Any, changed: Any
) -> None:
    with open_service(first(), 0) as loader:
        state, _ = begun(loader, 3)

    def load(state: Any, *, amend: bool) -> tuple[Any, list[Any]]:
        if kind == "StatefulShards":
            data = StatefulShards(changed(), seed=7)
            data.load_state_dict(state, amend=amend)
            return data.state_dict(), list(data)
        with open_service(changed(), 0) as loader:
            (loader if kind == "DataLoader2" else loader.reading_service).load_state_dict(state, amend=amend)
            return loader.state_dict(), list(loader)

    saved, items = load(state, amend=True)
    assert checkpoints_in(saved)[0].phases[-1]["changes"]
    again, same = load(saved, amend=False)
    assert same == items
    assert again == saved


def test_weights_of_mixed_streams_may_change() -> None:
    def mixed(weights: list[int]) -> Any:
        return stream("{0..2}.tar").mix_samples(stream("{3..5}.tar"), weights=weights, stop="all").map(key_of).batch(2)

    state, before = begun(StatefulShards(mixed([1, 1])), 5)
    data = StatefulShards(mixed([1, 9]))
    data.load_state_dict(state, amend=True)
    after = [key for batch in data for key in batch]
    assert sorted(before + after) == KEYS
    assert sum(key[0] in "345" for key in after[:10]) > 6


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda: stream(), lambda: stream(buffer=6), r"was SampleShuffler\(.*5.*, and is SampleShuffler\(.*6"),
        (lambda: stream(), lambda: stream("{0..4}.tar"), r"was ShardList\(.*, and is ShardList\("),
        (lambda: stream().batch(2).unbatch(), lambda: stream().batch(3).unbatch(), "stage 3 was BatcherIter"),
        (
            lambda: IndexedSamples("{0..5}.tar", order="window"),
            lambda: IndexedSamples("{0..5}.tar", order="window", epoch=EpochOptions(window_shards=2)),
            "epoch=EpochOptions",
        ),
    ],
)
def test_settings_that_positions_depend_on_may_not_change(first: Any, second: Any, message: str) -> None:
    state, _ = begun(StatefulShards(first().map(str).batch(4)), 2)
    with pytest.raises(StateError, match=f"{message}.* saved with, or remove the checkpoint to start over$"):
        StatefulShards(second().map(str).batch(4)).load_state_dict(state, amend=True)


def indexed(shards: Any, weights: Any = None, batch: int = 4, **options: Any) -> Any:
    return IndexedSamples(shards, weights=weights, global_batch_size=batch, **options).map(key_of).batch(batch)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda: indexed("{0..3}.tar"),
            lambda: indexed("{0..2}.tar"),
            "the dataset had 32 samples in 4 shards .* the first 4 of 3 shards",
        ),
        (lambda: indexed("{0..3}.tar"), lambda: indexed("{0,1,2,4}.tar"), "now has others in the first 4 of 4 shards"),
        (
            lambda: indexed("{0..3}.tar"),
            lambda: indexed("{0..3}.tar", select=slice(0, None, 2)),
            "the dataset had 32 samples",
        ),
        (
            lambda: indexed({"a": "{0..3}.tar", "b": "4.tar"}),
            lambda: indexed({"a": "{0..3}.tar"}),
            "'b' has samples in the rest of this epoch and can be removed at its end",
        ),
        (
            lambda: indexed({"a": "{0..3}.tar"}),
            lambda: indexed({"a": "{0..3}.tar"}, {"a": 1}),
            "the run has epochs with each sample once, and a change to weights would repeat samples",
        ),
        (
            lambda: indexed("{0..3}.tar", epoch=EpochOptions(bucket_by=lambda index: [1] * len(index))),
            lambda: indexed("{0..4}.tar", epoch=EpochOptions(bucket_by=lambda index: [1] * len(index))),
            "with bucket_by or pack, only at the end of an epoch",
        ),
    ],
)
def test_a_change_that_repeats_or_loses_samples_is_refused(first: Any, second: Any, message: str) -> None:
    state, _ = begun(StatefulShards(first()), 2)
    with pytest.raises(StateError, match=message):
        StatefulShards(second()).load_state_dict(state, amend=True)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_by": lambda index: index.columns["size"]},
        {"pack": Pack(length="size", row=9)},
        {"pack": Pack(length=[1] * 32, row=2, cost="size")},
        {"pack": Pack(length=[1] * 32, row=9, second=("size", 9))},
    ],
)
def test_columns_by_which_samples_are_placed_may_not_change(options: Any) -> None:
    def data(places: list[int]) -> Any:
        build_indexes("{0..3}.tar", columns=lambda sample: {"size": places[int(sample["cls"])]}, progress=False)
        pipe: Any = IndexedSamples("{0..3}.tar", global_batch_size=3, epoch=EpochOptions(**options))
        if "pack" in options:
            pipe = pipe.map_samples(lambda _: {"tokens": [1]}).pack_rows("tokens")
        return StatefulShards(pipe.map(key_of).batch(3))

    state, _ = begun(data([2, 4, 6, 8] * 2), 2)
    data([2, 4, 6, 8] * 2).load_state_dict(state, amend=True)
    with pytest.raises(StateError, match="or other columns for bucket_by or pack"):
        data([4, 2, 8, 6] * 2).load_state_dict(state, amend=True)


def test_a_dataset_without_weights_grows_at_the_next_epoch() -> None:
    first, data = StatefulShards(indexed("{0..2}.tar")), StatefulShards(indexed("{0..3}.tar"))
    state, before = begun(first, 2)
    data.load_state_dict(state, amend=True)
    assert sorted([*before, *(key for batch in data for key in batch)]) == KEYS[:24]
    assert sorted(key for batch in data for key in batch) == KEYS[:32]
    again = StatefulShards(indexed("{0..3}.tar"))
    again.load_state_dict(data.state_dict())
    assert sorted(key for batch in again for key in batch) == KEYS[:32]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_continues_the_phases_of_a_run(workers: int) -> None:
    first = {"a": "{0..2}.tar", "b": "{3..5}.tar"}

    def loader(weights: Any) -> tuple[Any, Any]:
        data = StatefulShards(indexed(first, weights), seed=4)
        return data, StatefulDataLoader(data, batch_size=None, num_workers=workers)

    state, _ = begun(loader({"a": 1, "b": 1})[1], 2)
    data, amended = loader({"a": 3, "b": 1})
    data.load_state_dict(state, amend=True)
    items = iter(amended)
    _, state = [next(items) for _ in range(2)], amended.state_dict()
    expected = [[*items], [*amended]]
    _, resumed = loader({"a": 3, "b": 1})
    resumed.load_state_dict(state)
    assert [[*resumed] for _ in range(2)] == expected


@pytest.mark.parametrize("count", [2, 3, 5])
def test_batches_of_another_size_follow_alike_with_any_number_of_workers(count: int) -> None:
    def continued(workers: int) -> tuple[list[str], list[list[str]]]:
        with open_service(indexed("{0..5}.tar"), workers) as loader:
            state, before = begun(loader, count)
        with open_service(indexed("{0..5}.tar", batch=6), workers) as loader:
            loader.load_state_dict(state, amend=True)
            return before, list(loader)

    before, batches = continued(0)
    found = [*before, *(key for batch in batches for key in batch)]
    assert len(KEYS) - 6 < len(set(found)) == len(found)
    assert {len(batch) for batch in batches} == {6}
    for workers in (2, 3):
        assert continued(workers) == (before, batches)
