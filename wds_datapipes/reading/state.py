"""The state of a pipeline, as loaders use it."""

from __future__ import annotations

from wds_datapipes.pipes.state import State, check_state, lasts, load_state, renewed, save_state, stateful

__all__ = ["State", "check_state", "lasts", "load_state", "renewed", "save_state", "stateful"]
