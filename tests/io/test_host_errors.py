"""Errors of the host end a run with any ``on_error``; otherwise, it would continue without its data."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from web_server import QuietHandler, web_server

from wds_datapipes import ErrorBudget, ShardList
from wds_datapipes.errors import CorruptShardError, DecodeError, MissingSidecarError, ShardOpenError, WdsError
from wds_datapipes.io.remote.retry import concerns_all, is_systemic, is_transient
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.testing import build_shard

POLICIES: dict[str, Callable[[], OnError]] = {
    "warn": lambda: "warn",
    "skip": lambda: "skip",
    "budget": lambda: ErrorBudget(max_errors=1000, warn=False),
    "handler": lambda: lambda error: True,
}


@pytest.fixture(params=POLICIES)
def on_error(request: pytest.FixtureRequest) -> OnError:
    return POLICIES[request.param]()


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Prevent this process from opening any more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_many_open_files_end_the_reading_of_files_and_stores(
    tmp_path: Path, on_error: OnError, pauses: list[float]
) -> None:
    shards = [build_shard(tmp_path / f"{n}.tar", [{"__key__": "a", "cls": "1"}]) for n in range(3)]
    with web_server(functools.partial(QuietHandler, directory=str(tmp_path))) as site:
        for urls in (shards, [f"{site}/0.tar"] * 3):
            pipe = ShardList(urls).load_wds_shards(on_error=on_error, read_ahead=0)
            assert len(list(pipe)) == 3
            with no_more_files(), pytest.raises(ShardOpenError, match=r"0\.tar'? cannot .*Too many open files"):
                list(pipe)
    assert pauses == []


def test_an_unwritable_quarantine_list_ends_skipping() -> None:
    budget = ErrorBudget(quarantine="/dev/full", warn=False)
    with pytest.raises(MissingSidecarError, match="No space left"):
        list(IterableWrapper([{"__key__": "a", "cls": b"x"}]).wds_decode(on_error=budget))


def raised(error: Exception, cause: BaseException | None) -> Exception:
    try:
        raise error from cause
    except Exception as found:
        return found


def test_errors_of_the_host_are_recognized() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        error = OSError(number, os.strerror(number))
        outer = raised(DecodeError("x"), raised(ValueError("y"), error))
        for each in (error, raised(ShardOpenError("x"), error), outer):
            assert is_systemic(each)
            assert concerns_all(each)
            assert not is_transient(each)
    for number in (errno.ENOENT, errno.EIO, errno.ECONNRESET, errno.EPIPE):
        assert not is_systemic(raised(WdsError("x"), OSError(number, "")))
    assert is_systemic(MemoryError())
    # A damaged header's request is not a fault of the host.
    assert not is_systemic(raised(CorruptShardError("x"), MemoryError()))
    # An error that refers to itself, and one with an endless chain.
    circle = ValueError("x")
    circle.__context__ = circle
    assert not is_systemic(circle)
