"""Fields selected and renamed by patterns, as tables and as laws."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.counters import Counters
from wds_datapipes.errors import DuplicateKeyError, MissingFieldError
from wds_datapipes.on_error.policy import CountedErrors
from wds_datapipes.samples.fields import Lacking, Missing
from wds_datapipes.samples.select import extract_keys, rename_keys, select_fields
from wds_datapipes.types import Sample

META = {"__key__": "k", "__url__": "s.tar", "__local_path__": "/s.tar"}
SAMPLE: Sample = {**META, "jpg": 1, "cls": 2, "seg.png": None, "Left.JPG": 4}


@pytest.mark.parametrize(
    ("pairs", "options", "expected"),
    [
        ([("image", "jpg")], {}, {"image": 1}),
        ([("image", "*.png"), ("label", "cls")], {}, {"label": 2, "image": None}),  # in the order of the sample
        ([("image", "LEFT.*")], {}, {"image": 4}),  # case is ignored, on either side
        ([("image", "jpg")], {"keep_unselected": True}, {"image": 1, "cls": 2, "seg.png": None, "Left.JPG": 4}),
        ([("rest", "*.jpg"), ("image", "jpg")], {}, {"image": 1, "rest": 4}),  # the last rule that matches
        ([("gone", "gif"), ("label", "cls")], {"must_match": False}, {"label": 2}),
        ([("image", "*.jpg")], {"duplicate_is_error": False}, {"image": 1}),
        (
            [("cls", "jpg")],
            {"keep_unselected": True, "duplicate_is_error": False},
            {"cls": 1, "seg.png": None, "Left.JPG": 4},
        ),
        ([("cls", "jpg"), ("jpg", "cls")], {}, {"cls": 1, "jpg": 2}),
        ([("all", "*")], {"duplicate_is_error": False}, {"all": 1}),  # no metadata
        ([("id", "__key__")], {}, {"id": "k"}),
    ],
)
def test_rename_keys(pairs: list[tuple[str, str]], options: dict[str, Any], expected: Sample) -> None:
    (new,) = rename_keys([SAMPLE], pairs, {}, **options)
    assert new == {**META, **expected}
    assert list(new)[:3] == list(META)


def test_invalid_rules() -> None:
    missing = r"a field that matches 'gif' to rename to 'image', but the sample 'k' of s"
    with pytest.raises(MissingFieldError, match=missing):
        list(rename_keys([SAMPLE], [("image", "gif")], {}))
    with pytest.raises(DuplicateKeyError, match=naming("'jpg'", "'Left.JPG'", "'k'", "s.tar", "'image'")):
        list(rename_keys([SAMPLE], [("image", "*.jpg")], {}))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["jpg;gif", "cls"], (1, 2)),
        ([["gif", "jpg"], "cls"], (1, 2)),
        (["left.jpg", "__key__", "__url__"], (4, "k", "s.tar")),
        ([".cls"], (2,)),
        (["[ab]ls;[cd]ls"], (2,)),
    ],
)
def test_extract_keys(patterns: list[Any], expected: tuple[Any, ...]) -> None:
    assert list(extract_keys([SAMPLE, SAMPLE], patterns)) == [expected, expected]


def test_a_tuple_never_shrinks() -> None:
    assert list(extract_keys([SAMPLE], ["gif", "cls", "*.gif"], missing="none")) == [(None, 2, None)]
    with pytest.raises(MissingFieldError, match=naming("'gif;bmp'", "'k'", "s.tar", "'jpg', 'cls'")):
        list(extract_keys([SAMPLE], ["cls", "gif;bmp"]))


@pytest.mark.parametrize("missing", ["raise", "none"])
@pytest.mark.parametrize("pattern", ["*.jpg", "jpg;cls", ["jpg", "cls"]])
def test_a_pattern_for_one_field_that_matches_two(pattern: Any, missing: Missing) -> None:
    with pytest.raises(DuplicateKeyError, match=r"matches \['jpg', '(Left.JPG|cls)'\] of the sample 'k' of s.tar"):
        list(extract_keys([SAMPLE], [pattern], missing=missing))


@pytest.mark.parametrize(
    ("patterns", "missing", "expected"),
    [
        (["cls", "jpg"], "raise", {"jpg": 1, "cls": 2}),
        (["*.jpg;gif"], "raise", {"jpg": 1, "Left.JPG": 4}),
        (["__key__"], "raise", {}),
    ],
)
def test_select_fields(patterns: list[str], missing: Lacking, expected: Sample) -> None:
    assert list(select_fields([SAMPLE], patterns, missing=missing)) == [{**META, **expected}]


def test_a_missing_selected_field() -> None:
    with pytest.raises(MissingFieldError, match=naming("select_fields", "'gif'", "'k'")):
        list(select_fields([SAMPLE], ["cls", "gif"]))
    counters = Counters()
    skip: Any = CountedErrors("skip", counters)
    assert list(select_fields([SAMPLE, {"gif": 1, "cls": 2}], ["cls", "gif"], missing="skip")) == [{"gif": 1, "cls": 2}]
    assert counters.entries == 0, "what was not asked for is no error"
    assert list(select_fields([SAMPLE], ["cls", "gif"], on_error=skip)) == []
    assert counters.entries == 1
    with pytest.raises(TypeError, match=naming("select_fields", "dicts", "tuple")):
        list(select_fields([(1, 2)], ["cls"], on_error="skip"))  # type: ignore[list-item]  # the mistake that is tested


NAMES = st.sampled_from(["a", "b", "c", "a.b", "b.a", "c.a", "__key__", "__url__"])
SAMPLES = st.lists(st.dictionaries(NAMES, st.integers(0, 9)), max_size=5)
PATTERNS = st.sampled_from(["a", "b", "*.a", "a*", "*", "?", "c", "[ab]", "zz", "*.b", "__key__"])


def matches(pattern: str, field: str) -> bool:
    found = fnmatchcase(field, pattern) or fnmatchcase(f".{field}", pattern)
    return found and (field[:2] == "__") == (pattern[:2] == "__")


@settings(max_examples=40)
@given(samples=SAMPLES, patterns=st.lists(PATTERNS, min_size=1, max_size=3), missing=st.sampled_from(["keep", "skip"]))
def test_matching_fields_are_selected(samples: list[Sample], patterns: list[str], missing: Lacking) -> None:
    before = copy.deepcopy(samples)
    expected = [
        {field: sample[field] for field in sample if field[:2] == "__" or any(matches(p, field) for p in patterns)}
        for sample in samples
        if missing == "keep" or all(any(matches(p, field) for field in sample) for p in patterns)
    ]
    assert list(select_fields(samples, patterns, missing=missing)) == expected
    assert samples == before
