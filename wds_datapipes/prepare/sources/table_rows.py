"""Rows of tables: CSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, BinaryIO, Protocol, TypeAlias

from wds_datapipes.errors import SampleSourceError, ShardError
from wds_datapipes.extras import require
from wds_datapipes.io.openers import local_path, open_url, redact, split_scheme

#: The rows of a Parquet file that are read at a time.
ROWS_PER_BATCH = 256

Row: TypeAlias = "Mapping[str, Any] | Exception"
"""The values of a row by column, or the error of a row that cannot be read."""


class Rows(Protocol):
    """The rows of a table, which are read again by each iteration."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns in order; ``None`` if each row has its own."""

    @property
    def is_text(self) -> bool:
        """Whether all values are text, as in the file."""

    def __iter__(self) -> Iterator[Row]:
        """Yield each row.

        Raises:
            SampleSourceError: the table cannot be read.
        """


def open_rows(path: str, storage_options: Mapping[str, Any] | None = None) -> Rows:
    """Open a table: ``.csv``, ``.tsv``, ``.jsonl``, ``.ndjson`` or ``.parquet``.

    Args:
        path: the table, or its URL.
        storage_options: passed to a remote file system.

    Raises:
        SampleSourceError: the table cannot be read.
        MissingDependencyError: the package for Parquet is not installed.
        ValueError: the extension is not supported.
    """
    kinds: dict[str, Callable[[str, Mapping[str, Any] | None], Rows]] = {
        ".csv": CsvRows,
        ".tsv": lambda path, options: CsvRows(path, options, "\t"),
        ".jsonl": JsonRows,
        ".ndjson": JsonRows,
        ".parquet": ParquetRows,
    }
    ending = get_extension(path)
    if ending not in kinds:
        message = f"{redact(path)!r} is not a table: the supported extensions are {', '.join(kinds)}"
        raise ValueError(f"{message}. Rename it if it is one of these")
    return kinds[ending](path, storage_options)


def get_extension(path: str) -> str:
    """Return the extension of a path or URL in lower case, without the query of a URL.

    >>> get_extension("a.b/Rows.CSV"), get_extension("https://host/rows.csv?part=1.txt"), get_extension("rows.csv?part")
    ('.csv', '.csv', '.csv?part')
    """
    name = path.partition("?")[0] if split_scheme(path)[0] in ("http", "https") else path
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  of a string


@contextmanager
def open_listing(path: str, storage_options: Mapping[str, Any] | None) -> Iterator[BinaryIO]:
    """Open a table or another list of samples.

    Raises:
        SampleSourceError: the file cannot be read.
    """
    local = local_path(path)
    try:
        with open_url(path, storage_options=storage_options) if local is None else open(local, "rb") as stream:  # noqa: PTH123  a string
            yield stream
    except ShardError as error:
        raise SampleSourceError(str(error)) from None
    except OSError as error:
        raise SampleSourceError(f"The file {redact(path)!r} cannot be read: {error.strerror or error}") from None


@dataclass
class CsvRows:
    """The rows of a CSV table with a header; quoted values may contain newlines."""

    path: str
    storage_options: Mapping[str, Any] | None
    delimiter: str = ","
    is_text = True

    @cached_property
    def columns(self) -> list[str]:
        """The columns in order."""
        columns = [name.strip() for name in next(self._read(), [])]
        if not columns or not all(columns) or len(set(columns)) < len(columns):
            raise SampleSourceError(
                f"The first row of {redact(self.path)!r} must name each column once, but it is {columns}"
            )
        return columns

    def __iter__(self) -> Iterator[Row]:
        columns = self.columns
        rows = self._read()
        next(rows)
        for number, values in enumerate(filter(None, rows), 1):
            location = f"row {number} of {redact(self.path)!r}"
            try:
                "".join(values).encode()
            except UnicodeEncodeError as error:
                yield SampleSourceError(f"{location} is not UTF-8: {error}")
                continue
            if len(values) == len(columns):
                yield dict(zip(columns, values, strict=True))
            else:
                yield SampleSourceError(
                    f"{location} has {len(values)} values for {len(columns)} columns. Quote values that contain "
                    f"{self.delimiter!r}"
                )

    def _read(self) -> Iterator[list[str]]:
        number = -1
        with open_listing(self.path, self.storage_options) as stream:
            # An invalid byte is an error of its row.
            lines = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
            try:
                for row in csv.reader(lines, delimiter=self.delimiter):
                    yield row
                    number += bool(row)
            except csv.Error as error:
                where = "the header" if number < 1 else f"row {number}"
                raise SampleSourceError(
                    f"The table {redact(self.path)!r} cannot be read after {where}: {error}. Fix that row"
                ) from None


@dataclass(frozen=True)
class JsonRows:
    """The rows of a file of JSON objects, one per line."""

    path: str
    storage_options: Mapping[str, Any] | None
    columns = None
    is_text = False

    def __iter__(self) -> Iterator[Row]:
        with open_listing(self.path, self.storage_options) as stream:
            for number, line in enumerate((line for line in stream if line.strip()), 1):
                location = f"row {number} of {redact(self.path)!r}"
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError as error:
                    yield SampleSourceError(f"{location} is not UTF-8: {error}")
                except (json.JSONDecodeError, RecursionError) as error:
                    yield SampleSourceError(f"{location} is not JSON: {error}")
                else:
                    kind = f"{location} is a JSON {type(row).__name__}, not an object with columns"
                    yield row if isinstance(row, dict) else SampleSourceError(kind)


class ParquetRows:
    """The rows of a Parquet file."""

    is_text = False

    def __init__(self, path: str, storage_options: Mapping[str, Any] | None) -> None:
        self._path, self._storage_options = path, storage_options
        self._arrow = require("pyarrow", extra="parquet", purpose="read tables in Parquet")
        self._parquet = import_module("pyarrow.parquet")
        with self._open() as file:
            self.columns: list[str] = list(file.schema_arrow.names)

    def __iter__(self) -> Iterator[Row]:
        with self._open() as file:
            for batch in file.iter_batches(ROWS_PER_BATCH, use_threads=False):
                yield from batch.to_pylist()

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file, or a temporary copy of a remote one."""
        try:
            with open_listing(self._path, self._storage_options) as stream, tempfile.TemporaryFile() as copy:
                if local_path(self._path) is None:
                    shutil.copyfileobj(stream, copy, 1 << 20)
                    copy.seek(0)
                with self._parquet.ParquetFile(stream if local_path(self._path) is not None else copy) as file:
                    yield file
        except (OSError, self._arrow.ArrowException) as error:
            raise SampleSourceError(f"The table {redact(self._path)!r} cannot be read: {error}") from None
