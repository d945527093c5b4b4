"""Columns of an index from a Parquet file, which has the key of each sample."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import DuplicateKeyError, MissingFieldError, plural
from wds_datapipes.extras import require
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.io.openers import local_path, redact
from wds_datapipes.io.sidecars import read_sidecar
from wds_datapipes.redaction import hides_credentials
from wds_datapipes.samples.fields import describe_sample
from wds_datapipes.types import Sample

#: The types of values that an index can have, or that are missing.
PLAIN = (bool, int, float, str, type(None))


@checks_calls
def parquet_columns(
    path: str | os.PathLike[str],
    columns: Mapping[str, str] | list[str],
    *,
    key: str = "key",
    storage_options: Mapping[str, Any] | None = None,
) -> ParquetColumns:
    """Return a function for ``build_indexes(columns=)`` that finds values in a Parquet file by the key of each sample.

    No data of the shards is read for this. The file must have a row for each sample; other rows do not matter. Each
    process that builds indexes holds the named columns in memory. Requires the extra ``parquet``.

    Args:
        path: the path or URL of the file.
        columns: the names of its columns, or a mapping from the names in the index to them.
        key: its column with the keys, as text.
        storage_options: passed to remote file systems.

    Raises:
        TypeError: ``columns`` is neither a list nor a mapping of names.

    Examples:
        >>> parquet_columns("lengths.parquet", {"tokens": "n_tokens"}).columns
        (('tokens', 'n_tokens'),)
    """
    given: Any = columns
    named = given if isinstance(given, Mapping) else {} if isinstance(given, str) else {name: name for name in given}
    if not named or not all(isinstance(each, str) for pair in named.items() for each in pair):
        raise TypeError(f"columns must be names of columns, or a mapping to them, not {columns!r:.100}")
    return ParquetColumns(os.fspath(path), tuple(named.items()), key, storage_options)


@hides_credentials
@dataclass(frozen=True)
class ParquetColumns:
    """Computes columns from the rows of a Parquet file.

    Args:
        path: the file.
        columns: the name of each column in the index, and in the file.
        key: the column with the keys.
        storage_options: passed to remote file systems.
    """

    path: str
    columns: tuple[tuple[str, str], ...]
    key: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """Return the values of a sample.

        Raises:
            MissingFieldError: the file has no row for it, or no value in the row.
        """
        rows, values = _read(self, _version_of(self.path))
        if (row := rows.get(sample["__key__"])) is None:
            raise MissingFieldError(
                f"{redact(self.path)} has no row whose {self.key!r} is the key of {describe_sample(sample)}, only keys "
                f"such as {next(iter(rows), '')!r}"
            )
        found = {name: column[row] for name, column in values.items()}
        if missing := [name for name, value in found.items() if value is None]:
            raise MissingFieldError(
                f"{redact(self.path)} has no value in the column {dict(self.columns)[missing[0]]!r} for "
                f"{describe_sample(sample)}"
            )
        return found

    def fingerprint(self) -> str:
        """Return a text that differs if the file or the columns have changed, for which indexes are built again."""
        return fingerprint(Path(self.path).name, self.columns, self.key, _version_of(self.path))


def _version_of(path: str) -> tuple[int, int] | None:
    """Return the size and the modification time of a local file; None for another one."""
    if (local := local_path(path)) is None:
        return None
    try:
        status = Path(local).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=2)
def _read(columns: ParquetColumns, version: object) -> tuple[dict[str, int], dict[str, npt.NDArray[Any]]]:  # noqa: ARG001
    """Return the number of the row with each key, and the values of each column.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        MissingSidecarError: the file cannot be read.
        ValueError: it is not a Parquet file, lacks a column, or has values there that an index cannot have.
        DuplicateKeyError: two rows have the same key.
    """
    parquet: Any = require("pyarrow.parquet", extra="parquet", purpose="read columns from Parquet files")
    arrow: Any = sys.modules["pyarrow"]
    local, name = local_path(columns.path), redact(columns.path)
    data = read_sidecar(columns.path, columns.storage_options) if local is None or not Path(local).is_file() else b""
    try:
        file = parquet.ParquetFile(arrow.BufferReader(data) if data else local)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{name} is not a Parquet file: {error}") from None
    with file:
        known = file.schema_arrow.names
        wanted = [columns.key, *(each for _, each in columns.columns)]
        if missing := [each for each in wanted if each not in known]:
            what = "key" if missing[0] == columns.key else "columns"
            raise ValueError(
                f"{name} has no column {missing[0]!r}, only {sorted(known)}. Name another one with {what}="
            )
        table = file.read(columns=[*dict.fromkeys(wanted)])
    keys = table.column(columns.key).to_pylist()
    known_keys = [(str(each), number) for number, each in enumerate(keys) if each is not None]
    rows = dict(known_keys)
    if len(rows) < len(known_keys):
        repeated = keys[next(number for each, number in known_keys if rows[each] != number)]
        raise DuplicateKeyError(f"{name} has {plural(keys.count(repeated), 'row')} with the key {repeated!r}")
    found = {each: table.column(each).to_pylist() for _, each in columns.columns}
    for each, values in found.items():
        if wrong := next(([value] for value in values if not isinstance(value, PLAIN)), []):
            raise ValueError(
                f"{name} has {wrong[0]!r:.100} in the column {each!r}, of {table.schema.field(each).type}. An index "
                "has numbers, texts or Boolean values: write such a column, for example with the length of each list"
            )
    return rows, {own: np.array(found[each], object) for own, each in columns.columns}
