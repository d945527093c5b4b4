"""Share of a worker in the global batches of an epoch, and the rest of an interrupted epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np

from wds_datapipes.errors import EmptySourceError, plural
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.types import ALONE, Instance

Remainder: TypeAlias = Literal["drop", "pad", "keep"]
"""What to do with the samples after the last full batch: drop them, pad the batch, or yield them."""

#: The maximum number of positions computed at a time.
CHUNK = 1 << 13


@dataclass(frozen=True)
class RestOfEpoch:
    """The part of an epoch that no instance has yielded: single positions, and all positions from ``start`` on.

    Attributes:
        start: the first position not reached.
        missing: earlier positions not yielded, in order, which come first.
        end: the number of samples that the epoch does not drop; None before it begins.
        held: those of ``missing`` that a stage held back.
    """

    start: int = 0
    missing: tuple[int, ...] = ()
    end: int | None = None
    held: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the rest as plain values."""
        held = {"held": self.held} if self.held else {}
        return {"start": self.start, "missing": self.missing, "end": self.end, **held}

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> RestOfEpoch:
        """Create a rest from the result of `state_dict`; None means a whole epoch."""
        if state is None:
            return cls()
        start, missing, end = state["start"], state["missing"], state.get("end")
        held = state.get("held", ())
        numbers = [start, *missing, *held, *([] if end is None else [end])]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"the rest of the epoch has the positions {numbers!r:.200}")
        return cls(start, tuple(sorted(missing)), end, tuple(sorted(held)))


WHOLE_EPOCH = RestOfEpoch()


@dataclass(frozen=True)
class BatchShare:
    """The share of a worker in the global batches of an epoch.

    Each rank has the same part of every batch; its workers take batches in turn. After the last full batch,
    ``"keep"`` divides the samples evenly between the ranks. So does ``"drop"`` in an epoch that was interrupted within
    a batch, so that only the samples that the whole epoch drops are dropped. Positions from ``count`` on are padding;
    modulo ``count``, they are the positions of the samples to repeat.

    Args:
        count: the number of samples of the dataset.
        batch: the number of samples in a global batch.
        remainder: what to do with the samples after the last full batch.
        instance: the rank and the worker.
        rest: the rest of the epoch, if a different number of ranks or workers has begun it.
        lanes: the number of lanes that share the padding of the last batch.
        unit: what a batch consists of, for messages.

    Raises:
        EmptySourceError: there is no batch.
        ValueError: the ranks cannot share a batch evenly.

    Examples:
        >>> share = BatchShare(10, 4, "pad", Instance(rank=1, ranks=2))
        >>> len(share), [each.tolist() for each in share.positions()]
        (6, [[2, 3, 6, 7, 10, 11]])
    """

    count: int
    batch: int
    remainder: Remainder
    instance: Instance = ALONE
    rest: RestOfEpoch = WHOLE_EPOCH
    lanes: int = 1
    unit: str = "sample"

    def __post_init__(self) -> None:
        if self.batch % (ranks := self.instance.ranks):
            raise ValueError(
                f"IndexedSamples has a global_batch_size of {self.batch}, which is not divisible by its {ranks} "
                f"ranks. Choose a multiple of {ranks}"
            )
        if self.count < self.batch and self.remainder == "drop":
            raise EmptySourceError(
                f"IndexedSamples has {plural(self.count, self.unit)}, but a global batch takes {self.batch:,}, so an "
                'epoch would be empty. Choose a smaller global_batch_size, or remainder="pad" or "keep"'
            )

    @property
    def size(self) -> int:
        """The number of samples of this rank in a full batch."""
        return self.batch // self.instance.ranks

    @property
    def whole_batches(self) -> int:
        """The number of full or padded batches in the rest of the epoch."""
        return -(-self._left // self.batch) if self.remainder == "pad" else self._left // self.batch

    @property
    def end(self) -> int:
        """The number of samples that the epoch does not drop."""
        if self.rest.end is not None:
            return self.rest.end
        return self.count // self.batch * self.batch if self.remainder == "drop" else self.count

    def __len__(self) -> int:
        turns = self.instance.share_of(self.whole_batches)
        return turns * self.size + (len(self._rest_of_rank()) if self._has_rest else 0)

    def is_alike_on_ranks(self, done: int) -> bool:
        """Whether this worker has yielded ``done`` samples on every rank, if the ranks are in step.

        After the last full batch, some ranks may get one sample more than others.
        """
        last = self._left - self.whole_batches * self.batch
        begins = (self.whole_batches // self.instance.workers) * self.size
        return last <= 0 or not last % self.instance.ranks or not self._has_rest or done < begins

    def most_yielded(self, done: int, *, is_over: bool) -> int:
        """Return how many samples this worker has yielded on the rank with the most, if the ranks are in step.

        Args:
            done: the number of samples that it has yielded on this rank.
            is_over: whether this rank has none left.
        """
        whole = self.instance.share_of(self.whole_batches) * self.size
        has_last = self._has_rest and self._left > self.whole_batches * self.batch
        return whole + self.size if has_last and done == len(self) and (is_over or done > whole) else done

    def batches_begun(self, done: int) -> int:
        """Return the number of global batches up to the last one that this worker has begun."""
        return self.instance.worker + (done - 1) // self.size * self.instance.workers + 1 if done else 0

    def positions(self, done: int = 0, end: int | None = None) -> Iterator[Numbers]:
        """Yield the positions in the epoch, in arrays of limited length.

        Args:
            done: the number of positions to leave out.
            end: the number of the batch to stop before; by default, all batches.
        """
        turn, done = divmod(done, self.size)
        worker, workers = self.instance.worker, self.instance.workers
        whole = self.whole_batches if end is None else min(end, self.whole_batches)
        step = max(CHUNK // self.size, 1) * workers
        own = np.arange(self.size) + self.instance.rank * self.size
        for first in range(worker + turn * workers, whole, step):
            batches = np.arange(first, min(first + step, whole), workers)
            yield from self._split(self._divide_padding((batches[:, None] * self.batch + own).ravel()[done:]))
            done = 0
        has_last = self._has_rest and (end is None or end > self.whole_batches)
        if has_last and self.whole_batches >= worker + turn * workers:
            yield from self._split(np.array(self._rest_of_rank()[done:], np.int64))

    @property
    def _has_rest(self) -> bool:
        """Whether this worker has the turn after the last full batch."""
        return self.instance.worker == self.whole_batches % self.instance.workers

    @property
    def _left(self) -> int:
        """The number of samples of the rest of the epoch, without padding."""
        return bisect_left(self.rest.missing, self.end) + max(self.end - self.rest.start, 0)

    def _rest_of_rank(self) -> range:
        """Return which samples after the last full batch belong to this rank."""
        start = self.whole_batches * self.batch
        count, rank, ranks = max(self._left - start, 0), self.instance.rank, self.instance.ranks  # 0 if they are padded
        return range(start + count * rank // ranks, start + count * (rank + 1) // ranks)

    def _divide_padding(self, numbers: Numbers) -> Numbers:
        """Return which samples of the rest of the epoch to read for others, so that all lanes share the padding."""
        whole, rest = divmod(self._left, self.batch)
        slots = numbers - whole * self.batch
        lanes, inner = np.divmod(slots, self.batch // self.lanes)
        first, end = lanes * rest // self.lanes, (lanes + 1) * rest // self.lanes
        moved = np.where(inner < end - first, first + inner, rest + slots - end) + whole * self.batch
        divided: Numbers = np.where(slots < 0, numbers, moved)
        return divided

    def _split(self, numbers: Numbers) -> Iterator[Numbers]:
        """Yield the positions of samples of the rest of the epoch in arrays of limited length."""
        missing = np.array(self.rest.missing, np.int64)
        for start in range(0, len(numbers), CHUNK):
            some = numbers[start : start + CHUNK]
            found = some - len(missing) + self.rest.start
            is_missing = some < len(missing)
            found[is_missing] = missing[some[is_missing]]
            yield found


def rest_of_epoch(shares: Sequence[tuple[BatchShare, int]], waiting: Iterable[int] = ()) -> RestOfEpoch:
    """Return the rest of an epoch.

    Args:
        shares: the share of each instance and the number of positions that it has yielded.
        waiting: the positions of yielded samples that wait in later stages.
    """
    some, _ = shares[0]
    rest = some.rest
    waiting = {*waiting}
    begun = max(share.batches_begun(done) for share, done in shares)
    if not begun:
        return rest
    gone = some._left if begun > some.whole_batches else begun * some.batch
    left = chain.from_iterable(each.tolist() for share, done in shares for each in share.positions(done, begun))
    missing = {*waiting, *left, *rest.missing[gone:]}
    held = missing & {*waiting, *rest.held}
    return RestOfEpoch(
        rest.start + max(gone - len(rest.missing), 0), tuple(sorted(missing)), some.end, tuple(sorted(held))
    )
