"""Stages of torch and of other packages in a pipeline that a loader of this package runs: faster, and with reasons.

Only the objects of this pipeline change, and no class of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import default_collate

from wds_datapipes.datapipes import Collator, IterDataPipe
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.inspection import names_of_elements
from wds_datapipes.samples.batching import explain_collation


def adapt_foreign_stages(pipe: Any) -> None:
    """Adapt the stages of other packages; loaders call this at the beginning of an epoch.

    Before each item, torch looks up an attribute that most stages lack, which takes a microsecond. The stages get it,
    with the value that torch assumes. And where ``.collate()`` refuses a batch, the error names the field, its shapes
    or types, and what to do.
    """
    for stage in graph_of(pipe).stages:
        own = vars(stage)
        if isinstance(stage, IterDataPipe) and not hasattr(type(stage), "_is_child_datapipe"):
            own["_is_child_datapipe"] = False
        is_torchs = getattr(type(stage), "_apply_fn", None) is Collator._apply_fn
        if is_torchs and stage.fn is default_collate and stage.input_col is stage.output_col is None:
            own["_apply_fn"] = _ExplainedCollation(names_of_elements(stage))


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
