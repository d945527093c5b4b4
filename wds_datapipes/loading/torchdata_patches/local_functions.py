"""Lambdas, local functions and local classes in pipelines: copying them in a process, and refusing them in another.

pickle stores functions and classes by name, and finds only those at the top level of a module by it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

from wds_datapipes.datapipes import IterDataPipe, MapDataPipe, graph
from wds_datapipes.loading.transport.serialization import describe, takes
from wds_datapipes.pipes.inspection import functional_name_of, sources_of, upstream

#: The exceptions of pickling and copying, which other code may raise as well.
ERRORS = (pickle.PickleError, AttributeError, TypeError)


def copy_pipeline(pipe: Any) -> Any:
    """Return a copy of a pipeline, or of a reading service, for this process.

    Whatever cannot be pickled is copied by `copy.deepcopy`, to which functions and classes are values.

    Raises:
        PicklingError: a stage cannot be copied, since it holds an open file, a lock or the like.
    """
    try:
        data = pickle.dumps(pipe)
    except Exception:  # noqa: BLE001  pickling runs user code, and any exception is the answer
        try:
            return copy.deepcopy(pipe)
        except Exception:  # noqa: BLE001  so does copying
            return _clone(pipe)
    return pickle.loads(data)  # noqa: S301  made here


def _clone(pipe: Any) -> Any:
    """Return a copy made by dill, if it is installed; it copies some locks and files."""
    from wds_datapipes.loading.torchdata_api import clone  # torchdata is optional

    try:
        return clone(pipe)
    except ERRORS as error:
        if not isinstance(pipe, IterDataPipe | MapDataPipe):
            raise
        culprit = _find_culprit(upstream(pipe), _copy_alone)
        raise pickle.PicklingError(
            f"DataLoader2 copies its pipeline, but {culprit} ({type(error).__name__}: {error}). Create it in "
            f"__iter__, or leave it out of the state that __getstate__ returns"
        ) from error


@contextmanager
def explain_worker_pickling(service: Any, pipe: Any, method: str) -> Iterator[None]:
    """Name the culprit if the block fails because it sends a pipeline to workers by pickle.

    Args:
        service: the reading service.
        pipe: the pipeline.
        method: the start method of the workers.

    Raises:
        PicklingError: the pipeline cannot be pickled.
    """
    stages = list(upstream(pipe))  # before the block takes the pipeline apart
    try:
        yield
    except ERRORS as error:
        from wds_datapipes.loading.torchdata_api import attach_wrapper  # torchdata is optional

        if not service.num_workers or method == "fork":
            raise
        functions = {name: getattr(service, name) for name in ("worker_init_fn", "worker_reset_fn")}
        named = [(name, each) for name, each in functions.items() if not takes(pickle.dumps, each)]
        if named:
            culprit = f"{named[0][0]} is {describe(named[0][1], pickle.dumps)}"
        elif all(takes(pickle.dumps, attach_wrapper(stage)) for stage in stages):  # by dill, if it is installed
            raise
        else:
            culprit = _find_culprit(stages, _pickle_alone)
        raise pickle.PicklingError(
            f"Workers that are started with {method!r} receive the pipeline by pickle, but {culprit} "
            f"({type(error).__name__}: {error}). Functions and classes are pickled by name: define them at the top "
            "level of a module, with functools.partial for parameters; or install the package dill, with which torch "
            'pickles functions by value; or pass multiprocessing_context="fork"'
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


def _find_culprit(stages: Iterable[Any], pack: Callable[[Any, Any], object]) -> str:
    """Return which value of which stage ``pack`` rejects."""
    for stage in stages:
        if takes(partial(pack, stage), stage):
            continue
        pack_value, kind = partial(pack, stage), type(stage)
        if not takes(pack_value, kind):
            return f"the stage {kind.__name__} is an instance of {describe(kind, pack_value)}"
        state = stage.__getstate__()
        for key, value in (state if isinstance(state, dict) else vars(stage)).items():
            if not takes(pack_value, value):
                return f"{key!r} of the stage {functional_name_of(stage)} is {describe(value, pack_value)}"
    return "it does not support that"


def _pickle_alone(stage: Any, value: Any) -> None:
    """Pickle a stage, or a value of it, without other stages."""
    _WithoutStages(stage).dump(value)


def _copy_alone(stage: Any, value: Any) -> None:
    copy.deepcopy(value, {id(source): source for source in sources_of(stage)})


def _stub() -> None:
    """Stand for an object that is not pickled."""


class _Finder(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (_stub, ()) if isinstance(value, FunctionType | type) and value is not _stub else NotImplemented


class _WithoutStages(pickle.Pickler):
    def __init__(self, stage: Any) -> None:
        super().__init__(io.BytesIO())
        self._stage = stage

    def reducer_override(self, value: Any) -> Any:
        is_other = isinstance(value, IterDataPipe | MapDataPipe) and value is not self._stage
        return (_stub, ()) if is_other else NotImplemented
