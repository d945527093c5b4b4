"""Base class of stages that buffer samples, and combine them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.stage import SnapshotStage, unpack_positions
from wds_datapipes.samples.sample_buffer import SampleBuffer
from wds_datapipes.shards.position import SamplePosition

T_co = TypeVar("T_co", covariant=True)


class BufferingStage(SnapshotStage[T_co]):
    """Base class of stages whose items consist of several samples, which they hold in a `SampleBuffer`."""

    rereads_samples = True
    combines_samples = True
    holds_items = True
    can_reshard = True

    def __init__(self) -> None:
        super().__init__()
        self._buffer = SampleBuffer()
        self._loaded: SampleBuffer | None = None

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples.

        Raises:
            StateError: an earlier stage is declared stateless, but yields several items for one sample.
        """
        buffer = self._loaded or self._buffer
        if buffer.is_ambiguous:
            raise StateError(
                f"{name_of(self)} records its buffered items by their positions, but an earlier stage that is declared "
                "stateless yields several items for one sample. Do not declare that stage stateless"
            )
        return {"waiting": buffer.waiting.contents()}

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:  # noqa: ARG002 - no later stage buffers samples
        """Load a state, from which the next iteration resumes.

        Args:
            state: the result of `state_dict`.
            again: empty, since items that combine several samples have no position.

        Raises:
            StateError: the state is corrupt.
        """
        waiting = unpack_positions(state.get("waiting", ()))
        if len({position.identity for position in waiting}) < len(waiting):
            raise StateError(f"The state of {name_of(self)} is corrupt: it lists a buffered sample twice")
        self._loaded = SampleBuffer(waiting, state.get("cut", 0))

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the first sample of the item that was yielded last."""
        return None if self.source_position() is None else (lambda: self._buffer.at)

    def _begin_buffer(self) -> SampleBuffer:
        """Start an epoch, from the loaded state if there is one."""
        self._buffer, self._loaded = self._loaded or SampleBuffer(), None
        return self._buffer
