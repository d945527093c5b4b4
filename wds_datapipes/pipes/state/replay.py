"""Resuming by replay: making the items of an epoch again, up to the one that was delivered last."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from wds_datapipes.errors import StateError
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.graph import as_stage, takes_seed, upstream
from wds_datapipes.pipes.state.unsupported import name_of
from wds_datapipes.shards.position import SamplePosition

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["ReplayedItems", "digest_item", "is_replayable", "is_replayed"]

logger = logging.getLogger("wds_datapipes")

#: How many values of an item count in its digest, and how many bytes at each end of a value.
MOST_VALUES, MOST_BYTES = 64, 1024

#: Stages whose items depend on earlier epochs or on the time, or that write data.
_NEVER_REPLAYED = ("DirectoryShards", "EpochSetter", "SampleWriter")
#: Stages that keep the order of the epoch in which they were begun.
_KEEPING = ("InMemoryCacheHolder", "MemoryCell")


class ReplayedItems(Stage[Any]):
    """Counts the items of a pipeline without a position, and resumes by making those before it again.

    That is exact if the pipeline makes the same items from the same seeds, which a digest of the last one checks.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: the pipeline.
        reason: why it has no position, which begins with the name of a stage.

    Attributes:
        is_over: whether the epoch has ended.

    Raises:
        StateError: the pipeline does not make the same items again.
    """

    rereads_source = True
    is_transparent = True

    def __init__(self, source: IterDataPipe[Any], reason: str) -> None:
        super().__init__()
        self.source = source
        self.reason = reason
        self.is_over = False
        self._made, self._digest = 0, 0
        self._loaded: tuple[int, int] | None = None

    def state_dict(self) -> dict[str, int]:
        """Return how many items the epoch has had, and a digest of the last one."""
        made, digest = self._loaded or (self._made, self._digest)
        return {"replayed": made, "digest": digest}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns."""
        return recorder.keep_values(self, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:  # noqa: ARG002 - no stage is after it
        """Resume from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned.
            again: nothing, as this is the last stage.

        Raises:
            StateError: it is the state of a pipeline with a position.
        """
        loaded = state.get("replayed"), state.get("digest")
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in loaded):
            raise StateError(f"This is no state of a pipeline that resumes by replay: {state!r:.100}")
        self._loaded = state["replayed"], state["digest"]

    def reset_state(self) -> None:
        """Discard a loaded state, and start from the beginning when it is iterated next."""
        self._loaded = None
        self._made, self._digest = 0, 0

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Begin an epoch, or resume one from a state, when it is iterated next."""
        self.reset_state()
        self.is_over = False
        if state is not None:
            self.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self._made, self._digest, self.is_over = 0, 0, False
        items = iter(self.source)
        if self._loaded is not None:
            count, digest = self._loaded
            self._replay(items, count, digest)
            self._loaded, self._made, self._digest = None, count, digest
        for item in items:
            self._made += 1
            self._digest = digest_item(item)
            yield item
            del item  # its memory is free while the next one is made
        self.is_over = True

    def _replay(self, items: Iterator[Any], count: int, digest: int) -> None:
        begin, found = perf_counter(), 0
        for number in range(count):
            try:
                item = next(items)
            except StopIteration:
                raise StateError(f"{self._complaint()} It has {number} items now, and had {count} or more") from None
            if number == count - 1:
                found = digest_item(item)
            del item
        if found != digest:
            raise StateError(f"{self._complaint()} Item {count - 1} of the epoch is another one now")
        if count:
            logger.warning("Resumed by replay: %d items in %.1f s. %s", count, perf_counter() - begin, self.reason)

    def _complaint(self) -> str:
        return (
            "This pipeline resumes by making its items again, and does not make the same ones: a stage draws from a "
            f"generator that no loader seeds, or the data has changed. Position unknown: {self.reason}."
        )

    def __len__(self) -> int:
        return len(self.source)

    def is_replicable(self) -> bool:
        """Return False: it is the last stage of a process."""
        return False


def is_replayable(pipe: Any) -> bool:
    """Return whether an epoch of a pipeline follows from its seeds, so that its items can be made again."""
    for stage in upstream(pipe):
        if as_stage(stage).spans_epochs or name_of(stage) in _NEVER_REPLAYED:
            return False
        if name_of(stage) in _KEEPING and any(map(takes_seed, upstream(stage))):
            return False
    return True


def is_replayed(state: Sequence[Mapping[str, Any] | None] | None) -> bool:
    """Return whether a state is that of a pipeline that resumes by replay."""
    return any(stage is not None and "replayed" in stage for stage in state or ())


def digest_item(item: Any) -> int:
    """Return a number by which another item is noticed: of its structure, and of the ends of its values.

    >>> digest_item({"a": 1}) == digest_item({"a": 1}), digest_item({"a": 1}) == digest_item({"a": 2})
    (True, False)
    """
    digest = blake2b(digest_size=7)
    left = [item]
    for _ in range(MOST_VALUES):
        if not left:
            break
        value = left.pop()
        digest.update(type(value).__qualname__.encode())
        if isinstance(value, Mapping):
            digest.update(b"%d" % len(value))
            left += [part for pair in list(value.items())[:MOST_VALUES] for part in pair][::-1]
        elif isinstance(value, list | tuple):
            digest.update(b"%d" % len(value))
            left += value[:MOST_VALUES][::-1]
        else:
            for part in _ends(value):
                digest.update(part)
    return int.from_bytes(digest.digest(), "big")


def _ends(value: Any) -> Iterator[bytes]:
    """Yield what tells a value from others, bounded in size."""
    if isinstance(value, str):
        yield f"{len(value)} {value[:MOST_BYTES]} {value[-MOST_BYTES:]}".encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        data = memoryview(value).cast("B")
        yield b"%d " % len(data)
        yield bytes(data[:MOST_BYTES])
        yield bytes(data[-MOST_BYTES:])
    elif hasattr(value, "dtype") and hasattr(value, "shape"):  # arrays and tensors
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        try:
            flat = value.reshape(-1)
            ends = [flat[:MOST_VALUES].tolist(), flat[-MOST_VALUES:].tolist()]
        except (TypeError, ValueError, RuntimeError):  # as of sparse tensors
            return
        yield repr(ends).encode()
    elif value is None or isinstance(value, bool | int | float | complex):
        yield repr(value).encode()
