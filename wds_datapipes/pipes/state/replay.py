"""Resuming by replay: produce the items of an epoch again, up to the last one delivered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import StateError, plural
from wds_datapipes.pipes.roles import Loader
from wds_datapipes.pipes.stage import SnapshotStage, iterated_by_loader
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited

#: The number of values of an item that its digest covers, and the number of bytes at each end of a value.
MAX_VALUES, MAX_BYTES = 64, 1024

#: Items with these numbers, counted from 1, and with multiples of the largest are digested. Digesting all items would
#: cost more than producing small ones.
DIGESTED = frozenset({1, 2, 4, 8, 16, 32, 64})
INTERVAL = max(DIGESTED)

#: Types of values, most frequent first.
_TEXTS, _NUMBERS, _LISTS, _MAPPINGS = ((str, bytes, bytearray), (int, float, complex), (list, tuple), (dict, Mapping))


@iterated_by_loader
class ReplayedItems(Loader, SnapshotStage[Any]):
    """Counts the items of a pipeline without a position, and resumes by replaying as many.

    Replay is exact if the pipeline yields the same items for the same seeds; a digest of one of the last items checks
    this.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: the pipeline.
        reason: why it has no position, as a sentence that begins with the name of a stage.

    Raises:
        StateError: the pipeline does not yield the same items again.
    """

    is_transparent = True
    process_boundary = "loop"
    has_position = True

    def __init__(self, source: IterDataPipe[Any], reason: str) -> None:
        self.source = source
        self.reason = reason
        self._made = 0
        self._digest = (0, 0)
        self._loaded: tuple[int, tuple[int, int]] | None = None

    def snapshot(self) -> dict[str, Any]:
        """Return the number of items yielded in the epoch, and the number and digest of one of the last items."""
        if self._loaded is None:
            return {"replayed": self._made, "digest": self._digest}
        return {"replayed": self._loaded[0], "digest": self._loaded[1]}

    def load_state_dict(self, state: Mapping[str, Any], again: Awaited = NONE_AWAITED) -> None:  # noqa: ARG002 - no stage is after it
        """Load a state; the next iteration resumes from it.

        Args:
            state: a result of `state_dict`.
            again: empty, because this is the last stage.

        Raises:
            StateError: the state belongs to a pipeline with a position.
        """
        made, (number, digest) = state.get("replayed", -1), state.get("digest") or (-1, -1)
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in (made, number, digest)) or number > made:
            raise StateError(f"This is not the state of a pipeline that resumes by replay: {state!r:.100}")
        self._loaded = made, (number, digest)

    def reset_state(self) -> None:
        """Discard a loaded state; the next iteration starts from the beginning."""
        self._loaded = None
        self._made, self._digest = 0, (0, 0)

    def __iter__(self) -> Iterator[Any]:
        self._made, self._digest = count, digested = self._loaded or (0, (0, 0))
        source = iter(self.source)
        made = 0
        for made, item in enumerate(islice(source, count), 1):
            if made == digested[0] and digest(item) != digested[1]:
                raise self._mismatch(f"Item {made - 1} of the epoch differs")
            del item  # free its memory before the next one is created
        if made < count:
            raise self._mismatch(f"The epoch now has {plural(made, 'item')}, but had at least {count:,}")
        self._loaded = None
        for item in source:
            made += 1
            if not made % INTERVAL or made in DIGESTED:
                self._digest = made, digest(item)
            self._made = made
            yield item
            del item

    def _mismatch(self, how: str) -> StateError:
        return StateError(
            "This pipeline resumes by replaying its items, but does not yield the same ones again: a stage draws from "
            f"a generator that no loader seeds, or the data has changed. Why it has no position: {self.reason}. {how}"
        )

    def __len__(self) -> int:
        return len(self.source)


def is_replayed(state: Sequence[Mapping[str, Any] | None] | None) -> bool:
    """Whether a state belongs to a pipeline that resumes by replay."""
    return any(stage is not None and "replayed" in stage for stage in state or ())


def digest(item: Any) -> int:
    """Return a digest of the structure of an item and of the ends of its values."""
    summary: list[Any] = []
    left = [item]
    for _ in range(MAX_VALUES):
        if not left:
            break
        value = left.pop()
        summary.append(type(value).__qualname__)
        if isinstance(value, _TEXTS):
            summary += len(value), value[:MAX_BYTES], value[-MAX_BYTES:]
        elif value is None or isinstance(value, _NUMBERS):
            summary.append(repr(value))
        elif isinstance(value, _LISTS):
            summary.append(len(value))
            left += value[:MAX_VALUES][::-1]
        elif isinstance(value, _MAPPINGS):
            summary.append(len(value))
            left += [part for pair in islice(value.items(), MAX_VALUES) for part in pair][::-1]
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            summary += value.dtype, tuple(value.shape), _ends_of_array(value)
    return crc32(repr(summary).encode("utf-8", "surrogatepass"))


def _ends_of_array(array: Any) -> tuple[bytes, bytes] | None:
    """Return the first and last values of an array or a tensor; None if NumPy does not support it."""
    with suppress(TypeError, ValueError, RuntimeError):  # such as a sparse tensor, or one on another device
        values = np.asarray(array)
        if not values.dtype.hasobject:
            return values.flat[:MAX_VALUES].tobytes(), values.flat[-MAX_VALUES:].tobytes()
    return None
