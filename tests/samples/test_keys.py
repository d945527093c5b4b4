"""The rules that split a member's name."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wds_datapipes.samples.keys import first_dot, is_meta, last_dot

NAMES = st.text("ab.A_/ \né", max_size=12)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("dir.v1/a.b.jpg", ("dir.v1/a", "b.jpg"), ("dir.v1/a.b", "jpg")),
        ("A.JPG", ("A", "JPG"), ("A", "JPG")),
        ("a..jpg", ("a", ".jpg"), ("a.", "jpg")),
        ("dir/._a.jpg", None, None),
        ("a.b/c", None, None),
    ],
)
def test_the_tables_of_both_rules(name: str, first: tuple[str, str] | None, last: tuple[str, str] | None) -> None:
    assert first_dot(name) == first
    assert last_dot(name) == last


@given(NAMES)
@example("dir/.hidden.jpg")
@example("..")
def test_the_rules_agree_with_regular_expressions(name: str) -> None:
    for rule, key, field in (first_dot, "[^./]*", "[^/]*"), (last_dot, "[^/]*", "[^./]*"):
        match = re.fullmatch(rf"((?:.*/)?[^./]{key})\.({field})", name, re.DOTALL)
        assert rule(name) == (match.groups() if match else None)


@given(st.text("_a./", max_size=10))
@example("____")
@example("___")
def test_meta_members_agree_with_a_regular_expression(name: str) -> None:
    assert is_meta(name) == (re.match(r"__[^/]*__(\Z|/)", name) is not None)
