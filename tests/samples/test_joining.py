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
from wds_datapipes.on_error.policy import CountedErrors
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.joining import Replacement, add_columns, associate
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard
from wds_datapipes.types import Sample

pytestmark = pytest.mark.usefixtures("nothing_left", "folder")

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


def first(*keys: str, name: str = "x.tar") -> str:
    return build_shard(name, [{"__key__": key, "jpg": f"image {key}"} for key in keys])


def second(*keys: str, name: str = "y.tar") -> str:
    return build_shard(name, [{"__key__": key, "txt": f"text {key}"} for key in keys])


def read(*urls: str, **options: Any) -> Iterator[Sample]:
    return group_samples(read_shards(urls), **options)


def added(source: Any, *rules: Any, **options: Any) -> Iterator[Sample]:
    for rule in rules or [Replacement("x", "y")]:
        source = add_columns(source, rule, **{"key_rule": first_dot, **options})
    return iter(source)


def whole(samples: Any) -> str:
    """The keys of samples, all of which have their own columns."""
    keys = ""
    for sample in samples:
        assert sample["txt"] == b"text " + sample["__key__"].encode()
        assert sample["jpg"] == b"image " + sample["__key__"].encode()
        keys += sample["__key__"]
    return keys


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
    samples = added(read("x.tar"), key_rule=lambda name: first_dot(name.replace("labels", "images")))
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
        ("abc", "abcd", r"y\.tar has the sample 'd', but x\.tar has ended", "abc", 1),
        ("abcd", "abd", r"y\.tar has the sample 'd', but x\.tar has the sample 'c'", "abd", 1),
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    keys=st.permutations("abcdef"),
    others=st.none() | st.permutations("abcdef"),
    lost=st.tuples(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"))),
)
def test_no_sample_gets_the_columns_of_another_and_those_in_order_get_theirs(
    keys: list[str], others: list[str] | None, lost: tuple[set[str], set[str]]
) -> None:
    ours = [key for key in keys if key not in lost[0]]
    theirs = [key for key in others or keys if key not in lost[1]]
    first(*ours)
    second(*theirs)
    found = whole(added(read("x.tar"), on_error="skip"))
    assert set(found) <= {*ours} & {*theirs}
    assert others or found == "".join(key for key in ours if key in theirs)
    if ours and ours != theirs:
        with pytest.raises(MisalignedShardsError):
            whole(added(read("x.tar")))


def test_a_bad_sample_of_the_parallel_shard_is_skipped_with_its_reason() -> None:
    first("a", "b", "c")
    twice: dict[str, bytes | str] = {"__key__": "b", "txt": "1", "TXT": "2"}
    build_shard("y.tar", [{"__key__": "a", "txt": "text a"}, twice, {"__key__": "c", "txt": "text c"}])
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
def test_an_unreadable_parallel_shard(damage: str) -> None:
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
    copied = ({**sample, "__url__": "".join(list(sample["__url__"]))} for sample in read("x.tar", "x2.tar", "x2.tar"))
    assert whole(added(copied)) == "ababab"


def opened() -> list[str]:
    return [Path(file.path).name for file in psutil.Process().open_files() if file.path.endswith(".tar")]


def test_two_shards_are_open_at_a_time_and_closed_by_an_interruption() -> None:
    for shard in range(2):
        build_shard(f"x{shard}.tar", [{"__key__": str(number), "jpg": bytes(50_000)} for number in range(20)])
        build_shard(f"y{shard}.tar", [{"__key__": str(number), "txt": bytes(50_000)} for number in range(20)])
    samples = added(read("x0.tar", "x1.tar"))
    next(samples)
    assert sorted(opened()) == ["x0.tar", "y0.tar"]
    for _ in range(20):
        next(samples)
    assert sorted(opened()) == ["x1.tar", "y1.tar"]
    samples.close()  # type: ignore[attr-defined]  # it is a generator
    assert opened() == []
