"""Which part of the data an instance of a pipeline has, among all ranks and workers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Instance", "share"]


class Instance(NamedTuple):
    """The rank and the worker that an instance of a pipeline runs for."""

    rank: int = 0
    workers: int = 1  # of this rank
    worker: int = 0


def share(count: int, place: Instance) -> int:
    """Return how many of the ``count`` items of a rank its worker has to make.

    >>> [share(8, Instance(workers=3, worker=worker)) for worker in range(3)]
    [3, 3, 2]
    """
    return count // place.workers + (place.worker < count % place.workers)
