"""Sorting more samples than memory holds."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from operator import itemgetter
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from wds_datapipes.errors import UnwritableSampleError
from wds_datapipes.prepare.reorder.sorted_runs import SortedRun, SortedRunFile, UnsortedSample
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ExternalSort", "file_bytes"]

#: So many keys are remembered to notice one that comes twice before all is read: some 10 MB at the most.
KEYS_REMEMBERED = 65_536
#: The least that is read of a run at once, in bytes. With less, a disk would do little else than seek.
WINDOW_BYTES = 128 << 10
#: The most: reading more at once is no faster.
MAX_WINDOW_BYTES = 4 << 20
#: What a sample takes besides what it holds: a tuple, and its place in lists.
PLACE_BYTES = 80

BY_ORDER = itemgetter(0)


class ExternalSort:
    """Takes samples, and then yields them sorted; those that are equal stay in the order in which they came.

    As many as memory holds are sorted at once, and written as a run to a temporary file. At the end all runs are read
    side by side. If they are too many for that, neighbours are merged into longer ones first. What comes out does not
    depend on any of this.

    It is a context manager, which removes the temporary file.

    Args:
        memory_bytes: how much memory samples may take, with what Python needs for them; at least one sample is held.
        folder: where the temporary file is; by default, where the system has such files. It has no name there, so that
            nothing is left of it even if the process is killed.
        reverse: the largest come first.

    Attributes:
        count: how many samples it has.
        runs: how many runs were written.

    Examples:
        >>> with ExternalSort(memory_bytes=2000) as sorting:
        ...     for number in range(7):
        ...         sorting.add(number * 3 % 7, {"__key__": f"{number}", "txt": b"..."})
        ...     [sample["__key__"] for sample in sorting.samples()]
        ['0', '5', '3', '1', '6', '4', '2']
    """

    def __init__(
        self, *, memory_bytes: int, folder: str | os.PathLike[str] | None = None, reverse: bool = False
    ) -> None:
        if memory_bytes < 1:
            raise ValueError(f"memory_bytes is a number of bytes, from 1, not {memory_bytes!r}")
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._reverse = reverse
        self._held: list[tuple[Any, Sample]] = []
        self._held_bytes = self._largest_order = 0
        self._keys: set[str] = set()
        self._file: SortedRunFile | None = None
        self._runs: list[SortedRun] = []
        self.count = self.runs = 0

    def add(self, order: Any, sample: Sample) -> None:
        """Take a sample.

        Args:
            order: what it is sorted by: a number, str, bytes or a tuple of these. All have to be comparable.
            sample: its key, and fields of bytes. Meta data but the key may be lost.

        Raises:
            UnwritableSampleError: its key came before. This is noticed at once for the first 65,536 keys, before any
                shard is written.
            ShardWriteError: the temporary file cannot be written.
        """
        key = sample["__key__"]
        if key in self._keys:
            raise UnwritableSampleError(
                f"The sample {key!r} comes twice, the second time from {sample.get('__url__', 'a shard')}, and samples "
                f"of one key could not be told apart in another order. Number them"
            )
        if len(self._keys) < KEYS_REMEMBERED:
            self._keys.add(key)
        order_bytes = size_of(order)
        held = PLACE_BYTES + getsizeof(sample) + getsizeof(key) + order_bytes
        for value in sample.values():
            if type(value) is bytes:
                held += getsizeof(value)
        if self._held and self._held_bytes + held > self._memory_bytes:
            self._write_run()
        self._held.append((order, sample))
        self._held_bytes += held
        self._largest_order = max(self._largest_order, order_bytes)
        self.count += 1

    def samples(self) -> Iterator[Sample]:
        """Yield all samples in their order, once.

        Raises:
            ShardWriteError: the temporary file cannot be written, or read.
        """
        self._keys.clear()
        if not self._runs:
            self._sort()
            yield from map(itemgetter(1), self._held)
            return
        if self._held:
            self._write_run()
        # Of each run, a window is held, and what its next sample is sorted by.
        together = max(2, self._memory_bytes // (WINDOW_BYTES + 2 * self._largest_order))
        while len(self._runs) > together:
            self._merge_neighbours(together)
        for _, waiting in self._merged(self._runs):
            yield waiting.load()

    def close(self) -> None:
        """Forget all samples, and give the room on the disk back."""
        self._held.clear()
        self._keys.clear()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sort(self) -> None:
        self._held.sort(key=BY_ORDER, reverse=self._reverse)

    def _write_run(self) -> None:
        self._sort()
        if self._file is None:
            self._file = SortedRunFile(self._folder)
        self._runs.append(self._file.write(self._held))
        self.runs += 1
        self._held.clear()
        self._held_bytes = 0

    def _merge_neighbours(self, together: int) -> None:
        """Make one run of so many, all over the file; what equals stays in its order, since they are neighbours."""
        longer = SortedRunFile(self._folder)
        try:
            runs = [
                longer.write((order, waiting.load()) for order, waiting in self._merged(self._runs[at : at + together]))
                for at in range(0, len(self._runs), together)
            ]
        except BaseException:
            longer.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._runs = longer, runs

    def _merged(self, runs: list[SortedRun]) -> Iterator[tuple[Any, UnsortedSample]]:
        """Yield the samples of some runs in their order; each is to be loaded before the next one is asked for."""
        file = self._file
        if file is None:
            return iter(())
        window = min(max(self._memory_bytes // len(runs), WINDOW_BYTES), MAX_WINDOW_BYTES)
        reading = [file.read(run, window) for run in runs]
        return heapq.merge(*reading, key=BY_ORDER, reverse=self._reverse)


def size_of(order: Any) -> int:
    """Return how much memory takes what a sample is sorted by, in bytes."""
    return getsizeof(order) + (sum(map(getsizeof, order)) if type(order) is tuple else 0)


def file_bytes(size: int, memory_bytes: int) -> int:
    """Return how large temporary files will be together for samples of some size, in bytes.

    >>> file_bytes(900, 1000), file_bytes(10**9, 10**8), file_bytes(10**9, 10**6)
    (0, 1000000000, 2000000000)
    """
    if size <= memory_bytes:
        return 0
    together = max(2, memory_bytes // WINDOW_BYTES)
    return size if size <= together * memory_bytes else 2 * size
