"""`IndexedSamples` of several datasets, with joined fields, and with unreadable samples."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from error_facts import naming
from global_batches import global_batches
from numbered_shards import write_numbered
from readers import keys_of

from wds_datapipes import ErrorBudget, IndexedSamples
from wds_datapipes.errors import (
    ChangedShardError,
    DuplicateKeyError,
    EmptySourceError,
    ErrorBudgetError,
    MisalignedShardsError,
)
from wds_datapipes.index import AccessOptions, EpochOptions, Join, Manifest, build_indexes
from wds_datapipes.testing import build_shard, check_coverage

SIZES = {"web": (7, 0, 20), "books": (4, 5)}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    found = {}
    for name, sizes in SIZES.items():
        folder = tmp_path_factory.mktemp(name)
        for shard, size in enumerate(sizes):
            samples = [{"__key__": f"{name}-{shard}-{n:02}", "cls": f"{n}"} for n in range(size)]
            build_shard(folder / f"{shard}.tar", samples)
        found[name] = Manifest(build_indexes(f"{folder}/{{0..{len(sizes) - 1}}}.tar"))
    return found


@pytest.mark.parametrize(
    ("order", "ranks", "workers", "lanes"),
    [("global", 1, 3, 1), ("window", 4, 2, 1), ("sequential", 2, 1, 1), ("window", 4, 2, 2), ("sequential", 2, 3, 4)],
)
def test_a_mixture_has_the_same_global_batches_on_any_ranks_and_workers(
    datasets: dict[str, Manifest], order: Any, ranks: int, workers: int, lanes: int
) -> None:
    options: dict[str, Any] = {"weights": {"web": 2, "books": 1}, "order": order, "lanes": lanes}
    options["epoch"] = EpochOptions(samples=120)
    expected = global_batches(datasets, 1, 1, 4, of=list, **options)
    assert len(expected) == 30
    assert global_batches(datasets, ranks, workers, 4, of=list, **options) == expected
    samples = list(chain(*expected))
    assert all(sample["__key__"].startswith(sample["__dataset__"]) for sample in samples)
    counts = Counter(keys_of(samples))
    for name, sizes in SIZES.items():  # each dataset repeats only after all of its samples
        times = [counts[f"{name}-{shard}-{n:02}"] for shard, size in enumerate(sizes) for n in range(size)]
        assert max(times) - min(times) <= 1 + (lanes > 1)


def test_without_weights_each_sample_of_every_dataset_comes_once(datasets: dict[str, Manifest]) -> None:
    every = [
        f"{name}-{shard}-{n:02}"
        for name, sizes in SIZES.items()
        for shard, size in enumerate(sizes)
        for n in range(size)
    ]
    samples = IndexedSamples(datasets)
    assert len(samples) == len(every)
    assert sorted(keys_of(samples)) == sorted(every)
    assert keys_of(IndexedSamples(datasets, order="sequential")) == every
    dataset = samples.map_style()
    assert [dataset[number]["__dataset__"] for number in (0, 26, 27, 35)] == ["web", "web", "books", "books"]
    check_coverage(lambda: IndexedSamples(datasets, remainder="keep"), ranks=2, workers=3)


def test_an_epoch_is_as_long_as_the_datasets_that_are_read_or_as_requested(datasets: dict[str, Manifest]) -> None:
    assert len(IndexedSamples(datasets, weights={"web": 1, "books": 1})) == 36
    only = IndexedSamples(datasets, weights={"web": 0, "books": 0.5})
    assert len(only) == 9
    assert {sample["__dataset__"] for sample in only} == {"books"}
    short = IndexedSamples(datasets["web"], epoch=EpochOptions(samples=5))
    assert len(set(keys_of(short))) == len(short) == 5
    long = IndexedSamples(datasets["web"], epoch=EpochOptions(samples=60))
    assert sorted(Counter(keys_of(long)).values()) == [2] * 21 + [3] * 6
    assert keys_of(IndexedSamples(datasets["web"], epoch=EpochOptions(samples=60), order="sequential"))[
        27:54
    ] == keys_of(IndexedSamples(datasets["web"], order="sequential"))
    assert len(IndexedSamples(datasets, weights={"web": 9, "books": 1}, epoch=EpochOptions(samples=10**12))) == 10**12


def test_samples_of_single_datasets_are_selected_by_name(datasets: dict[str, Manifest]) -> None:
    samples = IndexedSamples(datasets, select={"web": slice(None, None, 9)}, order="sequential")
    assert keys_of(samples)[:4] == ["web-0-00", "web-2-02", "web-2-11", "books-0-00"]
    assert len(samples) == 3 + 9
    both = IndexedSamples(datasets, select=lambda index: [key.endswith("1") for key in index.keys], order="sequential")
    assert keys_of(both) == ["web-0-01", "web-2-01", "web-2-11", "books-0-01", "books-1-01"]
    with pytest.raises(TypeError, match=naming("select", "slice")):
        IndexedSamples(datasets, select=slice(3))
    with pytest.raises(ValueError, match=naming("'code'", "'books', 'web'")):
        IndexedSamples(datasets, select={"code": slice(3)})
    with pytest.raises(EmptySourceError, match=naming("'books'", "positive weight")):
        IndexedSamples(datasets, weights={"web": 1, "books": 1}, select={"books": []})
    with pytest.raises(ValueError, match=r"need nonempty names, not \['', 'web'\]"):
        IndexedSamples({"": datasets["books"], "web": datasets["web"]})


def test_datasets_with_shards_of_one_name_need_separate_folders_of_indexes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        build_shard(tmp_path / name / "0.tar", [{"__key__": name, "txt": "x"}])
    patterns = {name: f"{tmp_path}/{name}/0.tar" for name in "ab"}
    assert sorted(keys_of(IndexedSamples(patterns))) == ["a", "b"]
    with pytest.raises(ValueError, match=r"Several shards would have the index .*0\.tar\.wdsidx"):
        IndexedSamples(patterns, access=AccessOptions(index_dir=tmp_path / "indexes"))


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Captions of all books, of a third of the web samples, and of others, in random order."""
    folder = tmp_path_factory.mktemp("captions")
    names = [f"books-{shard}-{n:02}" for shard, size in enumerate(SIZES["books"]) for n in range(size)]
    names += [f"web-0-{n:02}" for n in range(7)] + [f"other-{n}" for n in range(5)]
    random.Random(0).shuffle(names)
    for shard in range(3):
        build_shard(folder / f"{shard}.tar", [{"__key__": key, "txt": f"of {key}"} for key in names[shard::3]])
    return Manifest(build_indexes(f"{folder}/{{0..2}}.tar"))


@pytest.mark.parametrize(("ranks", "workers", "lanes"), [(1, 3, 1), (4, 2, 1), (4, 2, 2)])
def test_fields_of_another_dataset_are_joined_by_key(
    datasets: dict[str, Manifest], captions: Manifest, ranks: int, workers: int, lanes: int
) -> None:
    options: dict[str, Any] = {"join": captions, "remainder": "keep", "lanes": lanes}
    batches = global_batches(datasets["books"], ranks, workers, ranks, of=list, **options)
    found = [sample for batch in batches for sample in batch]
    assert sorted(keys_of(found)) == sorted(keys_of(IndexedSamples(datasets["books"])))
    for sample in found:
        assert sample["txt"] == f"of {sample['__key__']}".encode()
        assert set(sample) - {"__local_path__"} == {"__key__", "__url__", "cls", "txt"}
        assert sample["__url__"] in datasets["books"].urls


def test_samples_without_a_counterpart_are_errors_or_skipped_or_kept(
    datasets: dict[str, Manifest], captions: Manifest
) -> None:
    with pytest.raises(MisalignedShardsError, match=naming("20 samples", "'web-2-00', 'web-2-01', 'web-2-02', ...")):
        IndexedSamples(datasets["web"], join=captions)
    assert len(IndexedSamples(datasets["web"], join=captions, select=slice(7))) == 7, "others are not needed"
    joined = IndexedSamples(datasets["web"], join=Join(captions, missing="skip"), order="sequential")
    assert keys_of(joined) == [f"web-0-{n:02}" for n in range(7)]
    assert len(joined) == len(joined.map_style()) == 7
    assert joined.map_style()[3]["txt"] == b"of web-0-03"
    assert list(pickle.loads(pickle.dumps(joined))) == list(joined)
    kept = list(IndexedSamples(datasets["web"], join=[Join(captions, missing="keep")], order="sequential"))
    assert [("txt" in sample) for sample in kept] == [True] * 7 + [False] * 20
    some = IndexedSamples(
        datasets, join=Join(captions, missing="skip"), select={"web": slice(None, None, 2)}, order="sequential"
    )
    assert keys_of(some) == [f"web-0-{n:02}" for n in (0, 2, 4, 6)] + keys_of(
        IndexedSamples(datasets["books"], order="sequential")
    )
    with pytest.raises(EmptySourceError, match=naming("select", "join", "27 samples")):
        IndexedSamples(datasets["web"], join=Join(captions, missing="skip"), select=slice(20, None))


def test_joined_fields_must_differ_unless_only_some_are_read(datasets: dict[str, Manifest], tmp_path: Path) -> None:
    names = [*keys_of(IndexedSamples(datasets["books"], order="sequential"))]
    other = build_shard(tmp_path / "0.tar", [{"__key__": key, "cls": "9", "json": "{}"} for key in names])
    with pytest.raises(DuplicateKeyError, match=r"join cannot add the field 'cls' from .*0\.tar, .*books-"):
        list(IndexedSamples(datasets["books"], join=[[other]]))
    for remainder in ("drop", "keep"):  # no policy skips all samples
        with pytest.raises(DuplicateKeyError, match=r"join cannot add the field 'cls'"):
            list(IndexedSamples(datasets["books"], join=[[other]], on_error="skip", remainder=remainder))
    samples = list(IndexedSamples(datasets["books"], join=[[other]], fields=["json"]))
    assert all(sample["json"] == b"{}" and "cls" not in sample for sample in samples)


@pytest.fixture
def damaged(tmp_path: Path) -> Manifest:
    """Return a manifest of four shards of 10 samples. The third one was truncated after indexing."""
    manifest = Manifest(build_indexes(write_numbered(tmp_path, [10] * 4)))
    os.truncate(tmp_path / "2.tar", 100)
    return manifest


@pytest.mark.parametrize(
    ("remainder", "ranks", "workers", "lanes"), [("drop", 1, 3, 1), ("pad", 4, 2, 1), ("pad", 4, 2, 4)]
)
def test_an_unreadable_sample_is_replaced_and_nothing_shifts(
    damaged: Manifest, remainder: Any, ranks: int, workers: int, lanes: int
) -> None:
    options: dict[str, Any] = {"remainder": remainder, "on_error": "skip", "lanes": lanes}
    expected = global_batches(damaged, 1, 1, 8, of=list, **options)
    assert [len(batch) for batch in expected] == [8] * 5
    assert global_batches(damaged, ranks, workers, 8, of=list, **options) == expected
    samples = list(chain(*expected))
    assert sum(sample["__padding__"] for sample in samples) == 10
    real = [sample["__key__"] for sample in samples if not sample["__padding__"]]
    assert sorted(real) == sorted(f"{shard}-{n}" for shard in (0, 1, 3) for n in range(10))


def test_unreadable_samples_are_counted_and_skipped_if_each_must_come_once(damaged: Manifest) -> None:
    pipe = IndexedSamples(damaged, remainder="keep", on_error="skip")
    found = keys_of(pipe)
    assert sorted(found) == sorted(f"{shard}-{n}" for shard in (0, 1, 3) for n in range(10))
    assert pipe.counters.skipped().counts["IndexedSamples: ChangedShardError"] == 10
    with pytest.raises(TypeError, match=naming("IndexedSamples", "length", "on_error='skip'")):
        len(pipe)
    with pytest.raises(ErrorBudgetError, match="IndexedSamples skipped 4 of "):
        list(IndexedSamples(damaged, on_error=ErrorBudget(max_errors=3, warn=False)))
    ended = IndexedSamples(damaged, order="sequential", on_error=lambda error: False)
    assert keys_of(ended) == [f"{shard}-{n}" for shard in (0, 1) for n in range(10)]
    counts = ended.counters.skipped().counts
    assert counts == {"IndexedSamples: ChangedShardError": 1, "IndexedSamples: not read": 19}
    with pytest.warns(UserWarning, match="IndexedSamples skipped"):
        assert len(list(IndexedSamples(damaged, on_error="warn"))) == 40


def test_an_unreadable_sample_or_dataset_is_an_error(damaged: Manifest) -> None:
    for samples in (IndexedSamples(damaged), IndexedSamples(Manifest(damaged.entries[2:3]), on_error="skip")):
        with pytest.raises(ChangedShardError, match=r"2\.tar has changed since it was indexed"):
            list(samples)
