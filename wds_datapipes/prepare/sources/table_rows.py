"""Random access to the rows of tables: CSV, JSON lines and Parquet.

Remote files are copied to an anonymous temporary file first.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
import os
import shutil
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from wds_datapipes.errors import SampleSourceError, ShardError
from wds_datapipes.extras import require
from wds_datapipes.io.openers import local_path, open_url, redact, split_scheme

__all__ = ["Rows", "Slices", "get_extension", "open_rows"]

#: The rows copied at a time.
ROWS_PER_BATCH = 1024


class Rows(Protocol):
    """A table with random access to its rows, also from forked processes."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns in order; ``None`` if each row has its own."""

    @property
    def is_text(self) -> bool:
        """Whether all values are text, as in the file."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def row(self, number: int, /) -> Mapping[str, Any]:
        """Return a row as a mapping of columns to values.

        Raises:
            SampleSourceError: the row cannot be read.
        """

    def close(self) -> None:
        """Close the table."""


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


def open_descriptor(path: str, storage_options: Mapping[str, Any] | None) -> int:
    """Open a local file, or a temporary copy of a remote one, with random access.

    Raises:
        SampleSourceError: the file cannot be read.
    """
    local = local_path(path)
    try:
        if local is not None:
            return os.open(local, os.O_RDONLY)
        with open_url(path, storage_options=storage_options) as stream, tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy, 1 << 20)
            copy.flush()
            return os.dup(copy.fileno())
    except ShardError as error:
        raise SampleSourceError(str(error)) from None
    except OSError as error:
        raise SampleSourceError(f"The file {redact(path)!r} cannot be read: {error.strerror}") from None


class Slices:
    """Parts of a file by their offsets, read on demand."""

    _file = -1

    def __init__(self, path: str, storage_options: Mapping[str, Any] | None) -> None:
        self.path = redact(path)  # for messages
        self._begins, self._ends = array("Q"), array("Q")
        self._file = open_descriptor(path, storage_options)

    def __len__(self) -> int:
        """The number of parts."""
        return len(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Add a part."""
        self._begins.append(begin)
        self._ends.append(end)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line of the file with its end offset."""
        try:
            with open(self._file, "rb", closefd=False) as stream:
                at = stream.seek(0)
                for line in stream:
                    at += len(line)
                    yield at, line
        except OSError as error:
            raise SampleSourceError(f"The file {self.path!r} cannot be read: {error.strerror}") from None

    def text(self, number: int) -> str:
        """Read a part."""
        begin, end = self._begins[number], self._ends[number]
        try:
            data = os.pread(self._file, end - begin, begin)  # forked processes share the file position
            if len(data) < end - begin:
                raise OSError(0, "it was truncated")
            return data.decode()
        except OSError as error:
            raise SampleSourceError(f"The file {self.path!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SampleSourceError(f"{self.describe(number)} is not UTF-8: {error}") from None

    def describe(self, number: int) -> str:
        """Describe a part for messages."""
        return f"row {number + 1} of {self.path!r}"

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


class CsvRows:
    """A CSV table with a header; quoted values may contain newlines."""

    is_text = True

    def __init__(self, path: str, storage_options: Mapping[str, Any] | None, delimiter: str = ",") -> None:
        self._slices, self._delimiter = Slices(path, storage_options), delimiter
        self._end = 0
        try:
            self.columns: list[str] = self._scan(self._slices.path)
        except BaseException:
            self.close()
            raise

    def _scan(self, path: str) -> list[str]:
        reader = csv.reader(self._decoded(), delimiter=self._delimiter)
        columns: list[str] | None = None
        begin = 0
        try:
            for row in reader:  # the reader takes exactly the lines of this row
                if columns is None:
                    columns = [name.strip() for name in row]
                elif row:
                    self._slices.add(begin, self._end)
                begin = self._end
        except csv.Error as error:
            where = "the header" if columns is None else f"row {len(self._slices) + 1}"
            raise SampleSourceError(f"The table {path!r} cannot be read after {where}: {error}. Fix that row") from None
        if not columns or not all(columns) or len(set(columns)) < len(columns):
            raise SampleSourceError(f"The first row of {path!r} must name each column once, but it is {columns}")
        return columns

    def _decoded(self) -> Iterator[str]:
        encoding = "utf-8-sig"
        for end, line in self._slices.lines():
            self._end = end
            # A decoding error is raised when the row is read.
            yield line.decode(encoding, "surrogateescape")
            encoding = "utf-8"

    def __len__(self) -> int:
        return len(self._slices)

    def row(self, number: int) -> Mapping[str, Any]:
        """Read a row."""
        lines = io.StringIO(self._slices.text(number), newline="\n")
        [values] = csv.reader(lines, delimiter=self._delimiter)
        if len(values) != len(self.columns):
            raise SampleSourceError(
                f"{self._slices.describe(number)} has {len(values)} values for {len(self.columns)} columns. Quote "
                f"values that contain {self._delimiter!r}"
            )
        return dict(zip(self.columns, values, strict=True))

    def close(self) -> None:
        """Close the file."""
        self._slices.close()


class JsonRows:
    """A file of JSON objects, one per line."""

    columns = None
    is_text = False

    def __init__(self, path: str, storage_options: Mapping[str, Any] | None) -> None:
        self._slices = Slices(path, storage_options)
        begin = 0
        for end, line in self._slices.lines():
            if line.strip():
                self._slices.add(begin, end)
            begin = end

    def __len__(self) -> int:
        return len(self._slices)

    def row(self, number: int) -> Mapping[str, Any]:
        """Read a row."""
        try:
            row = json.loads(self._slices.text(number).removeprefix("\ufeff"))
        except (json.JSONDecodeError, RecursionError) as error:
            raise SampleSourceError(f"{self._slices.describe(number)} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise SampleSourceError(
                f"{self._slices.describe(number)} is a JSON {type(row).__name__}, not an object with columns"
            )
        return row

    def close(self) -> None:
        """Close the file."""
        self._slices.close()


class ParquetRows:
    """A Parquet file, copied to an anonymous temporary Arrow file for random access to its rows."""

    is_text = False

    def __init__(self, path: str, storage_options: Mapping[str, Any] | None) -> None:
        arrow = require("pyarrow", extra="parquet", purpose="read tables in Parquet")
        parquet = import_module("pyarrow.parquet")
        self._memory: mmap.mmap | None = None
        try:
            with (
                open(open_descriptor(path, storage_options), "rb") as table,
                parquet.ParquetFile(table) as file,
                tempfile.TemporaryFile() as copy,
            ):
                with arrow.ipc.new_file(copy, file.schema_arrow) as writer:
                    for batch in file.iter_batches(ROWS_PER_BATCH, use_threads=False):
                        writer.write_batch(batch)
                copy.flush()
                self._memory = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, arrow.ArrowException) as error:
            raise SampleSourceError(f"The table {redact(path)!r} cannot be read: {error}") from None
        reader = arrow.ipc.open_file(arrow.BufferReader(arrow.py_buffer(self._memory)))
        self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]  # nothing is read yet
        self._begins = [0]
        for batch in self._batches:
            self._begins.append(self._begins[-1] + batch.num_rows)
        self.columns: list[str] = list(reader.schema.names)

    def __len__(self) -> int:
        return self._begins[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a row."""
        at = bisect_right(self._begins, number) - 1
        batch = self._batches[at]
        position = number - self._begins[at]
        return {name: batch.column(index)[position].as_py() for index, name in enumerate(self.columns)}

    def close(self) -> None:
        """Release the copy, which is freed with the last of its rows."""
        self._batches = []
        self._memory = None
