"""Lambdas, local functions and local classes in pipelines: copied within a process, rejected in others.

pickle stores functions and classes by name, and finds only those at the top level of a module.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from wds_datapipes.datapipes import IterDataPipe, MapDataPipe, graph


def copy_pipeline(pipe: Any) -> Any:
    """Return a copy of a pipeline, or of a reading service, for this process.

    If the pipeline cannot be pickled, `copy.deepcopy` copies it, keeping functions and classes as they are; if that
    fails, too, dill does, if installed, which can copy some locks and files.
    """
    try:
        data = pickle.dumps(pipe)
    except Exception:  # noqa: BLE001  pickling runs user code, which may raise anything
        try:
            return copy.deepcopy(pipe)
        except Exception:  # noqa: BLE001  so does copying
            from wds_datapipes.loading.torchdata_api import clone  # torchdata is optional

            return clone(pipe)
    return pickle.loads(data)  # noqa: S301  made here


@contextmanager
def explain_worker_pickling(method: str) -> Iterator[None]:
    """Explain what to do if the block fails because it pickles a pipeline for the workers.

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
            f"Workers started with {method!r} receive the pipeline and its functions by pickle, which stores "
            f"functions and classes by name ({type(error).__name__}: {error}). Define them at the top level of a "
            "module, with functools.partial for parameters; or install the package dill, with which torch pickles "
            'functions by value; or pass multiprocessing_context="fork"'
        ) from error


@cache
def find_local_classes() -> None:
    """Let torch find the stages of pipelines with local classes, or with lambdas in lists and dictionaries.

    torch finds stages by pickling them, and pickle cannot find local functions and classes. Because these pickles are
    never unpickled, they need not contain any functions or classes.
    """
    module = ModuleType(pickle.__name__)
    vars(module).update({**vars(pickle), "Pickler": _Finder})
    setattr(graph, "pickle", module)


def _stub() -> None:
    """Replace an object that is not pickled."""


class _Finder(pickle.Pickler):
    found: list[Any] | None = None

    def reducer_override(self, value: Any) -> Any:
        if self.found is not None and isinstance(value, IterDataPipe | MapDataPipe):
            self.found.append(value)
            parts = [each for each in vars(value).values() if isinstance(each, IterDataPipe | MapDataPipe | Collection)]
            return _stub, (), parts
        return (_stub, ()) if isinstance(value, FunctionType | type) and value is not _stub else NotImplemented


def pickled_stages(pipe: Any) -> list[Any]:
    """Return the stages that torch finds in a pipeline: in what pickle stores of the collections in each stage."""
    finder = _Finder(io.BytesIO())
    finder.found = []
    finder.dump(pipe)
    return finder.found
