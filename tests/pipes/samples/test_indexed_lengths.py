"""`IndexedSamples(bucket_by=)`: global batches of samples of similar length."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_parallel_pipelines import open_service
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes import IndexedSamples
from wds_datapipes.errors import StateError
from wds_datapipes.index import EpochOptions, ShardIndex, build_indexes
from wds_datapipes.testing import build_shard

SIZES = (7, 1, 30, 12, 5, 45)
BATCH = 6


@pytest.fixture(autouse=True)
def lengths(folder: Path) -> list[int]:
    """Write shards; return the length of each sample."""
    rng = np.random.default_rng(0)
    found = []
    for shard, size in enumerate(SIZES):
        own = rng.integers(1, 200, size).tolist()
        build_shard(f"{shard}.tar", [{"__key__": f"{shard}-{n:02}", "txt": "x" * own[n]} for n in range(size)])
        found += own
    build_indexes("{0..5}.tar")
    return found


def text_sizes(index: ShardIndex) -> Any:
    return index.columns["member_sizes"]


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["txt"])


def loader_of(pipe: Any, workers: int = 0, batch: int = BATCH) -> Any:
    return open_service(pipe.map(length_of).batch(batch), workers)


def padding(batches: list[list[int]]) -> float:
    return sum(max(batch) * len(batch) - sum(batch) for batch in batches) / sum(map(sum, batches))


@pytest.mark.parametrize(("order", "lanes"), [("global", 1), ("window", 1), ("window", 2)])
def test_batches_need_less_padding_and_have_each_sample_once(order: Any, lanes: int, lengths: list[int]) -> None:
    common: dict[str, Any] = {"global_batch_size": BATCH, "remainder": "keep", "order": order, "lanes": lanes}
    plain, grouped = (
        list(loader_of(IndexedSamples("{0..5}.tar", **common, **options)))
        for options in (dict[str, Any](), {"epoch": EpochOptions(bucket_by=text_sizes)})
    )
    assert sorted(length for batch in grouped for length in batch) == sorted(lengths)
    assert [len(batch) for batch in plain] == [len(batch) for batch in grouped]
    assert padding(grouped) < padding(plain) / 4
    assert [batch[0] for batch in grouped] != sorted(batch[0] for batch in grouped)


@pytest.mark.parametrize("by", ["array", "function", "selected"])
def test_lengths_come_from_an_array_or_a_function_of_each_index(by: str, lengths: list[int]) -> None:
    options = {
        "array": dict[str, Any](epoch=EpochOptions(bucket_by=lengths, bucket_window=4)),
        "function": {"epoch": EpochOptions(bucket_by=text_sizes, bucket_window=4)},
        "selected": {"epoch": EpochOptions(bucket_by=text_sizes, bucket_window=4), "select": slice(3, None, 2)},
    }[by]
    pipe = IndexedSamples("{0..5}.tar", global_batch_size=BATCH, order="sequential", **options)
    expected = lengths[3::2] if by == "selected" else lengths
    found = [len(sample["txt"]) for sample in pipe]
    assert len(found) == len(expected) // BATCH * BATCH
    for start in range(0, len(found), 4 * BATCH):
        assert found[start : start + 4 * BATCH] == sorted(expected[: len(found)][start : start + 4 * BATCH])


def test_a_mixture_has_lengths_in_the_order_of_its_shards(lengths: list[int]) -> None:
    datasets = {"few": ["0.tar", "1.tar"], "many": "{2..5}.tar"}
    pipe = IndexedSamples(
        datasets, weights={"few": 1, "many": 2}, global_batch_size=BATCH, epoch=EpochOptions(bucket_by=lengths)
    )
    batches = list(loader_of(pipe))
    assert all(batch == sorted(batch) for batch in batches)
    assert len(batches) == len(lengths) // BATCH


def test_a_state_belongs_to_its_lengths_and_options(lengths: list[int]) -> None:
    def loader(lanes: int, **options: Any) -> Any:
        epoch = EpochOptions(**options)
        return loader_of(IndexedSamples("{0..5}.tar", global_batch_size=BATCH, lanes=lanes, epoch=epoch))

    with loader(1, bucket_by=lengths) as first:
        next(iter(first))
        state = first.state_dict()
    for lanes, options in (
        (1, {"bucket_by": lengths[::-1]}),
        (1, {"bucket_by": lengths, "bucket_window": 3}),
        (2, {"bucket_by": lengths}),
    ):
        with (
            loader(lanes, **options) as other,
            pytest.raises(StateError, match=r"with a different pipeline.*IndexedSamples"),
        ):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([1] * 99, ValueError, r"100 lengths, one per sample of the dataset, not the shape \(99,\)"),
        ([1.5] * 100, TypeError, "integers as lengths, not float64"),
        ([1] * 99 + [-3], ValueError, "the length -3 for the sample 99 of the dataset"),
        (len, ValueError, r"7 lengths, one per sample of .*0\.tar, not the shape \(\)"),
    ],
)
def test_wrong_lengths_are_errors(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        IndexedSamples("{0..5}.tar", global_batch_size=2, epoch=EpochOptions(bucket_by=wrong))
    with pytest.raises(ValueError, match=r"bucket_by .* needs a global_batch_size"):
        IndexedSamples("{0..5}.tar", epoch=EpochOptions(bucket_by=[1] * 100))


@pytest.mark.parametrize(
    ("lanes", "ranks", "advice"), [(1, 32, "lanes=1,.* sorts about 256 samples .* lanes=32"), (32, 32, "")]
)
def test_a_worker_that_sorts_for_many_others_warns(lanes: int, ranks: int, advice: str) -> None:
    pipe = IndexedSamples("{0..5}.tar", global_batch_size=32, lanes=lanes, epoch=EpochOptions(bucket_by=text_sizes))
    pipe.apply_sharding(ranks, 0, SHARDING_PRIORITIES.DISTRIBUTED)
    pipe.apply_sharding(8, 0, SHARDING_PRIORITIES.MULTIPROCESSING)
    with pytest.warns(UserWarning, match=advice) if advice else nullcontext():
        next(iter(pipe))
