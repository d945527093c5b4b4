"""Standard output with errors that can be reported as one line."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["OutputError", "guarded_output"]

STANDARD_OUTPUT = 1


class OutputError(Exception):
    """Standard output cannot be written: its device is full, or it is closed."""


class _StandardOutput(io.RawIOBase):
    """File descriptor 1, with errors distinguishable from those of other files."""

    def __init__(self) -> None:
        super().__init__()
        self._failed = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STANDARD_OUTPUT

    def isatty(self) -> bool:
        return os.isatty(STANDARD_OUTPUT)

    def write(self, data: Any, /) -> int:
        if self._failed:  # the rest of Python's buffer at exit would raise a second error
            return memoryview(data).nbytes
        try:
            return os.write(STANDARD_OUTPUT, data)
        except (BlockingIOError, BrokenPipeError):
            raise
        except OSError as error:
            self._failed = True
            raise OutputError(f"Standard output cannot be written: {_reason(error)}") from None


@contextmanager
def guarded_output() -> Iterator[None]:
    """Make standard output raise `OutputError`, and escape characters that its encoding does not support.

    Standard descriptors that are closed at the start are opened for reading; otherwise the next opened file would take
    the number, and receive the output. A stream that a test has put in its place is kept.
    """
    for descriptor in range(3):
        if not _is_open(descriptor):
            os.open(os.devnull, os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  open until the process ends
    before = sys.stdout
    if before is not None and (before is not sys.__stdout__ or sys.__stdout__.fileno() != STANDARD_OUTPUT):
        yield
        return
    encoding = "utf-8" if before is None else before.encoding
    is_terminal = os.isatty(STANDARD_OUTPUT)
    buffer = io.BufferedWriter(_StandardOutput())
    sys.stdout = io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=is_terminal)
    try:
        yield
        sys.stdout.flush()
    finally:
        if before is not None:
            sys.stdout = before


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _reason(error: OSError) -> str:
    return "it is closed" if error.errno == errno.EBADF else f"{error.strerror}"
