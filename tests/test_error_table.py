"""Every error of the package: its place in the hierarchy, and how it is sent to another process."""

from __future__ import annotations

import builtins
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from error_facts import naming
from torch._utils import ExceptionWrapper
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import errors
from wds_datapipes.index import read_index

ERRORS: dict[str, type[Exception]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
}


def test_the_documented_tree_is_accurate() -> None:
    parents = ["WdsError"]
    drawn = {"WdsError": (Exception,)}
    for line in str(errors.__doc__).splitlines():
        if match := re.match(r"(\s*[│ ]*)[├└]── (\w+)(?: \((\w+)\))?", line):
            indent, name, other = match.groups()
            depth = (len(indent) - 4) // 4 + 1
            del parents[depth:]
            bases = (parents[-1], other) if other else (parents[-1],)
            drawn[name] = tuple(getattr(errors, base, None) or getattr(builtins, base) for base in bases)
            parents.append(name)
    assert drawn == {name: error.__bases__ for name, error in ERRORS.items()}


def test_an_error_crosses_to_another_process_with_its_type_and_text() -> None:
    for kind in ERRORS.values():
        error = kind("x.tar holds 'a', at byte 512: {x} %s")
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied)) == (kind, str(error))
        # Dask creates received exceptions with ``__new__``, which fails if the first builtin base is not the largest.
        assert type(kind.__new__(kind, "x")) is kind
        # A DataLoader rebuilds an error from its class and its traceback as text.
        wrapped = pickle.loads(pickle.dumps(ExceptionWrapper((kind, error, None), where="in a worker")))
        with pytest.raises(kind, match=r"x\.tar holds 'a', at byte 512: \{x\} %s"):
            wrapped.reraise()


def read_failing(_folder: Path) -> None:
    """The memory of this process at address 0 is a file that can be opened but not read."""
    list(IterableWrapper(["/proc/self/mem"]).load_wds_shards())


@pytest.mark.parametrize(
    ("kind", "situation", "text"),
    [
        (errors.ShardReadError, read_failing, r"/proc/self/mem could not be read to its end: OSError"),
        (
            errors.CacheError,
            lambda _: list(IterableWrapper([threading.Lock()], deepcopy=False).cache_samples()),
            r"cache_samples cannot cache an item of type lock: pickling it raised TypeError",
        ),
        (errors.MissingSidecarError, lambda folder: read_index(f"{folder}/x.wdsidx"), "there is no such file"),
    ],
)
def test_an_error_is_raised_by_its_situation(
    kind: type[Exception], situation: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text):
        situation(tmp_path)


def test_tests_compare_whole_facts_of_messages_in_any_order() -> None:
    message = "x.tar holds 'a',\nat byte 5120."
    assert re.search(naming("'a'", "x.tar", 5120), message)
    for other in ("'b'", 512, 120, "tar hold", "byte 512"):
        assert not re.search(naming("x.tar", other), message)
