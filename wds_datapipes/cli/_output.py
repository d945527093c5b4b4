"""Standard output with errors that can be reported as one line."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STANDARD_OUTPUT = 1


class OutputError(Exception):
    """Standard output cannot be written: its device is full, or it is closed."""


class _StandardOutput(io.BufferedWriter):
    """File descriptor 1, with errors distinguishable from those of other files.

    They are translated here and not in the unbuffered stream below, where Ctrl-C could interrupt Python code between
    the write and its return: the buffer would not count the bytes as written, and write them again at exit.
    """

    def __init__(self) -> None:
        super().__init__(io.FileIO(STANDARD_OUTPUT, "wb", closefd=False))

    def write(self, data: Any, /) -> int:
        with _translated_errors():
            return super().write(data)

    def flush(self) -> None:
        with _translated_errors():
            super().flush()


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except (BlockingIOError, BrokenPipeError):
        raise
    except OSError as error:
        # The rest of the buffer would raise a second error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)
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
    sys.stdout = io.TextIOWrapper(_StandardOutput(), encoding, errors="backslashreplace", line_buffering=is_terminal)
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
