"""The stage that logs samples."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal, TextIO

from torch import distributed
from torch.utils.data import get_worker_info

from wds_datapipes.arguments import check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.pipes.sharding import find_rank_and_worker
from wds_datapipes.pipes.stage import CountingStage, position_reader_of, register_stage
from wds_datapipes.samples.sample_log import LogTarget, log_samples


@register_stage("log_samples")
class SampleLogger(CountingStage[Any]):
    """Log a summary of some samples, and the keys of all (functional name: ``log_samples``).

    The summary has the type, shape or length, and start of each value. Samples are counted by worker and epoch.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields samples, or anything else.
        first: the number of samples to log at the start.
        every: after that, log each sample whose number, from 1, is a multiple of this.
        logger: a ``logging.Logger``, which gets records of the level INFO; or ``"stderr"`` or ``"stdout"``. By default
            the logger ``wds_datapipes``, which shows nothing until the program configures logging, for example by
            ``logging.basicConfig(level="INFO")``.
        key_log: a file to append a line to for each sample: its number from 0, worker, rank, key and shard, separated
            by tabs. Tabs, line breaks and backslashes in a key are escaped as in Python. Several processes may append
            to one local file. After a state is loaded, the lines of samples that were prefetched but not delivered are
            repeated, with the same numbers.
        name: the prefix of the records.
        width: the most characters of a value to show.

    Raises:
        MissingSidecarError: ``key_log`` cannot be written.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "jpg": b"..."}, {"__key__": "b", "jpg": b"..."}])
        >>> _ = list(samples.log_samples(first=1, logger="stdout"))
        log_samples: item 0 of worker 0, rank 0
            __key__: str of 1: 'a'
            jpg: bytes of 3: b'...'
    """

    def __init__(
        self,
        source: IterDataPipe[Any],
        *,
        first: int = 3,
        every: int | None = None,
        logger: logging.Logger | TextIO | Literal["stdout", "stderr"] | None = None,
        key_log: str | os.PathLike[str] | None = None,
        name: str = "log_samples",
        width: int = 60,
    ) -> None:
        first = check_integer("first", first, 0)
        every = check_optional_integer("every", every, 1)
        width = check_integer("width", width, 1)
        # A stream cannot be pickled; each worker uses its own.
        target = "stdout" if logger is sys.stdout else "stderr" if logger is sys.stderr else logger
        if target is not None and not isinstance(target, logging.Logger) and target not in ("stdout", "stderr"):
            raise TypeError(
                f'logger must be a logging.Logger, "stderr" or "stdout", not {logger!r}. To log to a file, use a '
                "logger with a FileHandler"
            )
        self.source = source
        self.first = first
        self.every = every
        self.logger: LogTarget = logging.getLogger("wds_datapipes") if target is None else target
        self.key_log = None if key_log is None else os.fspath(key_log)
        self.name = name
        self.width = width

    def __iter__(self) -> Iterator[Any]:
        yield from log_samples(
            self.source,
            self.logger,
            first=self.first,
            every=self.every,
            name=self.name,
            width=self.width,
            key_log=self.key_log,
            rank_and_worker=self._rank_and_worker,
            counter=self._begin_counting(),
            position=position_reader_of(self.source),
        )

    def _rank_and_worker(self) -> tuple[int, int]:
        """Return the rank and worker from torch, or else from the stages that split the data."""
        rank, _, worker = find_rank_and_worker(self)
        info = get_worker_info()
        if info is not None:
            worker = info.id
        if distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank()
        return rank, worker
