"""How stages handle errors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes.errors import (
    ErrorBudgetError,
    MissingDependencyError,
    TruncatedShardError,
    UnknownSchemeError,
    UnsafeInputError,
)
from wds_datapipes.on_error.policy import ErrorBudget, ErrorPolicy, OnError, read_quarantine


def handled(on_error: OnError, *errors: Exception) -> list[bool]:
    policy = ErrorPolicy(on_error, "a_stage")
    answers = [policy.handle(error) for error in errors]
    policy.finish()
    return answers


def test_warn_reports_the_first_of_each_kind_and_the_counts_at_the_end() -> None:
    errors = [
        TruncatedShardError("1.tar ends"),
        ValueError("bad"),
        TruncatedShardError("2.tar ends"),
        ValueError("worse"),
    ]
    with pytest.warns(UserWarning, match="skipped") as caught:
        assert handled("warn", *errors, TruncatedShardError("3.tar ends")) == [True] * 5
    assert [str(warning.message) for warning in caught] == [
        "a_stage skipped an item: TruncatedShardError: 1.tar ends",
        "a_stage skipped an item: ValueError: bad",
        "a_stage skipped 5 items: 3 x TruncatedShardError, 2 x ValueError",
    ]


def test_a_handler_decides() -> None:
    seen: list[Exception] = []

    def handler(error: Exception) -> bool:
        seen.append(error)
        return isinstance(error, ValueError)

    errors = [ValueError("bad"), TruncatedShardError("x.tar ends")]
    assert handled(handler, *errors) == [True, False]
    assert seen == errors
    assert handled("skip", *errors) == [True, True]
    with pytest.raises(ValueError, match="bad") as caught:
        handled("raise", *errors)
    assert caught.value is errors[0]


@pytest.mark.parametrize("kind", [MissingDependencyError, UnknownSchemeError, UnsafeInputError])
@pytest.mark.parametrize("on_error", ["skip", lambda error: True])
def test_errors_of_the_pipeline_are_never_skipped(kind: type[Exception], on_error: OnError) -> None:
    with pytest.raises(kind, match="set it up"):
        handled(on_error, kind("set it up"))


# budgets


def passed(budget: ErrorBudget, pattern: str) -> tuple[int, str]:
    """Try items, and fail for "x"; return the number skipped, and the final error, if any."""
    policy = ErrorPolicy(budget, "a_stage")
    count = 0
    for letter in policy.counted(pattern):
        if letter == "x":
            try:
                assert policy.handle(ValueError(f"item {policy.tried}"))
            except ErrorBudgetError as error:
                return count, f"{error} (from {error.__cause__!r})"
            count += 1
    return count, ""


def test_a_budget_of_errors() -> None:
    with pytest.warns(UserWarning, match="skipped") as caught:
        assert passed(ErrorBudget(max_errors=2), "xox") == (2, "")
    assert len(caught) == 1  # the rest is reported at the end of the pass
    budget = ErrorBudget(max_errors=2, warn=False)
    text = (
        "a_stage skipped 3 of 6 items (3 x ValueError), 1 of them in a row, which is more than max_errors=2 "
        "allows. The last: ValueError: item 6 (from ValueError('item 6'))"
    )
    assert passed(budget, "xooxoxo") == (2, text)
    assert passed(ErrorBudget(max_errors=0, warn=False), "oox")[0] == 0


def test_a_budget_of_errors_in_a_row() -> None:
    budget = ErrorBudget(max_consecutive=2, warn=False)
    assert passed(budget, "xxoxxoxx") == (6, "")
    count, text = passed(budget, "xxoxxxo")
    assert count == 4
    assert "skipped 5 of 6 items" in text
    assert "3 of them in a row, which is more than max_consecutive=2 allows" in text


@given(st.text("ox", max_size=60), st.sampled_from([0, 0.1, 0.5, 1]), st.integers(0, 20))
def test_a_budget_of_a_share(pattern: str, rate: float, after: int) -> None:
    expected = next(
        (n for n in range(after + 1, len(pattern) + 1) if pattern[n - 1] == "x" and pattern[:n].count("x") > rate * n),
        None,
    )
    count, text = passed(ErrorBudget(max_rate=rate, after=after, warn=False), pattern)
    if expected is None:
        assert (count, text) == (pattern.count("x"), "")
    else:
        assert count == pattern[:expected].count("x") - 1
        assert f"skipped {count + 1} of {expected} items" in text


class Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def test_an_error_without_a_message_is_skipped_like_any_other(tmp_path: Path) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == "1":
            raise Unprintable
        return sample

    samples = [{"__key__": str(number), "txt": "a"} for number in range(3)]
    budget = ErrorBudget(max_errors=5, quarantine=tmp_path / "skipped")
    for on_error in ("skip", "warn", budget):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            pipe = IterableWrapper(samples).map_samples(fail, on_error=on_error)
            assert [sample["__key__"] for sample in pipe] == ["0", "2"]
        assert all("__str__ raised KeyError" in str(each.message) for each in found)
    assert [item.reason for item in read_quarantine(tmp_path / "skipped")] == [
        "it has no message: its __str__ raised KeyError"
    ]
    with pytest.raises(ErrorBudgetError, match="Unprintable: it has no message"):
        list(IterableWrapper(samples).map_samples(fail, on_error=ErrorBudget(max_errors=0, warn=False)))
