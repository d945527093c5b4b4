"""Logging of samples: summaries for people, and the positions of all for programs."""

from __future__ import annotations

import errno
import logging
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from wds_datapipes.errors import MissingSidecarError, plural
from wds_datapipes.io.openers import redact
from wds_datapipes.io.urls import create_folder
from wds_datapipes.samples.fields import not_a_sample_error
from wds_datapipes.shards.held_samples import ItemCounter
from wds_datapipes.shards.position import SamplePosition
from wds_datapipes.types import Instance

T = TypeVar("T")

LogTarget: TypeAlias = "logging.Logger | Literal['stdout', 'stderr']"

#: The size of a position in a log in bytes, and how many of its bits are the offset; the others number the shard.
BYTES, OFFSET_BITS = 8, 40


def log_samples(
    source: Iterable[T],
    target: LogTarget,
    *,
    first: int,
    every: int | None,
    positions: Path | None,
    instance: Instance,
    counter: ItemCounter,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield all items; log the first ones and every ``every``-th one, and the positions of all.

    Items that are read again on resume are not logged again.
    """
    with nullcontext() if positions is None else PositionLog(positions, counter.count) as log:
        for item in source:
            if counter.is_repeat(position):
                yield item
                continue
            index = counter.count - 1
            if log is not None and position is not None:
                if not isinstance(item, dict):
                    raise not_a_sample_error("log_samples(positions=)", item)
                log.append(item["__url__"], position().start)
            if index < first or (every is not None and (index + 1) % every == 0):
                _log_item(target, f"log_samples: item {index} of worker {instance.worker}, rank {instance.rank}", item)
            yield item


def describe(value: object, width: int = 60) -> str:
    """Return a short view of a value: its type, its shape or length, and its beginning.

    >>> import numpy as np
    >>> describe(b"abc" * 1000, width=12), describe(np.zeros((2, 3), np.uint8))
    ("bytes of 3,000: b'abcabca...", 'ndarray uint8 (2, 3)')
    """
    kind = type(value).__name__
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f"{kind} {value.dtype} {tuple(value.shape)}"
        size = f" of {len(value):,}" if isinstance(value, Sized) else ""
        begin = repr(value[: width + 1]) if isinstance(value, str | bytes | bytearray) else reprlib.repr(value)
        return f"{kind}{size}: {begin if len(begin) <= width else f'{begin[: max(width - 3, 0)]}...'}"
    except Exception as error:  # noqa: BLE001 - a value that cannot be shown must not stop the training
        return f"{kind}, which cannot be shown: {type(error).__name__}"


def _log_item(target: LogTarget, title: str, item: object) -> None:
    if isinstance(target, logging.Logger) and not target.isEnabledFor(logging.INFO):
        return
    lines = [title]
    if isinstance(item, dict):
        shown = {**item, "__url__": redact(str(item["__url__"]))} if "__url__" in item else item
        lines += [f"    {field!s:.60}: {describe(value)}" for field, value in shown.items()]
    elif isinstance(item, list | tuple):
        lines += [f"    [{index}]: {describe(value)}" for index, value in enumerate(item[:20])]
    else:
        lines.append(f"    {describe(item)}")
    text = "\n".join(lines)
    if isinstance(target, logging.Logger):
        target.info("%s", text)
    else:
        (sys.stdout if target == "stdout" else sys.stderr).write(f"{text}\n")


class PositionLog(ExitStack):
    """A file with 8 bytes for the position of each sample of a worker in an epoch, and a file that lists their shards.

    Args:
        path: the path of the file.
        count: the number of samples to keep; samples that were prefetched before a resume follow them and are removed.

    Raises:
        MissingSidecarError: a file cannot be written, or has fewer samples.
    """

    def __init__(self, path: Path, count: int) -> None:
        super().__init__()
        self._path, files, mode = path, (path, path.with_suffix(".shards")), "r+b" if count else "w+b"
        with self._writing():
            create_folder(path.parent)
            self._file, self._list = (self.enter_context(each.open(mode, 0)) for each in files)
            if (known := path.stat().st_size // BYTES) < count:
                raise OSError(
                    errno.ENODATA, f"it has only {known:,} of {plural(count, 'sample')} before the loaded state"
                )
            self._file.truncate(self._file.seek(count * BYTES))
            urls = os.fsdecode(self._list.read()).split("\0")
            self._list.seek(-len(os.fsencode(urls.pop())), os.SEEK_END)  # a part of one
            self._shards = {url: number for number, url in enumerate(urls)}

    def append(self, url: str, offset: int) -> None:
        """Append the position of a sample.

        Raises:
            MissingSidecarError: a file cannot be written.
        """
        with self._writing():
            if (shard := self._shards.get(url)) is None:
                shard, name = len(self._shards), os.fsencode(f"{redact(url)}\0")
                if self._list.write(name) < len(name):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._shards[url] = shard
            self._file.write((shard << OFFSET_BITS | offset).to_bytes(BYTES, "little"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise MissingSidecarError(f"The log {str(self._path)!r} cannot be written: {error.strerror}") from error
