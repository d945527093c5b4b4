"""Fields from a table: joined by key, or by another field."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
from error_facts import naming

from wds_datapipes.counters import Counters
from wds_datapipes.errors import MissingFieldError
from wds_datapipes.on_error.policy import CountedErrors
from wds_datapipes.samples.fields import associate
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
    with pytest.raises(MissingFieldError, match=naming("'b'", "s.tar")):
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
    with pytest.raises(TypeError, match=naming("dicts", "int", "'a'", "s.tar")):
        list(associate(SAMPLES, {"a": 3}.get, on_error="skip"))  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(MissingFieldError, match=naming("'__key__'", "['cls']")):
        list(associate([{"cls": 3}], TABLE.get))
