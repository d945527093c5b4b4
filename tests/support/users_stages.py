"""User-defined stages, for tests of states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Shuffler

from wds_datapipes import Stage
from wds_datapipes.shards.position import SamplePosition, pack_positions, unpack_positions

Pipe = IterDataPipe[Any]


class OwnShuffler(Shuffler):  # type: ignore[type-arg]  # torch declares a type parameter that its class does not take
    """Has torch's loop under another name."""


class Unchanged(IterDataPipe[Any]):
    """Yields the items of its source, and declares nothing."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class InMain(Unchanged):
    """Runs in the main process."""

    def is_replicable(self) -> bool:
        return False


class OwnSplit(IterDataPipe[Any]):
    """Splits as ``.sharding_filter()`` does, with only the arguments that torch's first release passed."""

    def __init__(self, source: Pipe) -> None:
        self.source = source
        self.instances, self.instance = 1, 0

    def apply_sharding(self, instances: int, instance: int) -> None:
        self.instances, self.instance = instances, instance

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.source, self.instance, None, self.instances)


class Buckets(Stage[Any]):
    """Sorts the samples of each group of ``size``: buffers samples, and knows their positions."""

    rereads_samples = True
    can_reshard = True

    def __init__(self, source: Pipe, size: int) -> None:
        self.source = source
        self.size = size
        self.held: list[tuple[SamplePosition, Any]] = []
        self.loaded: list[SamplePosition] = []

    def __iter__(self) -> Iterator[Any]:
        waiting, self.loaded, self.held = len(self.loaded), [], []
        known: Any = self.source_position()
        position: Any = known or (lambda: None)
        for sample in self.source:
            self.held.append((position(), sample))
            if len(self.held) == (waiting or self.size):
                waiting = 0
                yield from self.release()
        yield from self.release()

    def release(self) -> Iterator[Any]:
        self.held.sort(key=lambda each: (each[1]["cls"][::-1], each[0]))
        while self.held:
            yield self.held.pop(0)[1]["__key__"]

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": pack_positions([position for position, _ in self.held] or self.loaded)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = unpack_positions(state.get("waiting", ()))
