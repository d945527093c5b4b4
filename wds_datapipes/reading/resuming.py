"""Where an epoch goes on in one worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_datapipes.errors import ChangedShard
from wds_datapipes.pipes.state import load_state, renewed
from wds_datapipes.reading.statetext import read, written

__all__ = ["Resumed"]


@dataclass(frozen=True)
class Resumed:
    """What a worker needs to go on in the middle of an epoch.

    Attributes:
        items: how many items of the epoch were delivered.
        skip: how many of them come after the state, and are made once more, and not delivered.
        stages: the state of the pipeline, or the text of it that a worker has told; None is its beginning.
    """

    items: int
    skip: int
    stages: Sequence[Mapping[str, Any] | None] | str | None

    @property
    def state(self) -> Sequence[Mapping[str, Any] | None] | None:
        """The state of the pipeline.

        Raises:
            StateError: it is a text that is none.
        """
        return read(self.stages) if isinstance(self.stages, str) else self.stages

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values; the state as text, which is not read where it was told."""
        stages = self.stages if self.stages is None or isinstance(self.stages, str) else written(self.stages)
        return {"items": self.items, "skip": self.skip, "stages": stages}

    def renewed(self) -> Resumed:
        """Return where the next epoch begins, if this is the end of one."""
        return Resumed(0, 0, renewed(self.state))

    def load(self, pipe: Any) -> None:
        """Have a pipeline go on from here when it is iterated next."""
        if self.stages is not None:
            load_state(pipe, self.state)

    def pass_over(self, pipe: Any) -> Iterator[Any]:
        """Return an iterator over what was not delivered yet."""
        iterator: Iterator[Any] = iter(pipe)
        end = object()
        for number in range(self.skip):
            if next(iterator, end) is end:
                raise ChangedShard(
                    f"The pipeline has ended {self.skip - number} items before the place where it was to go on. A "
                    "state can be loaded only with the very shards that it was saved with"
                )
        return iterator
