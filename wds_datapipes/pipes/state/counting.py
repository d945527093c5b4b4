"""Stages that know how many items have passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wds_datapipes.shards.position import SamplePosition, SkippedCount

__all__ = ["CountingStage"]


class CountingStage:
    """The state of a stage that holds nothing back, and has to know how many items have passed."""

    _passed = SkippedCount()
    _loaded: SkippedCount | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many items have passed in this epoch."""
        return {"passed": (self._loaded or self._passed).count}

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only what passes once more will come.
            again: samples that have passed, wait in later stages, and pass once more.
        """
        self._loaded = SkippedCount(state.get("passed", 0), again)

    def forget_state(self) -> None:
        """Begin anew when it is iterated next."""
        self._loaded = None

    def _begin_counting(self) -> SkippedCount:
        """Begin an epoch, where a loaded state says if there is one."""
        self._passed, self._loaded = self._loaded or SkippedCount(), None
        return self._passed
