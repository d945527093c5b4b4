"""What a stage does with an error."""

from __future__ import annotations

import sys
import warnings

import pytest

from wds_datapipes.core.policy import ErrorPolicy, OnError, check_on_error, note
from wds_datapipes.errors import DecodeError, MissingDependency, TruncatedShard, UnknownScheme, UnsafeCodec


def handled(on_error: OnError, *errors: Exception) -> list[bool]:
    policy = ErrorPolicy(on_error, "a_stage")
    answers = [policy.goes_on(error) for error in errors]
    policy.finish()
    return answers


def test_raise_and_skip() -> None:
    error = TruncatedShard("x.tar ends")
    with pytest.raises(TruncatedShard) as caught:
        handled("raise", error)
    assert caught.value is error
    assert handled("skip", error, ValueError("bad")) == [True, True]


def test_warn_tells_the_first_of_each_kind_and_the_counts_at_the_end() -> None:
    errors = [TruncatedShard("1.tar ends"), ValueError("bad"), TruncatedShard("2.tar ends"), ValueError("worse")]
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert handled("warn", *errors, TruncatedShard("3.tar ends")) == [True] * 5
    assert [str(warning.message) for warning in caught] == [
        "a_stage passed over an item: TruncatedShard: 1.tar ends",
        "a_stage passed over an item: ValueError: bad",
        "a_stage passed over 5 items: 3 x TruncatedShard, 2 x ValueError",
    ]


def test_warn_says_nothing_twice() -> None:
    with pytest.warns(UserWarning, match="1.tar ends") as caught:
        handled("warn", TruncatedShard("1.tar ends"))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handled("warn")
        handled("skip", ValueError("bad"))


def test_a_handler_decides() -> None:
    seen: list[Exception] = []

    def handler(error: Exception) -> bool:
        seen.append(error)
        return isinstance(error, ValueError)

    errors = [ValueError("bad"), TruncatedShard("x.tar ends")]
    assert handled(handler, *errors) == [True, False]
    assert seen == errors


@pytest.mark.parametrize("kind", [MissingDependency, UnknownScheme, UnsafeCodec])
@pytest.mark.parametrize("on_error", ["raise", "warn", "skip", lambda error: True])
def test_what_is_wrong_with_the_pipeline_is_never_passed_over(kind: type[Exception], on_error: OnError) -> None:
    with pytest.raises(kind, match="set it up"):
        handled(on_error, kind("set it up"))


def test_other_errors_of_the_same_families_are_passed_over() -> None:
    assert handled("skip", DecodeError("a"), ImportError("b"), ValueError("c")) == [True] * 3


@pytest.mark.parametrize("on_error", ["ignore", "", None, 3, True, ["skip"]])
def test_what_is_no_policy_is_refused_at_once(on_error: object) -> None:
    with pytest.raises(ValueError, match=r'on_error is "raise", "warn", "skip" or a function .*, not '):
        check_on_error(on_error)


@pytest.mark.parametrize("on_error", ["raise", "warn", "skip", print, lambda error: True])
def test_what_is_a_policy(on_error: object) -> None:
    check_on_error(on_error)


def test_a_note_leaves_the_error_as_it_is() -> None:
    error = ValueError("bad")
    note(error, "in the field 'jpg'")
    assert str(error) == "bad"
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["in the field 'jpg'"]
