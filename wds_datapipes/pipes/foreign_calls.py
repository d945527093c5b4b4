"""The functional names of torch and torchdata, as methods of this package's stages: errors say what to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial, update_wrapper, wraps
from typing import Any

from torch.utils.data import DataLoader, default_collate

from wds_datapipes.arguments import check_call, check_integer
from wds_datapipes.datapipes import Batcher, Collator, IterDataPipe, Shuffler
from wds_datapipes.datapipes.torchdata_stages import STAGES, import_stages
from wds_datapipes.foreign_names import explain_name
from wds_datapipes.pipes.inspection import names_of_elements
from wds_datapipes.samples.batching import explain_collation


def functional_form(stage: Any, name: str) -> Any:
    """Return what builds the stage with a functional name after another; the first of torchdata imports torchdata.

    Raises:
        AttributeError: there is no such name; the error says what to write for a name of another package.
    """
    if name == "shuffle":
        return partial(_shuffle, stage)
    if name in IterDataPipe.functions or (name in STAGES and import_stages()):
        registered = IterDataPipe.functions[name]
        build: Any = {"batch": BatcherIterDataPipe, "collate": _collate}.get(name, registered)
        return update_wrapper(partial(build, stage), registered, assigned=("__doc__",))
    message = f"{type(stage).__name__!r} object has no attribute {name!r}{explain_name(name)}"
    raise AttributeError(message, name=name, obj=stage)  # lets Python suggest a similar name


def _shuffle(source: Any, *arguments: Any, **options: Any) -> Any:
    """Build torch's ``.shuffle()``, whose own error for wrong arguments also prints one of its ``__del__``."""
    if arguments:
        raise TypeError(
            f".shuffle() takes no positional arguments. To shuffle samples, write .shuffle_samples("
            f"{arguments[0]!r}); to shuffle a list of shards, .shuffle(), before .sharding_filter()"
        )
    check_call(".shuffle()", Shuffler.__init__, (None, source), options, hidden=2)
    check_integer("buffer_size", options.get("buffer_size", 1), 1)
    return IterDataPipe.functions["shuffle"](source, **options)


class BatcherIterDataPipe(Batcher):
    """torch's ``.batch()`` after a stage of this package: the stages after it have explanations as well."""

    _is_child_datapipe = False

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name[:1] == "_" else functional_form(self, name)


def _collate(source: Any, *arguments: Any, **options: Any) -> Any:
    """Build torch's ``.collate()``."""
    stage = IterDataPipe.functions["collate"](source, *arguments, **options)
    explain_collate(stage)
    return stage


def adapt_stage(stage: Any) -> None:
    """Adapt a stage of another package in a pipeline that a loader of this package runs; no class changes.

    Before each item, torch looks up an attribute that most stages lack, which takes a microsecond. The stage gets it,
    with the value that torch assumes. And where ``.collate()`` refuses a batch, the error names the field, its shapes
    or types, and what to do.
    """
    if isinstance(stage, IterDataPipe) and not hasattr(type(stage), "_is_child_datapipe"):
        vars(stage)["_is_child_datapipe"] = False
    explain_collate(stage)


def explain_collate(stage: Any) -> None:
    """Let torch's ``.collate()``, where it refuses a batch, name the field, its shapes or types, and what to do.

    Args:
        stage: any stage; those with another function are left as they are.
    """
    is_torchs = getattr(type(stage), "_apply_fn", None) is Collator._apply_fn
    if is_torchs and stage.fn is default_collate and stage.input_col is stage.output_col is None:
        vars(stage)["_apply_fn"] = _ExplainedCollation(names_of_elements(stage))


class _ExplainedCollation:
    """Collates batches like torch's ``.collate()``.

    Args:
        names: the names of the elements, if they are tuples with known ones.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, batch: Any) -> Any:
        try:
            return default_collate(batch)
        except (RuntimeError, TypeError, LookupError) as error:
            if not (reason := explain_collation(batch, self._names)):
                raise
            raise (RuntimeError if isinstance(error, RuntimeError) else TypeError)(reason) from error


@cache
def explain_samplers() -> None:
    """Let ``DataLoader`` name ``.map_style()`` where it refuses a sampler; the first `IndexedSamples` calls this."""
    if os.environ.get("WDS_DATAPIPES_PATCHES") == "0":
        return
    create = DataLoader.__init__

    @wraps(create)
    def create_or_explain(self: Any, dataset: Any, *arguments: Any, **options: Any) -> None:
        try:
            create(self, dataset, *arguments, **options)
        except ValueError as error:
            if "ampler option" not in str(error) or "map_style" not in dir(type(dataset)):
                raise
            raise ValueError(
                f"{error}. {type(dataset).__name__} orders its samples itself, by order=. For a sampler, pass the "
                "map-style dataset that its .map_style() returns"
            ) from None

    setattr(DataLoader, "__init__", create_or_explain)  # noqa: B010  an assignment is what mypy refuses
