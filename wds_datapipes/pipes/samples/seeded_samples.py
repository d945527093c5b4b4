"""The base class of stages that draw random numbers for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.instance import instance_of
from wds_datapipes.pipes.stage import FunctionStage, SnapshotStage, Stage, position_reader_of
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.sampling import SampleSeeds
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited, ItemCounter

T_co = TypeVar("T_co", covariant=True)


class SeedingStage(SeededStage, FunctionStage[T_co], SnapshotStage[T_co]):
    """Base class of stages whose function gets a seed for each sample that is independent of process and order.

    Attributes:
        seeded_by: a name; stages with different names draw different numbers for the same sample.
    """

    shares_seed = True
    can_reshard = True
    seeded_by: str
    _own_seed = 0
    _state = ItemCounter()

    @property
    def has_state(self) -> bool:  # type: ignore[override]  # it depends on the stages before
        """Whether it counts items, because a user's stage may hold them back, so that their positions are unknown."""
        for stage in graph_of(self.source).stages:
            known, own = declared(stage), type(stage)
            if known.position_reader() is not None:
                return False
            if known.has_state and own.load_resumed_state is Stage.load_resumed_state:
                return True
        return False

    @property
    def is_stateless(self) -> bool:  # type: ignore[override]  # as above
        """Whether it counts no items."""
        return not self.has_state

    def snapshot(self) -> dict[str, Any]:
        """Return the number of items that neither their shards and keys nor their positions identify."""
        return {"count": self._current().count}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:  # noqa: ARG002 - users' stages are never read again
        """Load a state from which the next iteration resumes."""
        self._loaded = ItemCounter(state.get("count", 0))

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        self._own_seed = self.take_seed()

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        instance = instance_of(self)
        seeds = SampleSeeds(
            self.seeded_by,
            self._own_seed,
            instance=instance,
            repeats=any(declared(each).repeats_shards() for each in graph_of(self.source).stages),
            counter=self._start_progress(ItemCounter()),
            position=None if self.has_state else position_reader_of(self.source),
        )
        return {**super().function_options(), "seeds": seeds}
