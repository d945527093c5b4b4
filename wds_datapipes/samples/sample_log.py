"""Logging of samples: summaries for people, and a line for each sample for programs."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from wds_datapipes.errors import MissingSidecarError
from wds_datapipes.io.openers import redact
from wds_datapipes.shards.position import ItemCounter, SamplePosition

T = TypeVar("T")

LogTarget: TypeAlias = "logging.Logger | Literal['stdout', 'stderr']"

#: Escapes the separators of columns and lines in the key log, which a key may contain.
ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
#: The dtype kinds of NumPy arrays whose first values are shown.
PLAIN_NUMBERS = "biufcSU"


def log_samples(
    source: Iterable[T],
    target: LogTarget,
    *,
    first: int,
    every: int | None,
    name: str,
    width: int,
    key_log: str | None,
    rank_and_worker: Callable[[], tuple[int, int]],
    counter: ItemCounter,
    position: Callable[[], SamplePosition] | None = None,
) -> Iterator[T]:
    """Yield all items; log the first ones and every ``every``-th one, and write a line for each.

    Items that are replayed after a resume are not logged again.
    """
    rank, worker = rank_and_worker()
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
    """Return a short view of a value: its type, its size, and its beginning.

    >>> describe(b"abc" * 1000, width=12), describe(np.zeros((2, 3), np.uint8))
    ("bytes, 3,000 bytes: b'abcabca...", 'ndarray uint8 (2, 3), 6 bytes: [0, 0, 0]')
    """
    return _describe_item(value, width, depth=0)


def _describe_item(value: object, width: int, depth: int) -> str:
    try:
        return f"{type(value).__name__}{_facts(value, width, depth)}"
    except Exception as error:  # noqa: BLE001 - a value that cannot be shown must not stop the training
        return f"{type(value).__name__}, which cannot be shown: {type(error).__name__}"


def _facts(value: Any, width: int, depth: int) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f" of {value.bit_length():,} bits"
    if isinstance(value, bool | int | float | complex | np.generic):
        return f" {_cut(repr(value), width)}"
    if isinstance(value, str):
        return f", {len(value):,} characters: {_cut(repr(value[: width + 1]), width)}"
    if isinstance(value, bytes | bytearray | memoryview):
        size = value.nbytes if isinstance(value, memoryview) else len(value)
        return f", {size:,} bytes: {_cut(repr(bytes(value[: width + 1])), width)}"
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "nbytes"):
        device = str(getattr(value, "device", "cpu"))
        where = "" if device == "cpu" else f" on {device}"
        # Showing values on another device would require a copy.
        begin = _cut(_first_items(value), width) if device == "cpu" else ""
        return f" {value.dtype} {tuple(value.shape)}, {value.nbytes:,} bytes{where}{begin and f': {begin}'}"
    if isinstance(value, Mapping):
        parts = [
            f"{key!s:.30}: {_describe_item(part, width // 2, depth + 1)}" for key, part in islice(value.items(), 3)
        ]
        return _several(len(value), parts, depth)
    if isinstance(value, list | tuple | set | frozenset):
        return _several(len(value), [_describe_item(part, width // 2, depth + 1) for part in islice(value, 3)], depth)
    if callable(getattr(value, "getbands", None)):  # a Pillow image
        return f" {value.mode} {value.size[0]}x{value.size[1]}"
    return ""


def _several(count: int, parts: list[str], depth: int) -> str:
    more = "; ..." if count > len(parts) else ""
    return f" of {count:,}" + (f" ({'; '.join(parts)}{more})" if parts and depth < 2 else "")


def _first_items(array: Any) -> str:
    kind = getattr(array.dtype, "kind", "f")
    if 0 in array.shape or kind not in PLAIN_NUMBERS:
        return ""
    while array.ndim > 1:
        array = array[0]
    if array.ndim == 0:
        return repr(array.tolist())
    return repr(array[:5].tolist())[:-1] + (", ...]" if len(array) > 5 else "]")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 3, 0)]}..."


def _log_item(target: LogTarget, title: str, item: object, width: int) -> None:
    if isinstance(target, logging.Logger) and not target.isEnabledFor(logging.INFO):
        return
    lines = [title]
    if isinstance(item, dict):
        shown = {**item, "__url__": redact(str(item["__url__"]))} if "__url__" in item else item
        lines += [f"    {field!s:.60}: {_describe_item(value, width, 0)}" for field, value in shown.items()]
    elif isinstance(item, list | tuple):
        lines += [f"    [{index}]: {_describe_item(value, width, 0)}" for index, value in enumerate(item[:20])]
    else:
        lines.append(f"    {_describe_item(item, width, 0)}")
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
    try:
        data = line.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate, such as in JSON
        data = line.encode("utf-8", "backslashreplace")
    try:
        if os.write(file, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise MissingSidecarError(f"The key log {path!r} cannot be written: {error.strerror}") from error
