"""What torchdata's ``StatefulDataLoader`` saves and loads of a pipeline, and of a `StatefulShards`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterDataPipe

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in
from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards
from wds_datapipes.pipes.state.graph import upstream
from wds_datapipes.user_warnings import warn_user

__all__ = ["check_loaded", "check_saved"]

ADVICE = (
    "Give it StatefulShards(pipe) in place of the pipeline: StatefulDataLoader(StatefulShards(pipe), ...), whose state "
    "is exact in the middle of an epoch"
)


def check_saved(loader: Any, state: Mapping[str, Any]) -> None:
    """Warn of a state that does not tell where its pipeline is.

    Args:
        loader: a ``StatefulDataLoader``.
        state: what it has returned.
    """
    if _is_pipeline(loader.dataset) and _has_begun(state):
        warn_user(
            f"This state of a StatefulDataLoader does not tell where its pipeline is in the epoch, and cannot be "
            f"loaded. {ADVICE}"
        )


def check_loaded(loader: Any, state: Mapping[str, Any]) -> None:
    """Make sure that a loader can go on from a state.

    Args:
        loader: a ``StatefulDataLoader``.
        state: what it is to load.

    Raises:
        StateError: the state does not tell where the pipeline was; or it is that of another rank, or of one whose epoch
            ended while those of others may have gone on.
    """
    if not state:
        return
    if isinstance(loader.dataset, StatefulShards):
        # The loader itself makes the steps again since its workers told where they were.
        loader.dataset.check_ranks(checkpoints_in({**state, "_steps_since_snapshot": 0}))
    elif _is_pipeline(loader.dataset) and _has_begun(state):
        raise StateError(
            f"This state of a StatefulDataLoader was saved behind the first batch, and does not tell where its "
            f"pipeline was: samples would come twice, and others never. {ADVICE}"
        )


def _is_pipeline(data: Any) -> bool:
    """Whether a data set is a pipeline with a stage of ours."""
    return isinstance(data, IterDataPipe) and any(
        type(stage).__module__.partition(".")[0] == "wds_datapipes" for stage in upstream(data)
    )


def _has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a state of a ``StatefulDataLoader`` was saved behind the first batch."""
    steps = state.get("_num_yielded", 0), state.get("_steps_since_snapshot", 0)
    return any(steps) or state.get("_snapshot", {}).get("_snapshot_step", 0) > 0
