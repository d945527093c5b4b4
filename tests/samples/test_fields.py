"""Selecting, renaming and mapping fields, as tables."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from error_facts import naming
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import MissingFieldError
from wds_datapipes.samples.fields import map_dict, map_tuple
from wds_datapipes.samples.select import parse_specs, rename, to_tuple
from wds_datapipes.types import Sample

SAMPLE: Sample = {"__key__": "k", "__url__": "s.tar", "jpg": 1, "cls": 2, "seg.png": None}


@pytest.mark.parametrize("specs", [[], [""], ["  "], [";"], ["jpg", ";;"]])
def test_specs_that_name_nothing(specs: list[str]) -> None:
    with pytest.raises(ValueError, match=r'fields must be given as in "jpg;png", "cls"'):
        parse_specs(specs)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["jpg", "cls"], (1, 2)),
        (["jpg;cls", "cls;jpg"], (1, 2)),
        (["__key__ __url__ jpg"], ("k", "s.tar", 1)),
        (["seg.png;jpg"], (None,)),  # it is there, and None
        (["  jpg;;gif;  cls"], (1, 2)),
    ],
)
def test_to_tuple(specs: list[str], expected: tuple[Any, ...]) -> None:
    assert list(to_tuple([SAMPLE, SAMPLE], specs)) == [expected, expected]
    assert list(to_tuple([SAMPLE], specs, missing="none")) == [expected]


def test_a_field_missing_from_a_tuple() -> None:
    message = (
        r"field 'png;gif' was requested, but the sample 'k' of s\.tar has \['jpg', 'cls', 'seg\.png'\].*jpg;png;webp"
    )
    with pytest.raises(MissingFieldError, match=message):
        list(to_tuple([SAMPLE], ["png;gif"]))
    assert list(to_tuple([SAMPLE], ["png", "jpg"], missing="none")) == [(None, 1)]


@pytest.mark.parametrize(
    ("new", "keep", "expected"),
    [
        ({"image": "png;jpg"}, True, {"cls": 2, "seg.png": None, "image": 1}),
        ({"image": "jpg;cls"}, True, {"seg.png": None, "image": 1}),
        ({"jpg": "cls", "cls": "jpg"}, True, {"seg.png": None, "jpg": 2, "cls": 1}),
        ({"a": "jpg", "b": "jpg"}, False, {"a": 1, "b": 1}),
        ({"key": "__key__"}, False, {"key": "k"}),
    ],
)
def test_rename(new: dict[str, str], keep: bool, expected: dict[str, Any]) -> None:
    assert list(rename([SAMPLE], new, keep=keep)) == [{"__key__": "k", "__url__": "s.tar", **expected}]


def test_map_dict() -> None:
    (mapped,) = map_dict([SAMPLE], {"jpg": str, "cls": lambda value: value + 1})
    assert mapped == {**SAMPLE, "jpg": "1", "cls": 3}
    assert list(mapped) == list(SAMPLE), "the fields stay in their order"


def test_map_tuple() -> None:
    assert list(map_tuple([(1, 2), [3, 4]], [None, str])) == [(1, "2"), (3, "4")]
    assert list(map_tuple([(1, 2)], [str])) == [("1", 2)]
    with pytest.raises(ValueError, match=naming("map_tuple", "3 functions", "2 elements", "tuple")):
        list(map_tuple([(1, 2)], [str, str, str], on_error="skip"))
    with pytest.raises(TypeError, match=naming("map_tuple", "sample", "to_tuple")):
        list(map_tuple([SAMPLE], [str], on_error="skip"))  # type: ignore[list-item]  # the mistake that is tested


def fail(value: object) -> None:
    raise KeyError(value)


@pytest.mark.parametrize(
    ("stage", "note"),
    [
        (
            map_dict([SAMPLE], {"jpg": str, "cls": fail}),
            "raised in map_dict for the field 'cls' of the sample 'k' of s.tar",
        ),
        (map_tuple([(1, 2)], [None, fail]), "raised in map_tuple for element 1 of 2"),
    ],
)
def test_an_error_of_a_function_is_unchanged_and_names_its_sample(stage: Iterator[object], note: str) -> None:
    with pytest.raises(KeyError, match="2") as caught:
        list(stage)
    if sys.version_info >= (3, 11):  # which added notes
        assert caught.value.__notes__ == [note]


FIELDS = st.sampled_from(["a", "b", "c", "d"])
SAMPLES = st.lists(st.dictionaries(FIELDS, st.integers(0, 9)), max_size=6)


@settings(max_examples=40)
@given(samples=SAMPLES, new=st.dictionaries(st.sampled_from(["x", "y", "a"]), FIELDS, min_size=1))
def test_no_stage_changes_its_input_samples(samples: list[Sample], new: dict[str, str]) -> None:
    before = copy.deepcopy(samples)
    assert len(list(to_tuple(samples, ["a", "b;c"], missing="none"))) == len(samples)
    renamed = list(rename(samples, new, on_error="skip"))
    assert len(renamed) == sum(all(old in sample for old in new.values()) for sample in samples)
    assert len(list(map_dict(samples, {"a": str}, on_error="skip"))) == sum("a" in sample for sample in samples)
    assert samples == before
