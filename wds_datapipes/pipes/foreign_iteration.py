"""Stages of torch and of other packages in a pipeline that a loader of this package runs: faster, and with reasons.

Only the objects of this pipeline change, and no class of torch.
"""

from __future__ import annotations

from typing import Any

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.foreign_calls import explain_collate
from wds_datapipes.pipes.graph import graph_of


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
        explain_collate(stage)
