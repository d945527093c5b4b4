"""Warnings point to the line of the user's code, however the pipeline is run."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.dataloader2 import DataLoader2, InProcessReadingService

from wds_datapipes import ShardReadingService, ShardWriter, TarWriter
from wds_datapipes.user_warnings import warn_user


def damaged() -> IterDataPipe[Any]:
    """A pipeline in which one stage skips two samples and therefore warns twice, with stages after it."""
    samples = IterableWrapper([{"__key__": str(number), "cls": b"x" if number > 2 else b"1"} for number in range(5)])
    pipe: IterDataPipe[Any] = samples.wds_decode(on_error="warn").shuffle_samples(10).to_tuple("__key__", "cls")
    return pipe.batch(2)


RUNS: dict[str, Callable[[IterDataPipe[Any]], Iterable[Any]]] = {
    "alone": lambda pipe: pipe,
    "torch": lambda pipe: DataLoader(pipe, batch_size=None),
    "torchdata": lambda pipe: DataLoader2(pipe, reading_service=InProcessReadingService()),
    "service": lambda pipe: DataLoader2(pipe, reading_service=ShardReadingService()),
}


@pytest.mark.parametrize("run", RUNS)
def test_on_error_warn_points_at_the_loop(run: str) -> None:
    loader = RUNS[run](damaged())
    line = sys._getframe().f_lineno + 2
    with pytest.warns(UserWarning, match="wds_decode skipped") as caught:
        assert sum(len(batch) for batch in loader) == 3
    assert [str(warning.message).partition(":")[0] for warning in caught] == [
        "wds_decode skipped an item",
        "wds_decode skipped 2 items",
    ]
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)] * 2


def test_a_dropped_writer_points_at_the_line_that_drops_it(tmp_path: Path) -> None:
    writer = TarWriter(tmp_path / "a.tar")
    with pytest.warns(UserWarning, match="was not closed") as caught:
        del writer  # no reference is left
    assert [warning.filename for warning in caught] == [__file__]


def test_the_caller_is_named_if_all_code_is_the_packages() -> None:
    names = {"__name__": "wds_datapipes.made_up", "warn_user": warn_user}
    outermost = FunctionType(compile("warn_user('odd')", "made_up.py", "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outermost()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("make", [TarWriter, ShardWriter])
def test_wrong_arguments_of_a_writer_are_one_error(
    make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        make(str(tmp_path / "x.tar"), *range(9))
    gc.collect()
    assert capsys.readouterr().err == ""
