"""Samples that stages held back when a state was saved, and that are read again when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from wds_datapipes.counters import Counters
from wds_datapipes.errors import ChangedShardError, StateError, plural
from wds_datapipes.shards.position import SamplePosition

T = TypeVar("T")

#: How many times the functions of earlier stages may fail for a sample that was held back; then it is skipped.
MAX_FAILURES = 10
#: How many times earlier stages may drop a sample that was held back, such as a filter that keeps few samples.
MAX_DROPS = 20_000

_END = object()


class Holder:
    """A stage that held samples back when a state was saved.

    A stage before it may drop a sample that it did not drop then: a function may draw random numbers, or fail now and
    then. The source therefore yields each sample until it arrives at this stage.

    Args:
        name: the name of the stage.
        mark: returns a value that changes with each item that arrives at the stage; by default, it always does.
        between: returns the names of the stages between the source and this stage.
        counters: the counters of these stages.
    """

    def __init__(
        self,
        name: str,
        mark: Callable[[], object] | None = None,
        between: Callable[[], Sequence[str]] = tuple,
        counters: Sequence[Counters] = (),
    ) -> None:
        self._name, self._between, self._counters = name, between, counters
        self._mark = mark or object
        self._before: object = None
        self._tries = self._failures = 0

    def __reduce__(self) -> tuple[type[Holder], tuple[str]]:
        # torch pickles the loaded state of a stage to find its sources, but this is a later stage.
        return Holder, (self._name,)

    def deliver(self, sample: T, position: SamplePosition) -> Iterator[T]:
        """Yield copies of a sample until one arrives, or the error policies of the stages in between have skipped it.

        Raises:
            StateError: stages drop it each time.
        """
        self._before, self._tries, self._failures = self._mark(), 0, 0
        for counters in self._counters:
            counters.is_tried_again = self._is_tried_again
        try:
            while True:
                self._tries += 1
                yield _copy_of(sample)
                if self.is_settled:
                    return
                if self._tries - self._failures >= MAX_DROPS:
                    raise self._dropped_error(sample, position)
        finally:
            for counters in self._counters:
                counters.is_tried_again = None

    @property
    def is_settled(self) -> bool:
        """Whether the sample that `deliver` yielded last has arrived, or was skipped."""
        return self._mark() != self._before or self._failures >= MAX_FAILURES

    def _is_tried_again(self) -> bool:
        """Record that a function has failed; return whether `deliver` will yield the sample again."""
        if self._mark() != self._before:
            return False  # it has arrived, and the failure is that of another sample in a later stage
        self._failures += 1
        return self._failures < MAX_FAILURES

    def _dropped_error(self, sample: Any, position: SamplePosition) -> StateError:
        key = repr(sample["__key__"]) if isinstance(sample, Mapping) and "__key__" in sample else f"at {position[:2]}"
        return StateError(
            f"{self._name} held back the sample {key} when the state was saved, but now a stage before it "
            f"({', '.join(self._between())}) drops it each time, in {self._tries:,} tries. Does its function remember "
            f"earlier samples, or have its inputs changed? Put the stage that drops samples after {self._name}"
        )


class Awaited(dict[SamplePosition, Holder]):
    """The positions of samples that later stages held back, with these stages.

    Args:
        found: the positions and stages.
        nearest: the next stage that holds samples back, without another source in between. It gets those that other
            ranks or workers held back.
    """

    def __init__(self, found: Mapping[SamplePosition, Holder] | None = None, nearest: Holder | None = None) -> None:
        super().__init__(found or {})
        self.nearest = nearest

    def of_others(self, positions: Iterable[SamplePosition]) -> dict[tuple[int, ...], Holder]:
        """Return samples that other ranks or workers held back, by identity."""
        return {} if self.nearest is None else {each.identity: self.nearest for each in positions}


NONE_AWAITED = Awaited()


def deliver_held(
    samples: Iterator[T], left: dict[tuple[int, ...], Holder], position: Callable[[], SamplePosition]
) -> Iterator[T]:
    """Yield samples until all those have come that other ranks or workers held back.

    Args:
        samples: all samples.
        left: those that were held back, by identity.
        position: returns the position of the last of ``samples``.
    """
    while left and (sample := next(samples, _END)) is not _END:
        holder = left.pop(position().identity, None)
        yield from (sample,) if holder is None else holder.deliver(sample, position())  # type: ignore[misc]


def read_again(
    samples: Iterator[T], awaited: Awaited, position: Callable[[], SamplePosition], may_lack: Callable[[], bool]
) -> Iterator[T]:
    """Yield the samples that later stages held back, which come first.

    Args:
        samples: these samples in any order, and then others. One of the others is yielded if some of these are missing.
        awaited: the samples that were held back.
        position: returns the position of the last of ``samples``.
        may_lack: returns whether an error policy has skipped some samples.

    Raises:
        ChangedShardError: a sample is not found.
        StateError: a stage before the one that held a sample back drops it each time.
    """
    left = {each.identity: holder for each, holder in awaited.items()}
    while left:
        sample: Any = next(samples, _END)
        holder = None if sample is _END else left.pop(position().identity, None)
        if holder is not None:
            yield from holder.deliver(sample, position())
            continue
        if not may_lack():
            raise missing_samples_error(len(left))
        if sample is not _END:
            yield sample
        return


class ItemCounter:
    """Counts the items that a stage has read, each of them once.

    After a state is loaded, earlier stages yield the samples that later stages had buffered a second time, or several
    times, which does not count.

    Args:
        count: the number of items read so far.
        again: the items that are read again, before all others.
    """

    __slots__ = ("_again", "_latest", "count")

    def __init__(self, count: int = 0, again: Awaited = NONE_AWAITED) -> None:
        self.count = count
        self._again = {position.identity: holder for position, holder in again.items()}
        self._latest: tuple[int, ...] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether some items are still to be read again."""
        if self._latest is not None and self._again[self._latest].is_settled:
            del self._again[self._latest]
            self._latest = None
        return bool(self._again)

    def is_repeat(self, position: Callable[[], SamplePosition] | None) -> bool:
        """Return whether an item is read again; otherwise, count it.

        Args:
            position: returns its position; None if unknown.
        """
        if self._again and position is not None:
            identity = position().identity
            if identity in self._again:
                if self._latest not in (None, identity):
                    del self._again[self._latest]
                self._latest = identity
                return True
            self._again.clear()  # a new item: error policies have skipped the others
            self._latest = None
        self.count += 1
        return False


def missing_samples_error(count: int) -> ChangedShardError:
    """Return the error for buffered samples that cannot be found again."""
    return ChangedShardError(
        f"A stage had buffered {plural(count, 'sample')} not found at the saved positions. A state can only be loaded "
        "with the shards it was saved with"
    )


def _copy_of(sample: Any) -> Any:
    """Return a copy of a sample, because a function may fail after it has changed values."""
    if not isinstance(sample, dict):
        return sample
    return {name: value if isinstance(value, str | bytes) else deepcopy(value) for name, value in sample.items()}
