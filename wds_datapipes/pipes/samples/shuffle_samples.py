"""The stage ``.shuffle_samples()``: shuffle samples through a buffer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from wds_datapipes.arguments import check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.samples.buffer import BufferingStage
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.samples.shuffling import BUFFER_SIZE, ShuffleState, shuffle_samples
from wds_datapipes.shards.held_samples import NONE_AWAITED, Awaited
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Sample


class SampleShuffler(SeededStage, BufferingStage[Sample]):
    """Shuffle samples through a buffer of bounded size (functional name: ``shuffle_samples``).

    Each sample is yielded exactly once. Put this stage before decoding, while samples are small. As with torch's
    ``.shuffle()``, the seed comes from the loader and differs in each epoch and worker. ``DataLoader(shuffle=False)``
    disables shuffling.

    Yields:
        Any: the items of ``source``, unchanged, in random order.

    Args:
        source: yields samples, or anything else.
        buffer_size: the number of samples in the buffer, 1000 by default; 1 keeps the order.
        initial: the number of samples to buffer before the first is yielded. After that, two are read for each one
            yielded until the buffer is full. By default, ``buffer_size``; a smaller number starts sooner, but mixes the
            first samples less.
        max_bytes: the maximum total size of the values in the buffer (bytes, arrays, tensors and images), in bytes.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> sorted(IterableWrapper(range(5)).shuffle_samples(3))
        [0, 1, 2, 3, 4]
    """

    function = staticmethod(shuffle_samples)
    _enabled = True

    def __init__(
        self,
        source: IterDataPipe[Sample],
        buffer_size: int = BUFFER_SIZE,
        *,
        initial: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        buffer_size = check_integer("buffer_size", buffer_size)
        initial = buffer_size if initial is None else initial
        if not 1 <= initial <= buffer_size:
            raise ValueError(f"shuffle_samples needs 1 <= initial <= buffer_size, not {initial} and {buffer_size}")
        self.initial = initial
        super().__init__(source, buffer_size=buffer_size, max_bytes=check_optional_integer("max_bytes", max_bytes, 0))
        self._rng = Random()

    def snapshot(self) -> dict[str, Any]:
        """Return the positions of the buffered samples, the number of draws, and the current size of the buffer."""
        state = self._current()
        return {"draws": state.draws, "buffer_size": state.room, **super().snapshot()}

    def set_shuffle(self, shuffle: bool = True) -> SampleShuffler:
        """Turn shuffling on or off; loaders call this."""
        self._enabled = shuffle
        return self

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        self._rng.seed(self.take_seed())

    def __len__(self) -> int:
        """Return the number of items of an epoch in this process."""
        return len(self.source)

    def function_options(self) -> dict[str, Any]:
        """Return the arguments of the function for a new iteration."""
        known = super().function_options()
        if not self._enabled:
            known["buffer_size"] = 1
        return {"state": known.pop("buffer"), "rng": self._rng, **known}

    def _progress(
        self, state: Mapping[str, Any], waiting: Iterable[SamplePosition] = (), again: Awaited = NONE_AWAITED
    ) -> ShuffleState:
        loaded = ShuffleState(state.get("buffer_size", self.initial if self._enabled else 1), waiting)
        loaded.draws = operator.index(state.get("draws", 0))
        loaded.awaited = again
        return loaded
