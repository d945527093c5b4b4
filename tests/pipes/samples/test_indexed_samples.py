"""`IndexedSamples`: the same global batches on any ranks and workers, exact lengths, and invalid arguments."""

from __future__ import annotations

import math
import os
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from error_facts import naming
from global_batches import global_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_shards import write_numbered
from readers import keys_of
from torch.utils.data import DataLoader, RandomSampler, Subset
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes import IndexedSamples, ShardList
from wds_datapipes.errors import EmptySourceError, EncodeError, StaleSidecarError
from wds_datapipes.index import AccessOptions, EpochOptions, IndexOptions, Manifest, ShardIndex, build_indexes
from wds_datapipes.testing import build_shard

SIZES = (7, 0, 1, 30, 12)
COUNT = sum(SIZES)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest(build_indexes(write_numbered(tmp_path_factory.mktemp("shards"), SIZES)))


@settings(max_examples=15)
@given(
    ranks=st.integers(1, 4),
    workers=st.integers(1, 4),
    multiple=st.integers(1, 5),
    order=st.sampled_from(["global", "window", "sequential"]),
    remainder=st.sampled_from(["drop", "pad", "keep"]),
    select=st.sampled_from([None, slice(None, None, 2)]),
    lanes=st.sampled_from([1, 1, 2, 3, 6]),
)
def test_global_batches_are_the_same_for_any_ranks_and_workers(
    manifest: Manifest, ranks: int, workers: int, multiple: int, order: str, remainder: str, select: Any, lanes: int
) -> None:
    options: dict[str, Any] = {"order": order, "remainder": remainder, "epoch": EpochOptions(window_shards=2)}
    options |= {"select": select, "lanes": lanes}
    count = COUNT if select is None else COUNT // 2
    batch = math.lcm(ranks, lanes) * multiple
    if remainder == "drop":
        batch = min(batch, count // math.lcm(ranks, lanes) * math.lcm(ranks, lanes))
    found = global_batches(manifest, ranks, workers, batch, **options)
    everything = list(chain(*found))
    expected = global_batches(manifest, 1, 1, batch, **options)
    if remainder == "keep" and count % batch:  # the last batch is divided evenly
        assert sorted(chain(*found[len(expected) - 1 :])) == sorted(expected.pop())
        found = found[: len(expected)]
    assert found == expected
    counts = Counter(everything)
    if remainder == "drop":
        assert len(everything) == count - count % batch == len(counts)
    elif remainder == "keep":
        assert len(everything) == count == len(counts)
    else:
        assert len(everything) == -(-count // batch) * batch
        assert len(counts) == count


def test_padding_is_marked_and_repeats_the_first_samples(manifest: Manifest) -> None:
    pipe = IndexedSamples(manifest, global_batch_size=120, remainder="pad", order="sequential")
    samples = list(pipe)
    assert [sample["__padding__"] for sample in samples] == [False] * COUNT + [True] * (120 - COUNT)
    assert keys_of(samples) == (keys_of(samples)[:COUNT] * 3)[:120]


PADDED_TO_24: dict[str, Any] = {"global_batch_size": 24, "remainder": "pad", "order": "sequential"}


def tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [int(sample["cls"])]}


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        ("map_samples", (tokens,)),
        ("map_samples_with_rng", (lambda sample, rng: tokens(sample),)),
        ("map_dict", ()),
        ("rename", ()),
        ("rename_keys", (("label", "cls"),)),
        ("select_fields", ("cls",)),
        ("associate", (lambda key: {"__padding__": None},)),
        ("wds_decode", ()),
        ("wds_encode", ()),
        ("shuffle_samples", (1,)),
    ],
)
def test_stages_keep_the_mark_of_padding(manifest: Manifest, stage: str, arguments: tuple[Any, ...]) -> None:
    samples = IndexedSamples(manifest, **PADDED_TO_24)
    by_field: dict[str, dict[str, Any]] = {"map_dict": {"cls": int}, "rename": {"label": "cls"}}
    marks = [sample["__padding__"] for sample in getattr(samples, stage)(*arguments, **by_field.get(stage, {}))]
    assert marks == [False] * COUNT + [True] * (24 - COUNT % 24)


@pytest.mark.parametrize("stage", ["to_tuple", "extract_keys"])
def test_tuples_that_lose_the_mark_of_padding_are_a_warning(manifest: Manifest, stage: str) -> None:
    def tuples(*fields: str, **options: Any) -> list[Any]:
        return list(getattr(IndexedSamples(manifest, **options), stage)(*fields))

    with pytest.warns(
        UserWarning, match=f"{stage} leaves out '__padding__', so samples .* count as data. Select"
    ) as found:
        tuples("cls", **PADDED_TO_24)
    assert len(found) == 1
    marked = tuples("cls", "__padding__", **PADDED_TO_24)
    assert [is_padding for _, is_padding in marked] == [False] * COUNT + [True] * (24 - COUNT % 24)
    tuples("cls", **{**PADDED_TO_24, "global_batch_size": COUNT})  # no warning without padding
    tuples("cls", global_batch_size=24, on_error="skip")


def test_padding_is_not_packed(manifest: Manifest) -> None:
    def rows(**options: Any) -> list[list[str]]:
        samples = IndexedSamples(manifest, order="sequential", **options).map_samples(tokens)
        return [row["__key__"] for row in samples.pack_samples(5, "tokens")]

    assert rows(global_batch_size=24, remainder="pad") == rows(remainder="keep")


def test_padding_is_not_written(manifest: Manifest, tmp_path: Path) -> None:
    samples = IndexedSamples(manifest, **PADDED_TO_24)
    with pytest.raises(EncodeError, match=r"only pads a batch, as its field '__padding__'.*remainder=\"keep\""):
        list(samples.write_wds_shards(f"{tmp_path}/%d.tar", verbose=False))
    (written,) = samples.write_wds_shards(f"{tmp_path}/skipped-%d.tar", verbose=False, on_error="skip")
    assert written.samples == COUNT


def test_orders_depend_only_on_the_seed(manifest: Manifest) -> None:
    def epoch(seed: int, **options: Any) -> list[str]:
        return keys_of(IndexedSamples(manifest, **options).set_seed(seed))

    streamed = keys_of(ShardList(manifest.urls).load_wds_shards().group_samples())
    assert epoch(1) == epoch(1) != epoch(2)
    assert epoch(1, order="window", epoch=EpochOptions(window_shards=2)) != epoch(
        2, order="window", epoch=EpochOptions(window_shards=2)
    )
    assert epoch(1, order="sequential") == epoch(2, order="sequential") == streamed
    assert keys_of(IndexedSamples(manifest).set_seed(1).set_shuffle(False)) == streamed
    pipe = IndexedSamples(manifest)
    assert keys_of(pipe) != keys_of(pipe), "each pass has another order"
    assert sorted(keys_of(pipe)) == sorted(streamed)


def test_samplers_of_torch_read_in_map_style(manifest: Manifest) -> None:
    dataset = IndexedSamples(manifest).map_style()
    streamed = list(ShardList(manifest.urls).load_wds_shards().group_samples())
    assert len(dataset) == COUNT
    assert [dataset[number] for number in range(COUNT)] == streamed
    assert dataset[3] == dataset[3 - COUNT]
    loader = DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset), collate_fn=keys_of, num_workers=2)
    assert sorted(chain(*loader)) == sorted(keys_of(streamed))
    assert len(loader) == -(-COUNT // 8)
    with pytest.raises(IndexError, match=f"has {COUNT} samples, so there is no sample {COUNT}"):
        dataset[COUNT]


def test_indexes_are_built_or_required(tmp_path: Path) -> None:
    for name in "ab":
        build_shard(tmp_path / f"{name}.tar", [{"__key__": name, "cls": "1"}])
    pattern = f"{tmp_path}/{{a,b}}.tar"
    with pytest.raises(
        StaleSidecarError, match=r"a\.tar has no valid index, .*a\.tar\.wdsidx cannot be read: there is no"
    ):
        IndexedSamples(pattern, access=AccessOptions(indexes="require"))
    assert keys_of(
        IndexedSamples(pattern, access=AccessOptions(index_dir=tmp_path / "elsewhere"), order="sequential")
    ) == ["a", "b"]
    assert not list(tmp_path.glob("*.wdsidx"))
    assert len(IndexedSamples(pattern)) == len(IndexedSamples(pattern, access=AccessOptions(indexes="require"))) == 2
    build_shard(tmp_path / "b.tar", [{"__key__": f"{n}", "cls": "1"} for n in range(30)])
    os.utime(tmp_path / "b.tar", ns=(1, 1))
    with pytest.raises(StaleSidecarError, match=r"b\.tar has no valid index: .* has changed .* bytes instead of"):
        IndexedSamples(pattern, access=AccessOptions(indexes="require"))
    assert len(IndexedSamples(pattern)) == 31


def test_samplers_and_slices_lead_to_the_map_style_dataset(manifest: Manifest) -> None:
    samples = IndexedSamples(manifest)
    options: Any
    for options in ({"sampler": RandomSampler(samples)}, {"batch_sampler": [[0, 1]]}):
        with pytest.raises(ValueError, match=r"sampler option.* IndexedSamples orders .*\.map_style\(\)"):
            DataLoader(samples, **options)
    whole = samples.map_style()
    for dataset in (samples, whole):
        for number in (slice(0, 4), "0", 1.5, None):
            with pytest.raises(TypeError, match=r"must be an integer, not .*Subset\(samples\.map_style\(\), numbers\)"):
                dataset[number]  # type: ignore[index]  # that is what is tested
    assert len(list(DataLoader(whole, sampler=RandomSampler(whole), collate_fn=list))) == len(whole)
    assert [Subset(whole, [3, 1])[number]["__key__"] for number in range(2)] == [
        whole[3]["__key__"],
        whole[1]["__key__"],
    ]
    assert whole[np.int64(1)] == whole[torch.tensor(1)] == whole[1]  # type: ignore[index]


def test_datasets_without_samples_are_named(manifest: Manifest, tmp_path: Path) -> None:
    full = build_shard(tmp_path / "full.tar", [{"__key__": "a", "cls": "1"}])
    empty = build_shard(tmp_path / "empty.tar", [])
    with pytest.raises(EmptySourceError, match="There are no samples in 1 shard"):
        IndexedSamples([empty])
    with pytest.raises(EmptySourceError, match=r"^A dataset of join= has 1 shard but no samples"):
        IndexedSamples([full], join=[[empty]])
    with pytest.raises(EmptySourceError, match=f"select chooses none of the {COUNT} samples"):
        IndexedSamples(manifest, select=[])


def test_fields_are_read_where_they_are(tmp_path: Path) -> None:
    shards = [
        build_shard(tmp_path / "0.tar", [{"__key__": "a", "jpg": "", "cls": "1"}]),
        build_shard(tmp_path / "1.tar", [{"__key__": "b", "jpg": ""}, {"__key__": "c", "seg.png": ""}]),
    ]
    optional = IndexedSamples(shards, fields=["CLS", "seg.png"], order="sequential")
    assert [[name for name in sample if not name.startswith("__")] for sample in optional] == [["cls"], [], ["seg.png"]]
    captions = build_shard(tmp_path / "2.tar", [{"__key__": key, "json": "1"} for key in "abc"])
    joined = IndexedSamples(shards, join=[[captions]], fields=["json"], order="sequential")
    assert [sample["json"] for sample in joined] == [b"1"] * 3


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (51, EmptySourceError, "has 50 samples, but a global batch takes 51, so an epoch would be empty"),
        (50, ValueError, "a global_batch_size of 50, which is not divisible by its 3 ranks. Choose a multiple of 3"),
    ],
)
def test_data_that_makes_no_batch_is_refused_on_every_rank(
    manifest: Manifest, batch: int, error: type[Exception], message: str
) -> None:
    for rank in range(3):
        pipe = IndexedSamples(manifest, global_batch_size=batch)
        pipe.apply_sharding(3, rank)
        for use in (len, lambda pipe: next(iter(pipe))):
            with pytest.raises(error, match=message):
                use(pipe)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (IndexedSamples, {"global_batch_size": 0}, ValueError, "global_batch_size must be at least 1, not 0"),
        (
            IndexedSamples,
            {"global_batch_size": 2.5},
            TypeError,
            "global_batch_size must be an integer or None, not 2.5",
        ),
        (IndexedSamples, {"lanes": 0, "global_batch_size": 8}, ValueError, "lanes must be at least 1, not 0"),
        (
            IndexedSamples,
            {"lanes": 8, "global_batch_size": 12},
            ValueError,
            "8 lanes must contribute .* but global_batch_size=12. Choose a multiple of 8, or lanes that divide it",
        ),
        (
            IndexedSamples,
            {"lanes": 2},
            ValueError,
            "2 lanes must contribute .* but global_batch_size=None. Choose a multiple of 2",
        ),
        (
            IndexedSamples,
            {"lanes": 64, "global_batch_size": 64, "remainder": "pad"},
            ValueError,
            "lanes=64 is too large, because each lane needs at least one sample of an epoch. Choose at most 50",
        ),
        (IndexedSamples, {"order": "random"}, ValueError, 'order must be "global", "window" or "sequential", not'),
        (IndexedSamples, {"remainder": "fill"}, ValueError, 'remainder must be "drop", "pad" or "keep", not \'fill\''),
        (IndexedSamples, {"fields": "cls"}, TypeError, "fields must be a collection of names"),
        (EpochOptions, {"window_shards": True}, TypeError, "window_shards must be an integer, not True"),
        (AccessOptions, {"cache_bytes": 10}, ValueError, "it requires cache_dir"),
        (AccessOptions, {"indexes": "skip"}, ValueError, 'indexes must be "local", "build" or "require", not'),
        (IndexOptions, {"key_rule": "last_dot"}, TypeError, "key_rule must be first_dot, last_dot or"),
    ],
)
def test_wrong_arguments_are_refused(
    manifest: Manifest, make: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = [manifest] if make is IndexedSamples else []
    with pytest.raises(error, match=message):
        make(*arguments, **options)


def test_windows_of_more_shards_than_are_open_are_a_warning(manifest: Manifest) -> None:
    def read(ranks: int, open_shards: int, **options: Any) -> None:
        access = AccessOptions(open_shards=open_shards)
        pipe = IndexedSamples(manifest, global_batch_size=8, access=access, **options)
        pipe.apply_sharding(ranks, 0, SHARDING_PRIORITIES.DISTRIBUTED)
        list(pipe)

    message = (
        r"has 2 of 4 lanes, so its batches have samples of 4 shards, .* keeps 3 open.*AccessOptions\(open_shards=4\)"
    )
    with pytest.warns(UserWarning, match=message):
        read(2, 3, order="window", lanes=4)
    read(2, 4, order="window", lanes=4)
    read(4, 3, order="window", lanes=4)
    read(2, 3, order="window")


@pytest.mark.parametrize("order", ["global", "sequential"])
@pytest.mark.parametrize(
    ("select", "chosen"),
    [
        (slice(3, None, 3), list(range(3, COUNT, 3))),
        (np.array([49, 0, 8, 8]), [0, 8, 8, 49]),
        (np.arange(COUNT) % 5 == 1, list(range(1, COUNT, 5))),
        (lambda index: np.array([key.endswith("1") for key in index.keys], bool), [1, 9, 19, 29, 39, 49]),
    ],
    ids=["slice", "numbers", "mask", "function"],
)
def test_only_selected_samples_are_read(manifest: Manifest, order: Any, select: Any, chosen: list[int]) -> None:
    every = keys_of(IndexedSamples(manifest, order="sequential"))
    expected = [every[number] for number in chosen]
    samples = IndexedSamples(manifest, order=order, select=select)
    dataset = samples.map_style()
    assert len(samples) == len(dataset) == len(expected)
    assert keys_of(dataset[number] for number in range(len(dataset))) == expected
    found = keys_of(samples)
    assert Counter(found) == Counter(expected)
    assert order != "sequential" or found == expected


def shard_of_12(index: ShardIndex) -> Any:
    return np.full(len(index), len(index) == 12)


def last_of_30(index: ShardIndex) -> list[int]:
    return [29] if len(index) == 30 else []


@pytest.mark.parametrize("order", ["global", "window"])
@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
@pytest.mark.parametrize(
    "exclude", [["0-0", "3-29", *(f"4-{n}" for n in range(12))], "keys.txt", ["0-0", shard_of_12, last_of_30]]
)
def test_excluded_samples_are_replaced_or_left_out(
    manifest: Manifest, tmp_path: Path, order: Any, remainder: Any, exclude: Any
) -> None:
    gone = {"0-0", "3-29", *(f"4-{n}" for n in range(12))}
    if exclude == "keys.txt":
        (tmp_path / exclude).write_text("".join(f"{key}\r\n" for key in sorted(gone)), "utf-8-sig")
        exclude = tmp_path / exclude
    options: dict[str, Any] = {"order": order, "remainder": remainder, "global_batch_size": 8}
    every = keys_of(IndexedSamples(manifest, **options).set_seed(3))
    pipe = IndexedSamples(manifest, epoch=EpochOptions(exclude=exclude), **options).set_seed(3)
    found = list(pipe)
    assert gone.isdisjoint(keys_of(found))
    assert len(pipe.map_style()) == COUNT, "which has all samples"
    if remainder == "keep":
        assert keys_of(found) == [key for key in every if key not in gone]
        with pytest.raises(TypeError, match=naming("IndexedSamples", "length", "exclude=")):
            len(pipe)
    else:
        assert len(found) == len(pipe) == len(every)
        marks = [sample["__padding__"] for sample in found]
        assert marks == [key in gone or place >= COUNT for place, key in enumerate(every)]
        assert all(key == own or key in gone for key, own in zip(every, keys_of(found), strict=True))
    others = {"other": manifest, "web": manifest}
    mixed = IndexedSamples(others, epoch=EpochOptions(exclude={"web": exclude}), remainder="keep")
    counts = Counter((sample["__dataset__"], sample["__key__"]) for sample in mixed)
    assert {key for name, key in counts if name == "other"} - {key for name, key in counts if name == "web"} == gone


@pytest.mark.parametrize("remainder", ["drop", "keep"])
def test_exclusions_that_leave_or_match_nothing_are_reported(manifest: Manifest, remainder: Any) -> None:
    def read(exclude: Any) -> list[str]:
        return keys_of(IndexedSamples(manifest, remainder=remainder, epoch=EpochOptions(exclude=exclude)))

    with pytest.raises(EmptySourceError, match=naming("exclude=", 50, 100)):
        read(lambda index: np.ones(len(index), bool))
    with pytest.warns(UserWarning, match=naming("2 keys", "'3-01', 'web'", "EpochOptions(exclude=)")):
        read(["web", "3-1", "3-01"])
    for wrong, message in (({"3-1"}, "a list, not a set"), ([3], "keys and functions, not of 3")):
        with pytest.raises(TypeError, match=message):
            read(wrong)
    with pytest.raises(ValueError, match=naming("'web'", "['']")):
        read({"web": ["3-1"]})


def test_excluded_samples_of_a_shard_without_an_index_are_not_read(tmp_path: Path) -> None:
    for name in "ab":
        build_shard(tmp_path / f"{name}.tar", [{"__key__": f"{name}{n}", "cls": "1"} for n in range(10)])
    manifest = Manifest(build_indexes(f"{tmp_path}/{{a,b}}.tar"))
    pipe = IndexedSamples(manifest, on_error="skip", epoch=EpochOptions(exclude=["a1", "b1"]))
    (tmp_path / "a.tar.wdsidx").unlink()
    found = list(pipe)
    assert {*keys_of(found)} == {f"b{n}" for n in range(10) if n != 1}
    assert [sample["__padding__"] for sample in found].count(True) == 11
    assert pipe.counters.skipped().counts == {"IndexedSamples: MissingSidecarError": 10}
