"""The base class of stages that hold samples back and record their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.roles import Buffer
from wds_datapipes.pipes.stage import FunctionStage, SnapshotStage, position_reader_of
from wds_datapipes.samples.position_buffer import SampleBuffer
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import SamplePosition, unpack_positions

T_co = TypeVar("T_co", covariant=True)


class BufferingStage(Buffer, FunctionStage[T_co], SnapshotStage[T_co]):
    """Base class of stages whose function holds samples back and records their positions."""

    is_stateless = False
    rereads_samples = True
    can_reshard = True

    def __init__(self, source: Any, /, **options: Any) -> None:
        super().__init__(source, **options)
        self._state = self._progress({})

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples.

        Raises:
            StateError: an earlier stage is declared stateless, but yields several items for a sample.
        """
        progress = self._current()
        if progress.is_ambiguous:
            raise StateError(
                f"{name_of(self)} records its buffered items by their positions, but an earlier stage that is declared "
                "stateless yields several items for one sample. Do not declare that stage stateless"
            )
        return {"waiting": progress.contents()}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:
        """Load a state from which the next iteration resumes.

        Args:
            state: the result of `state_dict`, or ``{}`` if only the samples of ``again`` remain.
            again: the samples that later stages have buffered; they are yielded first.

        Raises:
            StateError: the state is corrupt.
        """
        waiting = unpack_positions(state.get("waiting", ()))
        is_distinct = len({position.identity for position in waiting}) == len(waiting)
        if not is_distinct or any(-1 < position.end <= position.start for position in waiting):
            raise StateError(f"The state of {name_of(self)} is corrupt: it lists a buffered sample twice, or none")
        self._loaded = self._progress(state, waiting, again)

    def position_reader(self) -> Callable[[], SamplePosition] | None:
        """Return a function that returns the position of the (first) sample of the last item yielded."""
        return None if position_reader_of(self.source) is None else (lambda: self._state.at)

    def _progress(
        self,
        state: Mapping[str, Any],
        waiting: Iterable[SamplePosition] = (),
        again: Awaited = NONE_AWAITED,  # noqa: ARG002 - no stage after a batch buffers samples
    ) -> Any:
        """Return the progress stored in a state, or that at the beginning of an epoch."""
        return SampleBuffer(waiting, state.get("cut", 0))

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        known = {"buffer": self._start_progress(self._progress({})), "position": position_reader_of(self.source)}
        return {**super().function_options(), **known}
