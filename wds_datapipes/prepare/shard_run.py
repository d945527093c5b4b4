"""Run a function that writes many shards: keep finished ones in a journal, and retry failures."""

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
    ShardWriteError,
    UnsafeInputError,
)
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.sinks import size_of
from wds_datapipes.parallel.executors import BorrowedExecutor, ForkedPool, InProcessExecutor, ShardExecutor, failure_of
from wds_datapipes.parallel.map_shards import run_tasks
from wds_datapipes.types import ShardInfo
from wds_datapipes.writing.journal import FinishedShard, ShardJournal
from wds_datapipes.writing.shard_names import NUMBER, describe_old_shards, find_old_shards, remove_old_shards

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DETERMINISTIC_ERRORS", "MAX_CONCURRENT_REQUESTS", "ShardRun", "WrittenShard"]

LOGGER = logging.getLogger("wds_datapipes")

#: Errors of a function or its results, which another attempt would repeat.
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
    UnsafeInputError,
)
#: The number of concurrent requests for the sizes of existing shards.
MAX_CONCURRENT_REQUESTS = 16


class WrittenShard(NamedTuple):
    """A shard written by a worker.

    Attributes:
        info: the shard.
        read: the number of samples read.
        skipped: the number of faults skipped.
        version: distinguishes the input from a later one of the same name.
        errors: the skipped errors, if the function reports them.
    """

    info: ShardInfo
    read: int
    skipped: int
    version: str = ""
    errors: tuple[Exception, ...] = ()


class ShardRun:
    """The shards that one call writes, with its journal and workers.

    Args:
        outputs: the path or URL of each shard.
        pattern: the pattern of the paths or URLs.
        journal: the path of the journal, if there is one.
        kind: the kind of the run, recorded in the journal.
        remove_old: remove surplus shards of an earlier, larger run at the end.
        storage_options: passed to the file system of the output.

    Raises:
        ValueError: there are surplus shards, and ``remove_old`` is false.
        StateError: another process uses the journal.
        ShardWriteError: a folder cannot be created.
    """

    def __init__(
        self,
        outputs: Sequence[str],
        pattern: str,
        *,
        journal: str | None,
        kind: str,
        remove_old: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._outputs, self._storage_options = outputs, storage_options
        is_numbered = NUMBER.search(pattern) is not None
        self._old = find_old_shards(pattern, len(outputs), storage_options=storage_options) if is_numbered else []
        if self._old and not remove_old:
            raise ValueError(
                f"{describe_old_shards(self._old)}. Nothing was written. Remove them, or pass remove_old=True"
            )
        files = [*outputs] if journal is None else [*outputs, journal]
        for folder in {Path(local).parent for file in files if (local := local_path(file)) is not None}:
            _create_folder(folder)
        self._journal = None if journal is None else ShardJournal(journal, {"of": kind})

    def find_finished(
        self, identify: Callable[[int], str | None]
    ) -> tuple[dict[int, FinishedShard], dict[int, tuple[str, str]]]:
        """Return the finished shards that exist unchanged, and the old and new identities of the changed ones.

        Args:
            identify: returns the current identity of a shard; ``None`` accepts the shard as it is.
        """
        finished = () if self._journal is None else self._journal.finished
        lines = {_name(shard.info.url): shard for shard in finished}  # the last record of a name counts
        recorded = [number for number, output in enumerate(self._outputs) if _name(output) in lines]

        def identify_existing(number: int) -> tuple[int, FinishedShard, str | None] | None:
            shard = lines[_name(self._outputs[number])]
            exists = size_of(self._outputs[number], self._storage_options) == shard.info.bytes
            return (number, shard, identify(number)) if exists else None

        same: dict[int, FinishedShard] = {}
        others: dict[int, tuple[str, str]] = {}
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            for number, shard, now in filter(None, pool.map(identify_existing, recorded)):
                if now is None or shard.keys == now:
                    same[number] = shard._replace(info=shard.info._replace(url=self._outputs[number]))
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
        names: Sequence[str] = (),
    ) -> Generator[tuple[int, WrittenShard | BaseException], None, None]:
        """Call a function for each shard, and yield the written shard, or the error if it fails for good.

        Args:
            work: writes a shard. Its last argument identifies the attempt, so that no executor returns a cached result.
            tasks: its other arguments, by the number of the shard.
            executor: any executor of ``concurrent.futures``; by default, processes are forked.
            max_workers: the number of workers, by default one per CPU; 0 works in this process.
            retries: how often a shard is retried.
            names: the names of the shards for the log.
        """
        call = secrets.token_hex(8)

        def make_task(number: int, attempt: int) -> tuple[tuple[int, int], tuple[Any, ...]]:
            return (number, attempt), (*tasks[number], f"{call}-{attempt}")

        waiting = deque(make_task(number, 1) for number in tasks)
        with closing(run_tasks(self._start_workers(work, executor, max_workers, len(tasks)), waiting)) as done:
            for (number, attempt), task in done:
                failure = failure_of(task)
                if failure is None:
                    yield number, task.result()
                elif attempt > retries or isinstance(failure, DETERMINISTIC_ERRORS):
                    yield number, failure
                else:
                    error = f"{type(failure).__name__}: {failure}"
                    LOGGER.warning("%s could not be converted, and will be retried: %s", names[number], error)
                    waiting.append(make_task(number, attempt + 1))

    def record(self, number: int, written: WrittenShard, identity: str) -> None:
        """Record a finished shard in the journal, if there is one."""
        if self._journal is not None:
            self._journal.add(FinishedShard(number, written.info, written.read, identity, written.skipped))

    def remove_old(self) -> None:
        """Remove surplus shards of an earlier run; call this after all new ones are written."""
        remove_old_shards(self._old, self._storage_options)

    def _start_workers(
        self, work: Callable[..., Any], executor: Executor | None, max_workers: int | None, shards: int
    ) -> ShardExecutor:
        if executor is not None:
            return BorrowedExecutor(work, executor, max_workers)
        if max_workers == 0:
            return InProcessExecutor(work)
        count = max(1, min(max_workers or len(os.sched_getaffinity(0)), shards))
        # A worker that inherits the journal would keep it locked until it ends.
        return ForkedPool(work, count, [] if self._journal is None else [self._journal.fileno()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal is not None:
            self._journal.close()


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShardWriteError(
            f"The folder {str(folder)!r} cannot be created: {error.strerror}. Choose another output"
        ) from error


def _name(output: str) -> str:
    """Return the name of a shard without its folder, which may be spelled differently, and without credentials."""
    return redact(output).rpartition("/")[2]
