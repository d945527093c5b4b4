"""A short view of what passes by, and a line for each sample."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal, TextIO

from torch import distributed
from torch.utils.data import IterDataPipe, get_worker_info

from wds_datapipes.pipes.sharding import place_of
from wds_datapipes.pipes.stage import CountingStage, register_stage
from wds_datapipes.pipes.state.graph import position_reader_of
from wds_datapipes.samples.sample_log import LogTarget, log_samples

__all__ = ["SampleLogger"]


@register_stage("log_samples")
class SampleLogger(CountingStage[Any]):
    """Show some of the samples, and keep a list of all (functional name: ``log_samples``).

    Of each value its type, shape, size and beginning are shown, never the whole of it. Samples are counted in each
    worker and each epoch for itself.

    Yields:
        Any: the items of ``source``, unchanged.

    Args:
        source: yields samples, or anything else.
        first: how many samples to show at the beginning.
        every: after that, show each sample whose number, from 1, is a multiple of this.
        logger: a ``logging.Logger``, which gets records of the level INFO; or ``"stderr"`` or ``"stdout"``. By default
            the logger ``wds_datapipes``, which shows nothing until the program has set up logging, as by
            ``logging.basicConfig(level="INFO")``.
        key_log: a file to which a line is appended for each sample: its number from 0, worker, rank, key and shard,
            separated by tabs. Tabs, line breaks and backslashes in a key are written as in Python. Several processes
            may write to one local file. When a state is loaded, what was made ahead and never delivered is made again:
            its lines come again, with the same numbers.
        name: what the records begin with.
        width: how many characters of a value to show at most.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "jpg": b"..."}, {"__key__": "b", "jpg": b"..."}])
        >>> _ = list(samples.log_samples(first=1, logger="stdout"))
        log_samples: item 0 of worker 0, rank 0
            __key__: str, 1 characters: 'a'
            jpg: bytes, 3 bytes: b'...'
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
        super().__init__()
        for option, number, least in (("first", first, 0), ("every", every, 1), ("width", width, 1)):
            if number is None and option == "every":
                continue
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{option} is a number from {least}, not {number!r}")
        # A stream cannot be pickled, and a worker has its own.
        target = "stdout" if logger is sys.stdout else "stderr" if logger is sys.stderr else logger
        if target is not None and not isinstance(target, logging.Logger) and target not in ("stdout", "stderr"):
            raise TypeError(
                f'logger is a logging.Logger, "stderr" or "stdout", not {logger!r}: for a file, use a logger with a '
                "FileHandler"
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
            place=self._place,
            passed=self._begin_counting(),
            address=position_reader_of(self.source),
        )

    def _place(self) -> tuple[int, int]:
        """Return the rank and the worker, as the stage knows them that splits the data, or else as torch does."""
        rank, _, worker = place_of(self)
        info = get_worker_info()
        if info is not None:
            worker = info.id
        if distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank()
        return rank, worker
