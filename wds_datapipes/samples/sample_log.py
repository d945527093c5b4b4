"""Logging of samples: summaries for people, and a line for each sample for programs."""

from __future__ import annotations

import errno
import logging
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Literal, TypeAlias, TypeVar

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.io.openers import redact
from wds_datapipes.shards.position import ItemCounter, SamplePosition

T = TypeVar("T")

LogTarget: TypeAlias = "logging.Logger | Literal['stdout', 'stderr']"

#: Escapes the separators of columns and lines in the key log, which a key may contain.
ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def log_samples(
    source: Iterable[T],
    target: LogTarget,
    *,
    first: int,
    every: int | None,
    name: str,
    width: int,
    key_log: str | None,
    rank: int,
    worker: int,
    counter: ItemCounter,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield all items; log the first ones and every ``every``-th one, and write a line for each.

    Items that are replayed after a resume are not logged again.
    """
    file = None
    if key_log is not None:
        try:
            file = os.open(key_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise MissingSidecarError(
                f"The key log {key_log!r} cannot be written: {error.strerror}. Name a file in a folder that exists"
            ) from error
    try:
        for item in source:
            if counter.is_repeat(position):
                yield item
                continue
            index = counter.count - 1
            if file is not None and key_log is not None:
                key, url = (item.get("__key__", ""), item.get("__url__", "")) if isinstance(item, dict) else ("", "")
                columns = (index, worker, rank, key, redact(str(url)))
                _append(file, "\t".join(str(column).translate(ESCAPES) for column in columns) + "\n", key_log)
            if index < first or (every is not None and (index + 1) % every == 0):
                _log_item(target, f"{name}: item {index} of worker {worker}, rank {rank}", item, width)
            yield item
    finally:
        if file is not None:
            os.close(file)


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


def _log_item(target: LogTarget, title: str, item: object, width: int) -> None:
    if isinstance(target, logging.Logger) and not target.isEnabledFor(logging.INFO):
        return
    lines = [title]
    if isinstance(item, dict):
        shown = {**item, "__url__": redact(str(item["__url__"]))} if "__url__" in item else item
        lines += [f"    {field!s:.60}: {describe(value, width)}" for field, value in shown.items()]
    elif isinstance(item, list | tuple):
        lines += [f"    [{index}]: {describe(value, width)}" for index, value in enumerate(item[:20])]
    else:
        lines.append(f"    {describe(item, width)}")
    text = "\n".join(lines)
    if isinstance(target, logging.Logger):
        target.info("%s", text)
    else:
        (sys.stdout if target == "stdout" else sys.stderr).write(f"{text}\n")


def _append(file: int, line: str, path: str) -> None:
    """Append a line to a file in a single write, so that lines of several processes do not mix.

    Raises:
        MissingSidecarError: the file cannot be written.
    """
    data = line.encode("utf-8", "backslashreplace")  # of lone surrogates, which stand for bytes that are not UTF-8
    try:
        if os.write(file, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise MissingSidecarError(f"The key log {path!r} cannot be written: {error.strerror}") from error
