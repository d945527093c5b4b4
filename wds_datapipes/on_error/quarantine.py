"""Quarantine file: one line of JSON for each skipped item, from any number of processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from wds_datapipes.counters import SkippedItem
from wds_datapipes.errors import CorruptSidecarError, MissingSidecarError


def write_quarantine(path: str, item: SkippedItem) -> None:
    """Append an item to the file; this is safe for several processes at once.

    Raises:
        MissingSidecarError: the file cannot be written.
    """
    line = json.dumps(item._asdict()).encode() + b"\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if written != len(line):
            raise OSError("the disk is full")
    except OSError as error:
        raise MissingSidecarError(
            f"Skipped items cannot be written to {path}: {error.strerror or error}. The item is {item}"
        ) from error


def read_quarantine(path: str | os.PathLike[str]) -> list[SkippedItem]:
    """Read the skipped items from the quarantine file of an `ErrorBudget`, in order.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> samples = IterableWrapper([{"__key__": "a", "cls": b"one"}, {"__key__": "b", "cls": b"2"}])
        >>> budget = ErrorBudget(max_errors=10, quarantine="skipped.jsonl", warn=False)
        >>> len(list(samples.wds_decode(on_error=budget)))
        1
        >>> [(item.key, item.field, item.error) for item in read_quarantine("skipped.jsonl")]
        [('a', 'cls', 'DecodeError')]

    Args:
        path: the file.

    Raises:
        MissingSidecarError: there is no such file.
        CorruptSidecarError: the file is not a quarantine file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MissingSidecarError(f"The quarantine file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorruptSidecarError(f"{path} is not a quarantine file: {error}") from error
    return [_parse_line(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def _parse_line(line: str, name: str) -> SkippedItem:
    try:
        item = SkippedItem(**json.loads(line))
        if not all(isinstance(value, str) for value in item):
            raise ValueError("its values are not all text")
        return item
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptSidecarError(f"{name} is not a quarantine file: {error}") from error
