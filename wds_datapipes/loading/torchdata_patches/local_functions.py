"""Lambdas, local functions and local classes in pipelines: copying them in a process, and refusing them in another.

pickle stores functions and classes by name, and finds only those at the top level of a module by it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from wds_datapipes.datapipes import graph


def copy_pipeline(pipe: Any) -> Any:
    """Return a copy of a pipeline, or of a reading service, for this process.

    Whatever cannot be pickled is copied by `copy.deepcopy`, to which functions and classes are values; the rest by
    dill, if it is installed, which copies some locks and files.
    """
    try:
        data = pickle.dumps(pipe)
    except Exception:  # noqa: BLE001  pickling runs user code, and any exception is the answer
        try:
            return copy.deepcopy(pipe)
        except Exception:  # noqa: BLE001  so does copying
            from wds_datapipes.loading.torchdata_api import clone  # torchdata is optional

            return clone(pipe)
    return pickle.loads(data)  # noqa: S301  made here


@contextmanager
def explain_worker_pickling(method: str) -> Iterator[None]:
    """Say what to do if the block fails because it sends a pipeline to workers by pickle.

    Args:
        method: the start method of the workers.

    Raises:
        PicklingError: the pipeline cannot be pickled.
    """
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if method == "fork" or not any(word in str(error) for word in ("pickle", "local object")):
            raise
        raise pickle.PicklingError(
            f"Workers that are started with {method!r} receive the pipeline and its functions by pickle, which stores "
            f"functions and classes by name ({type(error).__name__}: {error}). Define them at the top level of a "
            "module, with functools.partial for parameters; or install the package dill, with which torch pickles "
            'functions by value; or pass multiprocessing_context="fork"'
        ) from error


@cache
def find_local_classes() -> None:
    """Let torch find the stages of a pipeline with local classes, or with lambdas in lists and dictionaries.

    torch finds stages by pickling each of them, and pickle finds no local functions and classes. So its pickles, which
    are never unpickled, store no functions and classes.
    """
    module = ModuleType(pickle.__name__)
    vars(module).update({**vars(pickle), "Pickler": _Finder})
    setattr(graph, "pickle", module)


def _stub() -> None:
    """Stand for an object that is not pickled."""


class _Finder(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (_stub, ()) if isinstance(value, FunctionType | type) and value is not _stub else NotImplemented
