"""The run of a function that writes many shards: finished ones stay, and what fails is tried again."""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_datapipes.errors import (
    EncodeError,
    MissingDependencyError,
    UnsafeCodecError,
    UnwritableSampleError,
)
from wds_datapipes.io.openers import local_path
from wds_datapipes.io.sinks import size_of
from wds_datapipes.parallel.executors import BorrowedExecutor, ForkedPool, InProcessExecutor, ShardExecutor, failure_of
from wds_datapipes.parallel.map_shards import run_all
from wds_datapipes.types import ShardInfo
from wds_datapipes.writing.journal import FinishedShard, ShardJournal
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, find_old_shards, remove_old_shards

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DETERMINISTIC_ERRORS", "REQUESTS_AT_ONCE", "ShardRun", "WrittenShard"]

LOGGER = logging.getLogger("wds_datapipes")

#: Errors of a function, or of what it returns: another attempt gives them again.
DETERMINISTIC_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EncodeError,
    ImportError,
    IndexError,
    KeyError,
    MissingDependencyError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    UnsafeCodecError,
    UnwritableSampleError,
)
#: How many requests ask a store at once whether shards are there.
REQUESTS_AT_ONCE = 16


class WrittenShard(NamedTuple):
    """A shard as a worker has written it.

    Attributes:
        info: what was written.
        read: how many samples were read.
        skipped: how many faults were skipped.
        version: distinguishes the input from a later one of the same name.
        errors: those that were skipped, if the function reports them.
    """

    info: ShardInfo
    read: int
    skipped: int
    version: str = ""
    errors: tuple[Exception, ...] = ()


class ShardRun:
    """The shards that one call writes: those of an earlier call, the journal, and the workers.

    Args:
        places: the path or URL of each shard.
        pattern: the one that they come from.
        journal: the path of the journal, if there is one.
        of: the function, for the journal.
        remove_old: remove the shards of an earlier run that had more of them, at the end.
        storage_options: those of the output.

    Raises:
        ValueError: there are such shards, and ``remove_old`` is false.
        StateError: another process has the journal.
    """

    def __init__(
        self,
        places: Sequence[str],
        pattern: str,
        *,
        journal: str | None,
        of: str,
        remove_old: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._places, self._storage_options = places, storage_options
        is_numbered = NUMBER.search(pattern) is not None
        self._old = find_old_shards(pattern, len(places), storage_options=storage_options) if is_numbered else []
        if self._old and not remove_old:
            raise ValueError(
                f"{describe_old_shards(self._old)}. Nothing was written. Remove them, or pass remove_old=True"
            )
        files = [*places] if journal is None else [*places, journal]
        for folder in {Path(local).parent for file in files if (local := local_path(file)) is not None}:
            folder.mkdir(parents=True, exist_ok=True)
        self._journal = None if journal is None else ShardJournal(journal, {"of": of})

    def find_finished(
        self, identify: Callable[[int], str | None]
    ) -> tuple[dict[int, FinishedShard], dict[int, tuple[str, str]]]:
        """Return the finished shards that are there and would be the same now, and the identities of the others.

        Args:
            identify: returns the identity that a shard would have now; None takes it as it is.
        """
        finished = () if self._journal is None else self._journal.finished
        lines = {_name(shard.info.url): shard for shard in finished}  # the last one of a name holds
        known = [number for number, place in enumerate(self._places) if _name(place) in lines]

        def identify_held(number: int) -> tuple[int, FinishedShard, str | None] | None:
            shard = lines[_name(self._places[number])]
            is_there = size_of(self._places[number], self._storage_options) == shard.info.bytes
            return (number, shard, identify(number)) if is_there else None

        same: dict[int, FinishedShard] = {}
        others: dict[int, tuple[str, str]] = {}
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for number, shard, now in filter(None, pool.map(identify_held, known)):
                if now is None or shard.keys == now:
                    same[number] = shard._replace(info=shard.info._replace(url=self._places[number]))
                else:
                    others[number] = shard.keys, now
        return same, others

    def write(
        self,
        work: Callable[..., WrittenShard],
        tasks: Mapping[int, tuple[Any, ...]],
        *,
        executor: Executor | None = None,
        max_workers: int | None = None,
        retries: int = 0,
        look: Callable[[], object] | None = None,
        names: Sequence[str] = (),
    ) -> Generator[tuple[int, WrittenShard | BaseException], None, None]:
        """Call a function for each shard, and yield what was written, or why that failed for good.

        Args:
            work: writes a shard. Its last argument names the attempt, lest an executor returns an old result.
            tasks: its other arguments, by the numbers of the shards.
            executor: any executor of `concurrent.futures`; by default there are forked processes.
            max_workers: how many, if not one for each processor; 0 is this process itself.
            retries: how often a shard is tried again.
            look: is called again and again meanwhile.
            names: what the log calls the shards.
        """
        call = secrets.token_hex(8)

        def task_of(number: int, attempt: int) -> tuple[tuple[int, int], tuple[Any, ...]]:
            return (number, attempt), (*tasks[number], f"{call}-{attempt}")

        waiting = deque(task_of(number, 1) for number in tasks)
        with closing(run_all(self._start_workers(work, executor, max_workers, len(tasks)), waiting, look)) as done:
            for (number, attempt), task in done:
                failure = failure_of(task)
                if failure is None:
                    yield number, task.result()
                elif attempt > retries or isinstance(failure, DETERMINISTIC_ERRORS):
                    yield number, failure
                else:
                    error = f"{type(failure).__name__}: {failure}"
                    LOGGER.warning("%s was not converted, and is tried again: %s", names[number], error)
                    waiting.append(task_of(number, attempt + 1))

    def record(self, number: int, written: WrittenShard, identity: str) -> None:
        """Write a shard into the journal, if there is one."""
        if self._journal is not None:
            self._journal.add(FinishedShard(number, written.info, written.read, identity, written.skipped))

    def remove_old(self) -> None:
        """Remove the shards of the earlier run, after all new ones are there."""
        remove_old_shards(self._old, self._storage_options)

    def _start_workers(
        self, work: Callable[..., Any], executor: Executor | None, max_workers: int | None, shards: int
    ) -> ShardExecutor:
        if executor is not None:
            return BorrowedExecutor(work, executor, max_workers)
        if max_workers == 0:
            return InProcessExecutor(work)
        count = max(1, min(max_workers or len(os.sched_getaffinity(0)), shards))
        # A worker that had the journal would keep it locked until it has ended.
        return ForkedPool(work, count, [] if self._journal is None else [self._journal.fileno()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()


def _name(place: str) -> str:
    """Return a shard's name without its folder, which may be given in another way the next time."""
    return place.rpartition("/")[2]
