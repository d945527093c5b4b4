"""Handlers of webdataset, passed as ``on_error``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import webdataset

from wds_datapipes.on_error.policy import ErrorPolicy


@pytest.mark.parametrize(
    ("handler", "answers", "warned"),
    [
        (webdataset.warn_and_continue, [True] * 3, 1),
        (webdataset.ignore_and_continue, [True] * 3, 0),
        (webdataset.warn_and_stop, [False] * 3, 3),
        (webdataset.ignore_and_stop, [False] * 3, 0),
    ],
)
def test_a_handler_of_webdataset_does_what_its_name_says_and_never_sleeps(
    handler: Callable[[Exception], bool], answers: list[bool], warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", None)  # calling it would be an error
    policy = ErrorPolicy(handler, "a_stage")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [policy.handle(ValueError("bad")) for _ in range(3)] == answers
    assert len(caught) == warned


def test_the_handler_of_webdataset_that_raises() -> None:
    with pytest.raises(ValueError, match="bad"):
        ErrorPolicy(webdataset.reraise_exception, "a_stage").handle(ValueError("bad"))
