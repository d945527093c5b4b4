"""Where an epoch resumes in one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from wds_datapipes.loading.checkpoint.encoding import decode_state, encode_state
from wds_datapipes.pipes.state.pipeline_state import load_state, next_epoch_state

__all__ = ["WorkerState"]


@dataclass(frozen=True)
class WorkerState:
    """What a worker needs to resume in the middle of an epoch.

    Attributes:
        stages: the state of the pipeline, or the text of it; None is its beginning.
    """

    stages: Sequence[Mapping[str, Any] | None] | str | None

    @property
    def state(self) -> Sequence[Mapping[str, Any] | None] | None:
        """The state of the pipeline.

        Raises:
            StateError: it is a text that is none.
        """
        return decode_state(self.stages) if isinstance(self.stages, str) else self.stages

    @property
    def mark(self) -> int | None:
        """A number that identifies this position in an epoch; None at the beginning of one, and where it is replayed.

        Raises:
            StateError: the state is a text that is none.
        """
        begins = all(set(stage or ()) <= {"lasting", "replayed", "digest"} for stage in self.state or ())
        return None if begins else crc32(str(self.as_dict()["stages"]).encode())

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values; the state as text."""
        stages = self.stages if self.stages is None or isinstance(self.stages, str) else encode_state(self.stages)
        return {"stages": stages}

    def renewed(self) -> WorkerState:
        """Return where the next epoch begins, if this is the end of one."""
        return WorkerState(next_epoch_state(self.state))

    def load(self, pipe: Any) -> None:
        """Have a pipeline resume from here when it is iterated next."""
        if self.stages is not None:
            load_state(pipe, self.state)
