"""What webdataset's tests pin of the stages that select, change, shuffle and batch samples.

The numbers in the names are explained in `contract.md`.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from webdataset.filters import default_collation_fn

from wds_datapipes import MockSamples, ShardList
from wds_datapipes.errors import DuplicateKeyError, EmptySourceError, MissingFieldError
from wds_datapipes.testing import build_shard

COUNT = 47
SKIP = webdataset.ignore_and_continue


@pytest.fixture(autouse=True)
def shard(folder: Path) -> None:
    """A small version of the shard that most of webdataset's tests read."""
    build_shard(
        "digits.tar",
        [
            {"__key__": f"{n:03}", "png": bytes([n] * 12), "cls": f"{n}", "wnid": f"n{n:08}", "xml": "<a/>"}
            for n in range(COUNT)
        ],
    )


def theirs() -> Any:
    return webdataset.WebDataset("digits.tar", shardshuffle=False)


def ours() -> IterDataPipe[dict[str, Any]]:
    pipe: IterDataPipe[dict[str, Any]] = ShardList("digits.tar").load_wds_shards().group_samples()
    return pipe


def run(stage: Any, items: Iterable[Any]) -> list[Any]:
    """Run a stage of webdataset over items that are not in a shard."""
    return list(stage(iter(items)))


def fields(sample: dict[str, Any]) -> set[str]:
    return {name for name in sample if not name.startswith("__")}


# sources and functions


def plus_one(value: int) -> int:
    return value + 1


def doubled(source: Iterator[int]) -> Iterator[int]:
    for value in source:
        yield 2 * value


def test_01_a_pipeline_of_anything_takes_functions_of_items_and_of_streams() -> None:
    got = list(IterableWrapper([1, 2, 3, 4]).map_samples(plus_one).compose(doubled))
    assert got == [4, 6, 8, 10]
    assert got == list(webdataset.DataPipeline(lambda: iter([1, 2, 3, 4]), webdataset.map(plus_one), doubled))


def test_15_mock_samples_have_a_length_and_a_content() -> None:
    sample = {"__key__": "a", "cls": 3}
    assert list(MockSamples(sample, 5)) == list(webdataset.MockDataset(sample, 5)) == [sample] * 5


def keys(sample: dict[str, Any]) -> list[str]:
    return sorted(sample)


def fail(value: Any) -> None:
    raise ValueError("on purpose")


def test_24_functions_get_samples_or_fields_and_their_errors_arrive() -> None:
    got = list(ours().map_samples(keys))
    assert got[0] == ["__key__", "__local_path__", "__url__", "cls", "png", "wnid", "xml"]
    assert got == list(theirs().map(keys))
    for pipe in (ours().map_samples(fail), theirs().map(fail), ours().map_dict(cls=fail), theirs().map_dict(cls=fail)):
        with pytest.raises(ValueError, match="on purpose"):
            list(pipe)
    with pytest.raises(KeyError):
        list(theirs().map_dict(missing=len))
    with pytest.raises(MissingFieldError, match=r"'missing' was requested, but the sample '000' of digits\.tar has"):
        list(ours().map_dict(missing=len))


def even(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["cls"]) % 2:
        raise ValueError("odd")
    return sample


def test_50_a_handler_that_continues_drops_failed_samples() -> None:
    got = list(ours().map_samples(even, on_error=SKIP))
    assert [sample["cls"] for sample in got] == [b"%d" % n for n in range(0, COUNT, 2)]
    assert got == list(theirs().map(even, handler=SKIP)) == list(ours().map_samples(even, on_error="skip"))


# fields


def test_16_fields_are_named_in_one_string_or_by_patterns() -> None:
    got = list(ours().to_tuple("png;jpg cls"))
    assert got == [(bytes([n] * 12), b"%d" % n) for n in range(COUNT)]
    assert got == list(theirs().to_tuple("png;jpg cls"))
    assert got == list(ours().extract_keys("*.png;*.jpg", "*.cls"))
    assert got == list(theirs().extract_keys("*.png;*.jpg", "*.cls"))


def test_20_a_missing_field_is_a_value_error() -> None:
    for pipe in (theirs().to_tuple("none"), theirs().rename(x="none")):
        with pytest.raises(ValueError, match="didn't find"):
            list(pipe)
    for stage in (ours().to_tuple("none"), ours().rename(x="none")):
        with pytest.raises(MissingFieldError, match=r"'none' was requested.*'000' of digits\.tar") as caught:
            list(stage)
        assert isinstance(caught.value, ValueError)


def test_21_fields_get_new_names_and_a_sample_keeps_its_origin() -> None:
    assert {frozenset(sample) for sample in theirs().rename(image="png", keep=False)} == {frozenset({"image"})}
    got = list(ours().rename(image="png", keep=False))
    assert {frozenset(sample) for sample in got} == {frozenset({"__key__", "__url__", "__local_path__", "image"})}
    got = list(ours().rename(image="png;jpg", cls="cls"))
    assert fields(got[0]) == {"cls", "image", "wnid", "xml"}
    assert got == list(theirs().rename(image="png;jpg", cls="cls"))


def test_22_fields_that_match_a_pattern_get_new_names() -> None:
    got = list(ours().rename_keys(image="png", keep_unselected=True))
    assert [fields(sample) for sample in got] == [{"cls", "image", "wnid", "xml"}] * COUNT
    assert got == list(theirs().rename_keys(image="png", keep_unselected=True))


def test_48_every_pattern_must_match_and_a_key_stays() -> None:
    sample = {"__key__": "a", "old_key": 1, "other": 2}
    assert run(webdataset.rename_keys(new_key="old_key"), [sample]) == [{"new_key": 1}]
    assert list(IterableWrapper([sample]).rename_keys(new_key="old_key")) == [{"__key__": "a", "new_key": 1}]
    with pytest.raises(ValueError, match="Not all patterns"):
        run(webdataset.rename_keys(new_key="none"), [sample])
    with pytest.raises(MissingFieldError, match="matches 'none' to rename to 'new_key'"):
        list(IterableWrapper([sample]).rename_keys(new_key="none"))
    got = list(IterableWrapper([sample]).rename_keys(new_key="none", must_match=False))
    assert got == [{"__key__": "a"}]


def test_47_patterns_have_alternatives_and_a_tuple_keeps_its_length() -> None:
    samples = [{"a": 1, "b": 2}]
    for patterns in (("a;x", "b"), (".a",), ("*.b", "a")):
        assert list(IterableWrapper(samples).extract_keys(*patterns)) == run(
            webdataset.extract_keys(*patterns), samples
        )
    assert run(webdataset.extract_keys("x", ignore_missing=True), samples) == [()]
    assert list(IterableWrapper(samples).extract_keys("x", "b", missing="none")) == [(None, 2)]
    twice = [{"a1": 1, "a2": 2}]
    with pytest.raises(ValueError, match="Multiple sample keys"):
        run(webdataset.extract_keys("a*"), twice)
    with pytest.raises(DuplicateKeyError, match=r"'a\*' matches \['a1', 'a2'\]"):
        list(IterableWrapper(twice).extract_keys("a*"))


def test_51_none_is_a_value_like_any_other() -> None:
    samples = [{"a": 1, "b": None}]
    with pytest.raises(ValueError, match="to_tuple"):
        run(webdataset.to_tuple("a", "b"), samples)
    assert run(webdataset.to_tuple("a", "b", none_is_error=False), samples) == [(1, None)]
    assert list(IterableWrapper(samples).to_tuple("a", "b")) == [(1, None)]
    assert list(IterableWrapper(samples).to_tuple("a", "c", missing="none")) == [(1, None)]
    assert run(webdataset.to_tuple("a", "c", missing_is_error=False), samples) == [(1, None)]


# parts of a stream, and cached streams


def test_36_cached_samples_come_again_without_their_shard() -> None:
    cached = theirs().mcached()
    want = list(cached)
    for options in ({}, {"path": "kept"}):
        pipe = ours().cache_samples(**options)
        assert list(pipe) == want
        Path("digits.tar").rename("gone.tar")
        assert list(pipe) == want == list(cached)
        if options:
            assert list(ours().cache_samples(**options)) == want
        Path("gone.tar").rename("digits.tar")
    twice = ShardList("digits.tar::digits.tar").load_wds_shards().group_samples().cache_samples("twice")
    assert list(twice) == list(twice) == want * 2


def test_11_a_stage_insists_on_items() -> None:
    assert list(IterableWrapper([1, 2]).non_empty()) == run(webdataset.non_empty, [1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="received no data"):
        run(webdataset.non_empty, [])
    with pytest.raises(EmptySourceError):
        list(IterableWrapper([]).non_empty())


def test_12_some_shards_with_replacement_and_the_first_items() -> None:
    urls = [f"{n}.tar" for n in range(3)]
    for drawn in (list(IterableWrapper(urls).resample_wds_shards(27)), run(webdataset.resampled(27), urls)):
        assert len(drawn) == 27
        assert set(drawn) <= set(urls)
    assert list(IterableWrapper(range(200)).slice_samples(29)) == run(webdataset.slice(29), range(200))
    got = list(ours().slice_samples(10))
    assert len(got) == 10
    assert got == list(theirs().slice(10))


def test_23_a_share_of_the_samples() -> None:
    assert list(ours().rsample(1.0)) == list(theirs().rsample(1.0)) == list(ours())
    torch.manual_seed(0)
    share = sum(1 for _ in IterableWrapper(range(1000)).rsample(0.5)) / 1000
    assert 0.4 < share < 0.6


def test_46_all_or_none_of_the_samples() -> None:
    for p, wanted in [(0.0, []), (1.0, list(range(100)))]:
        assert list(IterableWrapper(range(100)).rsample(p)) == run(webdataset.rsample(p), range(100)) == wanted


def test_44_a_shuffle_keeps_each_item() -> None:
    for count in (0, 1, 100):
        got = list(IterableWrapper(range(count)).shuffle_samples(10))
        assert Counter(got) == Counter(run(webdataset.shuffle(10), range(count))) == Counter(range(count))
    torch.manual_seed(0)
    assert list(IterableWrapper(range(100)).shuffle_samples(10)) != list(range(100))


# batches


def test_45_batches_and_what_is_left_over() -> None:
    for count, sizes in [(10, [3, 3, 3, 1]), (9, [3, 3, 3]), (0, [])]:
        for partial in (True, False):
            got = list(IterableWrapper(range(count)).batch(3, drop_last=not partial))
            assert [len(batch) for batch in got] == [size for size in sizes if partial or size == 3]
            assert got == run(webdataset.batched(3, collation_fn=None, partial=partial), range(count))


def test_52_torch_collates_to_tensors_and_takes_other_functions() -> None:
    samples: list[Any] = [
        {"n": n, "x": float(n), "array": np.array([n]), "tensor": torch.tensor([n]), "name": str(n)} for n in range(2)
    ]
    batch = next(iter(IterableWrapper(samples).batch(2).collate()))
    assert [batch[name].shape for name in ("n", "x", "array", "tensor")] == [(2,), (2,), (2, 1), (2, 1)]
    assert batch["name"] == ["0", "1"]
    theirs = run(webdataset.batched(2), samples)[0]
    ours = next(iter(IterableWrapper(samples).batch(2).collate(collate_fn=default_collation_fn)))
    assert repr(sorted(ours.items())) == repr(sorted(theirs.items()))


def to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(3, 2, 2)


def test_30_tuples_are_mapped_batched_unbatched_and_pickled() -> None:
    batched: IterDataPipe[Any] = ours().to_tuple("png", "cls").map_tuple(to_tensor, int).batch(7).collate()
    batches = list(batched)
    assert [len(images) for images, _ in batches] == [7] * 6 + [5]
    want = list(theirs().to_tuple("png", "cls").map_tuple(to_tensor, int).batched(7))
    for mine, other in zip(batches, want, strict=True):
        assert torch.equal(mine[0], other[0])
        assert mine[1].tolist() == other[1].tolist()
    flat = pickle.loads(pickle.dumps(batched.unbatch_samples()))
    got = list(flat)
    assert [int(number) for _, number in got] == list(range(COUNT))
    assert {image.shape for image, _ in got} == {(3, 2, 2)}
