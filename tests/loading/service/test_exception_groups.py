"""Exception groups that user code raises in a worker: they arrive with their classes and their text."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wds_datapipes import ShardList, ShardReadingService
from wds_datapipes.loading.transport.errors import GROUP_DEPTH, SendableError
from wds_datapipes.testing import build_shard

from torchdata.dataloader2 import DataLoader2  # isort: skip  # its banner is silenced by the imports above

if TYPE_CHECKING:
    from typing_extensions import Self

#: Errors by name, and what arrives of each: the class, and those of its members. Python 3.10 has no groups.
ERRORS: dict[str, BaseException] = {}
SHAPES: dict[str, Any] = {}

if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup

    class Derived(ExceptionGroup[Exception]):
        """A group of a derived class."""

    class Choosy(ExceptionGroup[Exception]):
        """A group whose arguments differ from those of a group."""

        def __new__(cls, number: int) -> Self:
            return super().__new__(cls, "choosy", [ValueError(number)])

        def __init__(self, number: int) -> None:
            pass

    def nested(depth: int) -> Exception:
        return ExceptionGroup(f"level {depth}", [nested(depth - 1)]) if depth else ValueError("the leaf")

    class Local(Exception):
        """Cannot be pickled, because its name is that of another class."""

    Local.__qualname__ = "nowhere"

    ERRORS = {
        "plain": ExceptionGroup("two of them", [ValueError("the first"), KeyError("the second")]),
        "nested": ExceptionGroup("out", [ExceptionGroup("in", [OSError(2, "no file"), StopIteration(3)])]),
        "of anything": BaseExceptionGroup("any", [KeyboardInterrupt("the first"), ValueError("the second")]),
        "derived": Derived("own class", [TypeError("the first")]),
        "choosy": Choosy(7),
        "unpicklable": ExceptionGroup("odd", [Local("the first"), ValueError(print, lambda: 0)]),
        "deep": nested(100),
    }
    deep: Any = "RuntimeError"
    for _ in range(GROUP_DEPTH):
        deep = ("ExceptionGroup", [deep])
    SHAPES = {
        "plain": ("ExceptionGroup", ["ValueError", "KeyError"]),
        "nested": ("ExceptionGroup", [("ExceptionGroup", ["FileNotFoundError", "RuntimeError"])]),
        "of anything": ("BaseExceptionGroup", ["KeyboardInterrupt", "ValueError"]),
        "derived": ("Derived", ["TypeError"]),
        "choosy": ("ExceptionGroup", ["ValueError"]),
        "unpicklable": ("ExceptionGroup", ["RuntimeError", "ValueError"]),
        "deep": deep,
    }


def shape(error: Any) -> Any:
    """Return the name of its class; for a group, with those of its members."""
    name = type(error).__name__
    return (name, list(map(shape, error.exceptions))) if hasattr(error, "exceptions") else name


def fail(name: str, sample: Any) -> Any:
    if sample["__key__"] == "2":
        raise ERRORS[name]
    return sample["__key__"]


def test_a_group_arrives_with_all_its_members() -> None:
    for name, error in ERRORS.items():
        sent = pickle.loads(pickle.dumps(SendableError((type(error), error, None), "in worker process 0")))
        with pytest.raises(BaseException, match=rf"Caught {type(error).__name__} in worker process 0") as caught:
            sent.reraise()
        assert shape(caught.value) == SHAPES[name]


@pytest.mark.usefixtures("nothing_left")
def test_a_group_that_a_worker_raises_is_raised_by_the_loader(tmp_path: Path) -> None:
    build_shard(tmp_path / "a.tar", [{"__key__": str(number), "txt": b""} for number in range(4)])
    for name in SHAPES.keys() & {"plain", "of anything"}:
        pipe = ShardList(str(tmp_path / "a.tar")).sharding_filter().load_wds_shards().group_samples()
        loader = DataLoader2(pipe.map(partial(fail, name)), reading_service=ShardReadingService(1))
        with loader, pytest.raises(BaseException, match=r"(?s)Caught .* 0, .*a\.tar.*the second") as caught:
            list(loader)
        assert shape(caught.value) == SHAPES[name]
