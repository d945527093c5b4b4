"""Samples from the rows of a table, whose columns are fields or name the files of fields."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS, UNSAFE, describe_value, find_codec
from wds_datapipes.codecs.encoding import EncoderChain
from wds_datapipes.errors import EncodeError, MissingDependencyError, SampleSourceError
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.prepare.sample_spec import Part, SampleSpec, encode_text, make_spec
from wds_datapipes.prepare.sources.image_folder import field_of
from wds_datapipes.prepare.sources.listing import resolve_file
from wds_datapipes.prepare.sources.table_rows import open_rows

#: The codec of plain text.
TEXT = CODECS["txt"]
#: The field whose values may be names of classes, which are numbered.
CLASS = "cls"


class Table:
    """The samples of a table.

    Args:
        path: the table, a local file: CSV with a header, JSON lines or Parquet, by its extension.
        files: ``(field, column)`` for columns of paths or URLs; an empty field means the extension of each file.
        values: ``(field, column)`` for columns of values. ``None`` makes a field of each column not used otherwise.
        key: the column of keys; by default, keys are eight-digit numbers.
        root: the folder or URL that relative paths start from, by default that of the table.
        classes: the names of the classes in the column for the field ``cls``, in the order of their numbers. By
            default, the names in that column in alphabetical order, unless one of its values is a number.
        missing: ``"keep"`` omits a field if its column is empty or missing; ``"raise"`` rejects the row.

    Attributes:
        classes: the names of the classes; ``None`` if the table has none, or has numbers.

    Raises:
        SampleSourceError: the table cannot be read; or it has a class that is not in ``classes``.
        MissingDependencyError: the package for Parquet is not installed.
        ValueError: an argument is invalid, or names a column that does not exist.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        files: Sequence[tuple[str, str]] = (),
        values: Sequence[tuple[str, str]] | None = None,
        key: str = "",
        root: str | os.PathLike[str] | None = None,
        classes: Sequence[str] | None = None,
        missing: Literal["raise", "keep"] = "raise",
    ) -> None:
        table = os.fspath(path)
        self._path, self._root = table, os.path.dirname(table) if root is None else os.fspath(root)  # noqa: PTH120  a string
        self._files, self._key, self._allows_missing = list(files), key, missing == "keep"
        self._chain = EncoderChain({})
        self._rows = open_rows(table)
        self._used = {column for _, column in [*self._files, *(values or ())]} | ({key} if key else set())
        if self._rows.columns is not None:
            if unknown := sorted(self._used - set(self._rows.columns)):
                there = ", ".join(map(repr, self._rows.columns))
                raise ValueError(f"{self._path!r} has no column {unknown[0]!r}. It has {there}")
            if values is None:
                values = [(name.lower(), name) for name in self._rows.columns if name not in self._used]
        self._values = values
        for field, column in [*self._files, *(values or ())]:
            _check_field(field, column)
        column = next((column for field, column in values or () if field == CLASS), "")
        self.classes = self._find_classes(column, classes) if column else None
        self._numbers = {name: b"%d" % number for number, name in enumerate(self.classes or ())}

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each row, or an error if the row cannot be read, or lacks a value."""
        for number, row in enumerate(self._rows.read()):
            try:
                yield row if isinstance(row, Exception) else self._spec(number, row)
            except (SampleSourceError, EncodeError) as error:  # noqa: PERF203  each row may fail
                yield error

    def _spec(self, number: int, row: Mapping[str, Any]) -> SampleSpec:
        location = f"row {number + 1} of {self._path!r}"
        key = f"{number:08d}" if not self._key else self._get_key(row, location)
        fields: list[tuple[str, Part]] = []
        for field, column in self._files:
            value = row.get(column)
            if value in (None, ""):
                self._check_missing(column, location)
            else:
                name, part = self._file(value, column, location)
                fields.append((field or field_of(_extension_of(name, column, location)), part))
        values = self._values
        if values is None:
            values = [(column.lower(), column) for column in row if column not in self._used]
        for field, column in values:
            value = row.get(column)
            if value is None or (value == "" and not _may_be_empty(field)):
                self._check_missing(column, location)
            elif field == CLASS and self.classes is not None:
                fields.append((field, self._numbers[str(value)]))
            else:
                fields.append((field, self._encode_value(field, column, value, key, location)))
        return make_spec(key, fields, location, location)

    def _find_classes(self, column: str, known: Sequence[str] | None) -> list[str] | None:
        """Return the names of the classes in a column, or None if it has numbers."""
        found = set[str]()
        for row in self._rows.read():
            value = None if isinstance(row, Exception) else row.get(column)
            if value is None or value == "":
                continue
            if not isinstance(value, str) or value.strip().lstrip("+-").isdecimal():
                return None
            found.add(value)
        if not found:
            return None
        if known is None:
            return sorted(found)
        if unknown := sorted(found.difference(known)):
            raise SampleSourceError(
                f"{self._path!r} has {unknown[0]!r} in its column {column!r}, which is not one of the {len(known)} "
                f"known classes. Correct it, or add it to them"
            )
        return list(known)

    def _get_key(self, row: Mapping[str, Any], location: str) -> str:
        value = row.get(self._key)
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise SampleSourceError(
                f"{location} has {describe_value(value)} in its column {self._key!r}. A key must be text or a number"
            )
        return str(value)

    def _file(self, named: object, column: str, location: str) -> tuple[str, Part]:
        """Return the name of a file, and its data or location."""
        if isinstance(named, Mapping) and isinstance(named.get("bytes"), bytes):
            return str(named.get("path") or ""), named["bytes"]  # the format of files in Parquet from `datasets`
        if not isinstance(named, str):
            raise SampleSourceError(
                f"{location} has {describe_value(named)} in its column {column!r}, not the name of a file"
            )
        return named, resolve_file(named, self._root, f"{location} in its column {column!r}")

    def _check_missing(self, column: str, location: str) -> None:
        if not self._allows_missing:
            raise SampleSourceError(
                f"{location} has no value in its column {column!r}. Fill it in, or pass "
                'missing="keep" to keep the sample without it'
            )

    def _encode_value(self, field: str, column: str, value: Any, key: str, location: str) -> bytes:
        if isinstance(value, bytes):
            return value
        ending = field.rpartition(".")[2]
        is_known = find_codec(ending) is not None or ending in IMAGE_FORMATS
        if isinstance(value, str) and ending in IMAGE_FORMATS:
            raise EncodeError(
                f"{location} has the text {value!r:.60} in its column {column!r}, but the field {field!r} holds "
                f"images. If the column has names of files, give it as such (files in Python, --file on the command "
                f"line); if it has text, use a text field, as in txt={column}"
            )
        if isinstance(value, str) and (self._rows.is_text or not is_known):
            return _decodable(encode_text(value, location), field, value, column, location)
        if not is_known:
            raise EncodeError(
                f"{location} has {describe_value(value)} for the field {field!r}, whose name does not determine an "
                f"encoding. Use a name such as cls or {field}.json"
            )
        try:
            if isinstance(value, Mapping) and ending == "json":
                return encode_text(json.dumps(value, ensure_ascii=False, default=_json_default), location)
            return bytes(self._chain.convert_field({"__key__": key, field: value}, field))
        except (EncodeError, TypeError) as error:
            raise EncodeError(f"{location}: {error}") from None


def _check_field(field: str, column: str) -> None:
    if field and (field != field.lower() or "/" in field or field.startswith(("_", "."))):
        raise ValueError(
            f"The field {field!r} for the column {column!r} could not be read back. Fields are lower case, without "
            f"slashes, and do not start with a dot or underscore. Rename it"
        )


def _extension_of(name: str, column: str, location: str) -> str:
    path = name.partition("?")[0] if split_scheme(name)[0] in ("http", "https") else name
    ending = os.path.splitext(path)[1][1:].lower()  # noqa: PTH122  a string
    if not ending:
        raise SampleSourceError(
            f"{location} has the file {redact(name)!r} in its column {column!r}, whose name has no extension. Name a "
            f"field"
        )
    return ending


def _may_be_empty(field: str) -> bool:
    """Whether empty text is a valid value of a field rather than a missing one."""
    ending = field.rpartition(".")[2]
    return ending not in IMAGE_FORMATS and CODECS.get(ending, TEXT) == TEXT


def _decodable(data: bytes, field: str, value: str, column: str, location: str) -> bytes:
    """Return encoded text if the decoder of its field can read it."""
    ending = field.rpartition(".")[2]
    codec = find_codec(ending)
    if codec is None:
        return data
    try:
        if ending in UNSAFE:
            raise ValueError("not a pickle")
        codec.decode(data)
    except MissingDependencyError:
        return data
    except Exception as error:  # noqa: BLE001  decoders may raise anything
        raise EncodeError(
            f"{location} has the text {value!r:.60} in its column {column!r}, which could not be decoded as {field!r}: "
            f"{str(error).rstrip('.')}. Use a text field for the column, as in txt={column}, or cls for class names"
        ) from None
    return data


def _json_default(value: object) -> object:
    """Convert a value of a table that JSON does not support."""
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"{describe_value(value)} cannot be represented in JSON")
