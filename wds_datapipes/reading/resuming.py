"""Where an epoch goes on in one worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_datapipes.errors import ChangedShard
from wds_datapipes.pipes.state import load_state, renewed

__all__ = ["Resumed"]


@dataclass(frozen=True)
class Resumed:
    """What a worker needs to go on in the middle of an epoch.

    Attributes:
        items: how many items of the epoch were delivered.
        skip: how many of them come after the state, and are made once more, and not delivered.
        stages: the state of the pipeline; None is its beginning.
    """

    items: int
    skip: int
    stages: Sequence[Mapping[str, Any] | None] | None

    def renewed(self) -> Resumed:
        """Return where the next epoch begins, if this is the end of one."""
        return Resumed(0, 0, renewed(self.stages))

    def load(self, pipe: Any) -> None:
        """Have a pipeline go on from here when it is iterated next."""
        if self.stages is not None:
            load_state(pipe, self.stages)

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
