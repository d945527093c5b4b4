"""The shuffle of a list of shards as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

from wds_datapipes.datapipes import IterDataPipe, Shuffler
from wds_datapipes.pipes.graph import name_of, sources_of, upstream
from wds_datapipes.pipes.stage import Stage, as_stage

__all__ = ["ListingStage", "ShufflerIterDataPipe", "shuffle_whole_lists"]

#: The default size of the buffer of torch's ``.shuffle()``.
TORCH_BUFFER_SIZE = 10_000

T_co = TypeVar("T_co", covariant=True)


class ShufflerIterDataPipe(Shuffler[T_co]):
    """torch's ``.shuffle()`` for the whole of a list, however long, in a buffer of references.

    torch's own chooses from 10,000 items, so a shard of a longer list would stay near its place in the list. Lists of
    at most 10,000 shards have the same order as with torch's. The name is that of torch's class, which states and
    caches record, so that they remain valid.

    Yields:
        T_co: the items of ``datapipe``, in another order in each epoch.

    Args:
        datapipe: yields URLs of shards.
    """

    def __iter__(self) -> Iterator[T_co]:
        if not self._enabled:
            yield from self.datapipe
            return
        held = list(self.datapipe)
        while held:
            at = self._rng.randint(0, len(held) - 1)
            if len(held) > TORCH_BUFFER_SIZE:  # closing the gap in a list of a million items takes 0.1 ms
                held[at], held[-1] = held[-1], held[at]
                at = -1
            yield held.pop(at)


class ListingStage(Stage[T_co]):
    """Base class of stages that list shards."""

    def shuffle(self, buffer_size: int | None = None, *, unbatch_level: int = 0) -> Shuffler[T_co]:
        """Shuffle the whole list, however long it is.

        Args:
            buffer_size: the number of shards to choose from, as for torch's ``.shuffle()``; by default, all.
            unbatch_level: as for torch's ``.shuffle()``.

        Raises:
            ValueError: ``buffer_size`` is not positive.
        """
        if buffer_size is None:
            return ShufflerIterDataPipe(self, unbatch_level=unbatch_level)
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be a positive integer, not {buffer_size!r}")
        return Shuffler(self, buffer_size=buffer_size, unbatch_level=unbatch_level)


def shuffle_whole_lists(source: IterDataPipe[Any]) -> None:
    """Let each ``.shuffle()`` of torch with its default buffer shuffle the whole list of shards, if the list ends.

    Args:
        source: yields URLs of shards.
    """
    for stage in upstream(source):
        is_default = type(stage) is Shuffler and stage.buffer_size == TORCH_BUFFER_SIZE
        # A ListingStage has made torch's stage only if it was given this size.
        if is_default and not isinstance(stage.datapipe, ListingStage) and _ends(stage.datapipe):
            stage.__class__ = ShufflerIterDataPipe  # in place, since the program may have references to this stage


def _ends(pipe: Any) -> bool:
    """Whether the items of a stage are known to end."""
    name = name_of(pipe)
    if name != "LengthSetter":  # it may declare the length of an endless stream
        with suppress(Exception):  # of a user's stage
            len(pipe)
            return True
    sources = list(sources_of(pipe))
    is_known = as_stage(pipe).is_transparent or type(pipe).__module__.partition(".")[0] in ("torch", "torchdata")
    return is_known and name != "Cycler" and bool(sources) and all(map(_ends, sources))
