"""Samples of a table: a row is a sample, its columns are fields, or name their files."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS, UNSAFE, find_codec
from wds_datapipes.codecs.codec import describe_value
from wds_datapipes.codecs.encoding import EncoderChain
from wds_datapipes.errors import EncodeError, MissingDependencyError, SampleSourceError
from wds_datapipes.io.openers import redact
from wds_datapipes.prepare.sample_spec import Part, SampleSpec
from wds_datapipes.prepare.sources.file_locations import FileLocations
from wds_datapipes.prepare.sources.image_folder import field_of
from wds_datapipes.prepare.sources.table_rows import Rows, ending_of, open_rows

__all__ = ["Table"]

#: What `CODECS` has for fields that hold any text.
TEXT = CODECS["txt"]
#: Stands for all columns that name no files, as one JSON object.
REST = "*"


class Table:
    """The samples of a table.

    Args:
        path: the table or its URL, by its ending: CSV with a header, JSON lines or Parquet.
        files: ``(field, column)`` for columns that name files, by paths or URLs; without a field, that is the ending
            of each file.
        values: ``(field, column)`` for columns whose values are fields. The column ``"*"`` stands for all columns that
            name no files, as one JSON object. ``None`` takes all columns that are not used otherwise, as fields of
            their own names.
        key: the column of keys; without one, keys are numbers with eight digits.
        root: the folder, or the URL of one, that paths begin from, if it is not that of the table.
        missing: ``"keep"`` leaves a field out where its column is empty, or not there; ``"raise"`` refuses the row.
        storage_options: passed to remote file systems.

    Raises:
        SampleSourceError: the table cannot be read.
        MissingDependencyError: it is Parquet, and the package for that is not installed.
        ValueError: an argument makes no sense, or names a column that is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        files: Sequence[tuple[str, str]] = (),
        values: Sequence[tuple[str, str]] | None = None,
        key: str = "",
        root: str | os.PathLike[str] | None = None,
        missing: Literal["raise", "keep"] = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        table = os.fspath(path)
        self._path = redact(table)  # for messages
        self._places = FileLocations(table, None if root is None else os.fspath(root), storage_options)
        self._files, self._key, self._keeps = list(files), key, missing == "keep"
        self._chain = EncoderChain({})
        self._rows: Rows = open_rows(table, storage_options)
        try:
            self._used = {column for _, column in [*self._files, *(values or ())]} - {REST} | ({key} if key else set())
            if self._rows.columns is not None:
                self._check_columns(self._rows.columns)
                if values is None:
                    values = [(name.lower(), name) for name in self._rows.columns if name not in self._used]
            self._values = values
            for field, column in [*self._files, *(values or ())]:
                _check_field(field, column)
        except BaseException:
            self._rows.close()
            raise

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def draft(self, number: int) -> SampleSpec:
        """Return what the sample of a row is to be made of.

        Raises:
            SampleSourceError: the row cannot be read, or lacks a value.
            EncodeError: a value cannot be encoded as its field's name says.
        """
        row = self._rows.row(number)
        origin = f"row {number + 1} of {self._path!r}"
        key = f"{number:08d}" if not self._key else self._key_of(row, origin)
        parts: dict[str, Part] = {}
        for field, column in self._files:
            value = row.get(column)
            if value in (None, ""):
                self._lacks(column, origin)
            else:
                name, part = self._file(value, column, origin)
                _put(parts, field or field_of(_extension_of(name, column, origin)), part, origin)
        values = self._values
        if values is None:
            values = [(column.lower(), column) for column in row if column not in self._used]
        named = {column for _, column in self._files}
        for field, column in values:
            value = {name: row[name] for name in row if name not in named} if column == REST else row.get(column)
            if value is None or (value == "" and not _may_be_empty(field)):
                self._lacks(column, origin)
            else:
                _put(parts, field, self._encoded(field, column, value, key, origin), origin)
        return SampleSpec(key, parts, origin)

    def close(self) -> None:
        """Close the table."""
        self._rows.close()

    def _key_of(self, row: Mapping[str, Any], origin: str) -> str:
        value = row.get(self._key)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise SampleSourceError(
                f"{origin} has {describe_value(value)} in its column {self._key!r}. A key is text or a number"
            )
        return str(value)

    def _file(self, named: object, column: str, origin: str) -> tuple[str, Part]:
        """Return the name of a file, and what it holds."""
        if isinstance(named, Mapping) and isinstance(named.get("bytes"), bytes):
            return str(named.get("path") or ""), named["bytes"]  # as `datasets` writes files to Parquet
        if not isinstance(named, str):
            raise SampleSourceError(
                f"{origin} has {describe_value(named)} in its column {column!r}, and not the name of a file"
            )
        return named, self._places.part(named, f"{origin} in its column {column!r}")

    def _lacks(self, column: str, origin: str) -> None:
        if not self._keeps:
            raise SampleSourceError(
                f"{origin} has nothing in its column {column!r}. Fill it in, or keep the sample without it"
            )

    def _encoded(self, field: str, column: str, value: Any, key: str, origin: str) -> bytes:
        if isinstance(value, bytes):
            return value
        ending = field.rpartition(".")[2]
        is_known = find_codec(ending) is not None or ending in IMAGE_FORMATS
        if isinstance(value, str) and ending in IMAGE_FORMATS:
            raise EncodeError(
                f"{origin} has the text {value!r:.60} in its column {column!r}, and the field {field!r} holds images. "
                f"Give a column of file names to files=; give a column of text a field for text, as in txt={column}"
            )
        if isinstance(value, str) and (self._rows.is_text or not is_known):
            return _decodable(_utf8(value, origin), field, value, column, origin)
        if not is_known:
            raise EncodeError(
                f"{origin} has {describe_value(value)} for the field {field!r}, whose name tells no encoding. Give it "
                f"a name that does, such as cls or {field}.json"
            )
        try:
            if isinstance(value, Mapping) and ending == "json":
                return _utf8(json.dumps(value, ensure_ascii=False, default=_json_default), origin)
            return bytes(self._chain.encode_field({"__key__": key, field: value}, field))
        except (EncodeError, TypeError) as error:
            raise EncodeError(f"{origin}: {error}") from None

    def _check_columns(self, columns: Sequence[str]) -> None:
        if unknown := sorted(self._used - set(columns)):
            raise ValueError(f"{self._path!r} has no column {unknown[0]!r}. It has {', '.join(map(repr, columns))}")


def _put(parts: dict[str, Part], field: str, part: Part, origin: str) -> None:
    if field in parts:
        raise SampleSourceError(f"{origin} would have the field {field!r} twice. Give one of its columns another field")
    parts[field] = part


def _check_field(field: str, column: str) -> None:
    if field and (field != field.lower() or "/" in field or field.startswith(("_", "."))):
        raise ValueError(
            f"The field {field!r} for the column {column!r} could not be read back. Fields are in lower case, without "
            f"a slash, and begin with no dot or underscore. Give it another name"
        )


def _extension_of(name: str, column: str, origin: str) -> str:
    ending = ending_of(name)[1:]
    if not ending:
        raise SampleSourceError(
            f"{origin} has the file {redact(name)!r} in its column {column!r}, whose name has no ending. Name a field"
        )
    return ending


def _utf8(text: str, origin: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SampleSourceError(f"{origin} has text that is no UTF-8: {error}") from None


def _may_be_empty(field: str) -> bool:
    """Whether an empty text is a value of a field, and not a value that is missing."""
    ending = field.rpartition(".")[2]
    return ending not in IMAGE_FORMATS and CODECS.get(ending, TEXT) == TEXT


def _decodable(data: bytes, field: str, value: str, column: str, origin: str) -> bytes:
    """Return text that is written as it is, if the decoder of its field can read it."""
    ending = field.rpartition(".")[2]
    codec = find_codec(ending)
    if codec is None:
        return data
    try:
        if ending in UNSAFE:
            raise ValueError("it is no pickle")
        codec.decode(data)
    except MissingDependencyError:
        return data
    except Exception as error:  # noqa: BLE001  decoders raise what they like
        cure = "; or number the classes in the table" if CODECS[ending] == CODECS["cls"] else ""
        raise EncodeError(
            f"{origin} has the text {value!r:.60} in its column {column!r}, and the field {field!r} could not be "
            f"decoded: {str(error).rstrip('.')}. Give the column a field for text, as in txt={column}{cure}"
        ) from None
    return data


def _json_default(value: object) -> object:
    """Return what JSON has for a value of a table that it does not know."""
    if isinstance(value, datetime.date | datetime.datetime | datetime.time):
        return value.isoformat()
    raise TypeError(f"{describe_value(value)} is nothing that JSON has")
