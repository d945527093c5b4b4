"""Fields from a table and from parallel shards: joined by key, whatever is skipped."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_datapipes import ErrorBudget
from wds_datapipes.counters import Counters
from wds_datapipes.errors import (
    DuplicateKeyError,
    ErrorBudgetError,
    MisalignedShardsError,
    MissingFieldError,
    ShardOpenError,
    TruncatedShardError,
    UnknownSchemeError,
)
from wds_datapipes.on_error.policy import CountedErrors, OnError
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.joining import Replacement, add_columns, associate, parse_url_of
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Sample

pytestmark = pytest.mark.usefixtures("nothing_left")

SAMPLES: list[Sample] = [{"__key__": key, "__url__": "s.tar", "cls": number} for number, key in enumerate("abc")]
TABLE: dict[str, dict[str, Any]] = {"a": {"label": 1, "cls": 7}, "c": {"label": 3, "__url__": "other"}}


def test_found_fields_are_added_and_replace_existing_ones() -> None:
    before = copy.deepcopy(SAMPLES)
    assert list(associate(SAMPLES, TABLE.get, missing="keep")) == [
        {"__key__": "a", "__url__": "s.tar", "cls": 7, "label": 1},
        {"__key__": "b", "__url__": "s.tar", "cls": 1},
        {"__key__": "c", "__url__": "s.tar", "cls": 2, "label": 3},
    ]
    assert before == SAMPLES


def test_missing_rows() -> None:
    with pytest.raises(MissingFieldError, match=r"found no entry for the sample 'b' of s\.tar"):
        list(associate(SAMPLES, TABLE.get))
    counters = Counters()
    skip: Any = CountedErrors("skip", counters)
    assert [sample["__key__"] for sample in associate(SAMPLES, TABLE.get, missing="skip")] == ["a", "c"]
    assert counters.entries == 0
    assert [sample["__key__"] for sample in associate(SAMPLES, TABLE.get, on_error=skip)] == ["a", "c"]
    assert counters.entries == 1
    assert [sample["__key__"] for sample in associate(SAMPLES, TABLE.get, on_error=lambda error: False)] == ["a"]


def test_an_error_of_the_function() -> None:
    with pytest.raises(KeyError, match="b"):
        list(associate(SAMPLES, TABLE.__getitem__))
    assert len(list(associate(SAMPLES, TABLE.__getitem__, on_error="skip"))) == 2
    table: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    assert list(associate(SAMPLES, table.__getitem__)) == SAMPLES
    with pytest.raises(
        TypeError, match=r"needs dicts of fields, but found a int for the sample 'a' of s\.tar: make it"
    ):
        list(associate(SAMPLES, {"a": 3}.get, on_error="skip"))  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(MissingFieldError, match="by the field '__key__', but one has only \\['cls'\\]"):
        list(associate([{"cls": 3}], TABLE.get))


def test_how_urls_are_made() -> None:
    pair = ("images", "labels")
    assert parse_url_of(pair) == parse_url_of(list(pair)) == Replacement("images", "labels")
    assert parse_url_of(str.upper) is str.upper
    assert Replacement("images", "labels")("s3://images/images-0.tar") == "s3://labels/labels-0.tar"


def first(*keys: str, name: str = "x.tar") -> str:
    return build_shard(name, [{"__key__": key, "jpg": f"image {key}"} for key in keys])


def second(*keys: str, name: str = "y.tar") -> str:
    return build_shard(name, [{"__key__": key, "txt": f"text {key}"} for key in keys])


def read(*urls: str, **options: Any) -> Iterator[Sample]:
    return group_samples(read_shards(urls), **options)


def added(source: Any, *rules: Any, **options: Any) -> Iterator[Sample]:
    for rule in rules or [Replacement("x", "y")]:
        source = add_columns(source, rule, key_rule=first_dot, **options)
    return iter(source)


def whole(samples: Any) -> str:
    """The keys of samples, all of which have their own columns."""
    keys = ""
    for sample in samples:
        assert sample["txt"] == b"text " + sample["__key__"].encode()
        assert sample["jpg"] == b"image " + sample["__key__"].encode()
        keys += sample["__key__"]
    return keys


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_columns_of_several_shards() -> None:
    for shard, keys in enumerate(["abc", "", "d", "ef"]):
        first(*keys, name=f"x{shard}.tar")
        second(*keys, name=f"y{shard}.tar")
        build_shard(f"z{shard}.tar", [{"__key__": key, "seg.png": "mask", "cls": "1"} for key in keys])
    urls = [f"x{shard}.tar" for shard in (2, 0, 1, 3, 3)]
    samples = list(added(read(*urls), Replacement("x", "y"), lambda url: url.replace("x", "z"), fields=None))
    assert whole(samples) == "dabcefef"
    assert [list(sample) for sample in samples] == [
        ["__key__", "__url__", "__local_path__", "jpg", "txt", "seg.png", "cls"]
    ] * 8
    assert {(sample["__url__"], sample["__key__"]) for sample in samples} >= {("x2.tar", "d"), ("x3.tar", "f")}


def test_only_some_fields() -> None:
    first("a", "b")
    build_shard("y.tar", [{"__key__": "a", "TXT": "1", "cls": "1"}, {"__key__": "b", "cls": "1"}])
    samples = added(read("x.tar"), fields=["Txt"], on_error="skip")
    assert [(sample["__key__"], "cls" in sample, sample["txt"]) for sample in samples] == [("a", False, b"1")]
    with pytest.raises(MissingFieldError, match=r"needs 'txt' for the sample 'b' of x\.tar, but y\.tar has \['cls'\]"):
        list(added(read("x.tar"), fields=["txt"]))


def test_differently_written_keys() -> None:
    first("images/a", "images/b")
    build_shard("y.tar", [{"__key__": "labels/a", "txt": "1"}, {"__key__": "labels/b", "txt": "2"}])
    with pytest.raises(
        MisalignedShardsError, match=r"y\.tar has the sample 'labels/a', but x\.tar has the .* 'images/a'"
    ):
        list(added(read("x.tar")))
    samples = added(read("x.tar"), rename_files=lambda name: name.replace("labels", "images"))
    assert [sample["txt"] for sample in samples] == [b"1", b"2"]


def test_a_field_that_both_shards_have() -> None:
    first("a", "b")
    build_shard("y.tar", [{"__key__": "a", "jpg": "1"}, {"__key__": "b", "txt": "text b"}])
    message = r"got 'jpg' from y\.tar for the sample 'a' of x\.tar, which already has this field"
    with pytest.raises(DuplicateKeyError, match=message):
        list(added(read("x.tar")))
    assert whole(added(read("x.tar"), on_error="skip")) == "b"
    second("a", "b")
    second("a", "b", name="z.tar")
    with pytest.raises(DuplicateKeyError, match=r"got 'txt' from z\.tar for the sample 'a' of x\.tar"):
        list(added(read("x.tar"), Replacement("x", "y"), Replacement("x", "z")))


@pytest.mark.parametrize(
    ("ours", "theirs", "message", "kept", "skipped"),
    [
        ("abcd", "abc", r"y\.tar has ended, but x\.tar has the sample 'd'", "abc", 1),
        ("abcd", "ab", r"y\.tar has ended, but x\.tar has the sample 'c'", "ab", 2),
        ("abc", "abcd", r"y\.tar has the sample 'd', but x\.tar has ended", "abc", 1),
        ("abcd", "abd", r"y\.tar has the sample 'd', but x\.tar has the sample 'c'", "abd", 1),
        ("abd", "abcd", r"y\.tar has the sample 'c', but x\.tar has the sample 'd'", "abd", 1),
        ("abcd", "acbd", r"y\.tar has the sample 'c', but x\.tar has the sample 'b'", "abd", 2),
        ("abcd", "efgh", r"y\.tar has the sample 'e', but x\.tar has the sample 'a'", "", 5),
        ("abcd", "", r"y\.tar has ended, but x\.tar has the sample 'a'", "", 4),
    ],
)
def test_shards_that_are_not_parallel(ours: str, theirs: str, message: str, kept: str, skipped: int) -> None:
    first(*ours)
    second(*theirs)
    first("z", name="x2.tar")
    second("z", name="y2.tar")
    with pytest.raises(MisalignedShardsError, match=message):
        list(added(read("x.tar", "x2.tar")))
    counters = Counters()
    skip: Any = CountedErrors("skip", counters)
    assert whole(added(read("x.tar", "x2.tar"), on_error=skip)) == f"{kept}z"
    assert counters.entries == skipped
    with pytest.raises(MisalignedShardsError):
        list(added(read("x.tar")))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(
    keys=st.lists(st.sampled_from("abcdefghijkl"), unique=True),
    lost=st.sets(st.sampled_from("abcdefghijkl")),
    lost_beside=st.sets(st.sampled_from("abcdefghijkl")),
)
def test_samples_in_the_same_order_get_their_own_columns(
    keys: list[str], lost: set[str], lost_beside: set[str]
) -> None:
    ours = [key for key in keys if key not in lost]
    theirs = [key for key in keys if key not in lost_beside]
    first(*ours)
    second(*theirs)
    assert whole(added(read("x.tar"), on_error="skip")) == "".join(key for key in ours if key in theirs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(ours=st.permutations("abcdef"), theirs=st.permutations("abcdef"), on_error=st.sampled_from(["raise", "skip"]))
def test_no_sample_ever_gets_the_columns_of_another(ours: list[str], theirs: list[str], on_error: OnError) -> None:
    first(*ours)
    second(*theirs)
    if on_error == "raise" and ours != theirs:
        with pytest.raises(MisalignedShardsError):
            whole(added(read("x.tar"), on_error=on_error))
    else:
        assert set(whole(added(read("x.tar"), on_error=on_error))) <= set(ours)


def test_skipped_samples_do_not_shift_the_columns() -> None:
    twice: dict[str, bytes | str] = {"__key__": "b", "jpg": "1", "JPG": "2"}
    build_shard("x.tar", [{"__key__": "a", "jpg": "image a"}, twice, {"__key__": "c", "jpg": "image c"}])
    second("a", "b", "c")
    assert whole(added(read("x.tar", on_error="skip"), on_error="skip")) == "ac"
    with pytest.raises(MisalignedShardsError, match="has the sample 'b', but"):
        list(added(read("x.tar", on_error="skip")))


def test_a_bad_sample_of_the_parallel_shard_is_skipped_with_its_reason() -> None:
    first("a", "b", "c")
    build_shard(
        "y.tar",
        [
            {"__key__": "a", "txt": "text a"},
            {"__key__": "b", "txt": "1", "TXT": "2"},
            {"__key__": "c", "txt": "text c"},
        ],
    )
    with pytest.raises(DuplicateKeyError, match=r"y\.tar holds the field 'txt' of the sample 'b' twice"):
        list(added(read("x.tar")))
    errors: list[Exception] = []

    def keep(error: Exception) -> bool:
        errors.append(error)
        return True

    assert whole(added(read("x.tar"), on_error=keep)) == "ac"
    (error,) = errors
    assert type(error) is MisalignedShardsError
    assert "has the sample 'c', but x.tar has the sample 'b'. The last item skipped in it: y.tar holds" in str(error)


@pytest.mark.parametrize("damage", ["cut", "gone", "unmade"])
def test_an_unreadable_parallel_shard(damage: str, folder: Path) -> None:
    first("a", "b", "c")
    first("z", name="x2.tar")
    second("z", name="y2.tar")
    url_of = Replacement("x", "y")
    kind: type[Exception] = {"cut": TruncatedShardError, "gone": ShardOpenError, "unmade": ZeroDivisionError}[damage]
    kept = "a" if damage == "cut" else ""
    if damage == "cut":
        os.truncate(second("a", "b", "c"), 2100)  # the second sample may lack a field, so it is never yielded

    def make(url: str) -> str:
        return str(1 // 0) if damage == "unmade" and url == "x.tar" else url_of(url)

    with pytest.raises(kind):
        list(added(read("x.tar", "x2.tar"), make))
    counters = Counters()
    skip: Any = CountedErrors("skip", counters)
    assert whole(added(read("x.tar", "x2.tar"), make, on_error=skip)) == f"{kept}z"
    assert counters.entries == 3 - len(kept), "each sample that is lost is counted"
    assert whole(added(read("x.tar"), make, on_error=lambda error: not isinstance(error, kind))) == kept
    with pytest.raises(ErrorBudgetError, match="add_columns skipped 2 of"):
        list(added(read("x.tar", "x2.tar"), make, on_error=ErrorBudget(max_errors=1, warn=False)))


def test_a_parallel_shard_that_breaks_after_its_last_sample() -> None:
    first("a", "b")
    os.truncate(second("a", "b"), 2048)  # without the end marker
    samples = added(read("x.tar"))
    assert next(samples)["__key__"] == "a"
    with pytest.raises(TruncatedShardError, match=r"y\.tar"):
        list(samples)
    assert whole(added(read("x.tar"), on_error="skip")) == "a"


def test_a_mistake_in_the_url_is_never_skipped() -> None:
    first("a")
    with pytest.raises(UnknownSchemeError):
        list(added(read("x.tar"), lambda url: "nowhere://y.tar", on_error="skip"))
    with pytest.raises(TypeError, match=r"needs the URL of the shard parallel to x\.tar, but url_of returned None"):
        list(added(read("x.tar"), lambda url: None, on_error="skip"))
    with pytest.raises(ValueError, match=r"replaces 'images' with 'labels', but x\.tar does not contain it"):
        list(added(read("x.tar"), Replacement("images", "labels")))
    with pytest.raises(TypeError, match="add_columns needs samples with '__key__' and '__url__', but one has"):
        list(added([{"__key__": "a"}], on_error="skip"))
    with pytest.raises(TypeError, match="add_columns needs samples, which are dicts of fields, but got a tuple"):
        list(added([(1, 2)], on_error="skip"))


def test_individually_copied_samples_still_find_their_columns() -> None:
    for shard in ("", "2"):
        first("a", "b", name=f"x{shard}.tar")
        second("a", "b", name=f"y{shard}.tar")
    assert whole(added(copied(read("x.tar", "x2.tar", "x2.tar")))) == "ababab"


def copied(samples: Iterator[Sample]) -> Iterator[Sample]:
    for sample in samples:
        yield {**sample, "__url__": "".join(list(sample["__url__"]))}


def opened() -> list[str]:
    return [Path(file.path).name for file in psutil.Process().open_files() if file.path.endswith(".tar")]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_everything_is_closed_at_the_end_or_an_interruption(on_error: OnError) -> None:
    for shard in range(2):
        build_shard(f"x{shard}.tar", [{"__key__": str(number), "jpg": bytes(50_000)} for number in range(20)])
        build_shard(f"y{shard}.tar", [{"__key__": str(number), "txt": bytes(50_000)} for number in range(20)])
    samples = added(read("x0.tar", "x1.tar"), on_error=on_error)
    next(samples)
    assert sorted(opened()) == ["x0.tar", "y0.tar"]
    for _ in range(20):
        next(samples)
    assert sorted(opened()) == ["x1.tar", "y1.tar"]
    samples.close()  # type: ignore[attr-defined]  # it is a generator
    assert opened() == []
    kept = list(added(read("x0.tar", "x1.tar"), on_error=on_error))
    assert len(kept) == 40
    assert opened() == []
    os.remove("y1.tar")
    if on_error == "raise":
        with pytest.raises(ShardOpenError):
            list(added(read("x0.tar", "x1.tar")))
    else:
        kept = list(added(read("x0.tar", "x1.tar"), on_error=on_error))
        assert len(kept) == 20
    assert opened() == [], "nor does the error hold anything"
    with pytest.raises(DuplicateKeyError):
        list(added(read("x0.tar"), lambda url: "x1.tar"))
    assert opened() == []
    os.truncate("x1.tar", 10_000)
    with pytest.raises(TruncatedShardError, match=r"x1\.tar"):
        list(added(read("x1.tar"), lambda url: "y0.tar", on_error=on_error))
    assert opened() == []
