"""Rows of tables: CSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.extras import require
from wds_datapipes.prepare.sources.listing import open_listing
from wds_datapipes.redaction import redact

#: The rows of a Parquet file that are read at a time.
ROWS_PER_BATCH = 256
#: The delimiter of each kind of text, and the extensions of all tables.
DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*DELIMITERS, ".jsonl", ".ndjson", ".parquet")

Row: TypeAlias = "Mapping[str, Any] | Exception"
"""The values of a row by column, or the error of a row that cannot be read."""


class Rows(NamedTuple):
    """The rows of a table.

    Attributes:
        read: yields each row, from the beginning at each call; raises `SampleSourceError` if the table cannot be read.
        columns: the columns in order; ``None`` if each row has its own.
        is_text: whether all values are text, as in the file.
    """

    read: Callable[[], Iterator[Row]]
    columns: Sequence[str] | None = None
    is_text: bool = False


def open_rows(path: str) -> Rows:
    """Open a table: ``.csv``, ``.tsv``, ``.jsonl``, ``.ndjson`` or ``.parquet``.

    Args:
        path: the table, a local file.

    Raises:
        SampleSourceError: the table cannot be read.
        MissingDependencyError: the package for Parquet is not installed.
        ValueError: the extension is not supported.
    """
    ending = os.path.splitext(path)[1].lower()  # noqa: PTH122  of a string
    if ending not in ENDINGS:
        message = f"{redact(path)!r} is not a table: the supported extensions are {', '.join(ENDINGS)}"
        raise ValueError(f"{message}. Rename it if it is one of these")
    if ending in DELIMITERS:
        lines = partial(_read_lines, path, DELIMITERS[ending])
        columns = [name.strip() for name in next(lines(), [])]
        if not columns or not all(columns) or len(set(columns)) < len(columns):
            message = f"The first row of {path!r} must name each column once, but it is {columns}"
            raise SampleSourceError(message)
        return Rows(partial(_read_text, path, lines, columns), columns, is_text=True)
    if ending == ".parquet":
        with _open_parquet(path) as file:
            return Rows(partial(_read_parquet, path), list(file.schema_arrow.names))
    return Rows(partial(_read_json, path))


def _read_text(path: str, lines: Callable[[], Iterator[list[str]]], columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table with a header; quoted values may contain newlines."""
    rows = lines()
    next(rows)
    for number, values in enumerate(filter(None, rows), 1):
        location = f"row {number} of {path!r}"
        try:
            "".join(values).encode()
            yield dict(zip(columns, values, strict=True))
        except UnicodeEncodeError as error:
            yield SampleSourceError(f"{location} is not UTF-8: {error}")
        except ValueError:
            yield SampleSourceError(
                f"{location} has {len(values)} values for {len(columns)} columns. Quote values with the delimiter"
            )


def _read_lines(path: str, delimiter: str) -> Iterator[list[str]]:
    number = -1
    with open_listing(path) as stream:
        # An invalid byte is an error of its row.
        lines = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        try:
            for row in csv.reader(lines, delimiter=delimiter):
                yield row
                number += bool(row)
        except csv.Error as error:
            where = "the header" if number < 1 else f"row {number}"
            raise SampleSourceError(f"The table {path!r} cannot be read after {where}: {error}. Fix that row") from None


def _read_json(path: str) -> Iterator[Row]:
    """Yield the rows of a file of JSON objects, one per line."""
    with open_listing(path) as stream:
        for number, line in enumerate((line for line in stream if line.strip()), 1):
            location = f"row {number} of {path!r}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                yield SampleSourceError(f"{location} is not JSON in UTF-8: {error}")
            else:
                kind = f"{location} is a JSON {type(row).__name__}, not an object with columns"
                yield row if isinstance(row, dict) else SampleSourceError(kind)


def _read_parquet(path: str) -> Iterator[Row]:
    with _open_parquet(path) as file:
        for batch in file.iter_batches(ROWS_PER_BATCH, use_threads=False):
            yield from batch.to_pylist()


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    arrow = require("pyarrow", extra="parquet", purpose="read tables in Parquet")
    parquet = import_module("pyarrow.parquet")
    try:
        with open_listing(path) as stream, parquet.ParquetFile(stream) as file:
            yield file
    except (OSError, arrow.ArrowException) as error:
        raise SampleSourceError(f"The table {path!r} cannot be read: {error}") from None
