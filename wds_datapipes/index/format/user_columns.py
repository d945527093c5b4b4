"""Columns of users in an index: values of each sample, from a function or from its fields."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.errors import MissingFieldError
from wds_datapipes.fingerprint import fingerprint
from wds_datapipes.index.format.index_columns import COLUMNS, MAX_VALUE_BYTES
from wds_datapipes.index.format.options import AccessOptions
from wds_datapipes.index.format.parquet_columns import ParquetColumns
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.index.read.sample_reader import SampleReader
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import note
from wds_datapipes.samples.fields import describe_sample
from wds_datapipes.types import Sample

Value: TypeAlias = "bool | int | float | str"
ComputeColumns: TypeAlias = Callable[[Sample], Mapping[str, Value]]
"""A function from a sample, with its fields as bytes, to a value for each column."""
Columns: TypeAlias = "ComputeColumns | Mapping[str, str]"
"""Such a function, or the path of each column's value in a sample, such as ``"cls"`` or ``"json.caption.length"``."""


@dataclass(frozen=True)
class FieldColumns:
    """Computes columns from fields, which are decoded by the basic decoders.

    Args:
        paths: the name of each column and the path of its value: a field, or a field and keys and positions
            in its value, with dots.

    Examples:
        >>> sample = {"__key__": "a", "__url__": "a.tar", "cls": b"7", "json": b'{"size": [640, 480]}'}
        >>> FieldColumns((("label", "cls"), ("width", "json.size.0")))(sample)
        {'label': 7, 'width': 640}
    """

    paths: tuple[tuple[str, str], ...]

    def __call__(self, sample: Sample) -> dict[str, Value]:
        """Return the values of a sample.

        Raises:
            MissingFieldError: the sample lacks a field, or its value has no such path.
            DecodeError: a field cannot be decoded.
        """
        decoded: dict[str, Any] = {}
        return {name: self._find(sample, path, decoded) for name, path in self.paths}

    @staticmethod
    def _find(sample: Sample, path: str, decoded: dict[str, Any]) -> Any:
        field = next((each for each in _prefixes(path) if each in sample), None)
        if field is None:
            raise _missing_error(path, f"there is no such field in {describe_sample(sample)}")
        if field not in decoded:
            decoded[field] = basic_decoders().convert_field(sample, field)
        value = decoded[field]
        for key in filter(None, path[len(field) :].split(".")):
            is_array = isinstance(value, list | np.ndarray)
            if not (
                key.isdecimal() and int(key) < len(value) if is_array else isinstance(value, dict) and key in value
            ):
                raise _missing_error(path, f"{describe_sample(sample)} has {value!r:.100}, which has no {key!r}")
            value = value[int(key) if is_array else key]
        if not isinstance(value, bool | int | float | str | np.generic):
            raise _missing_error(path, f"{describe_sample(sample)} has {value!r:.100}, not a number or a text")
        return value


def _missing_error(path: str, found: str) -> MissingFieldError:
    return MissingFieldError(
        f"The column of {path!r} has no value: {found}. To store another value then, such as a length, pass a function"
    )


def _prefixes(path: str) -> list[str]:
    """Return the fields in which a path may be, the longest first.

    >>> _prefixes("meta.json.width")
    ['meta.json.width', 'meta.json', 'meta']
    """
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


@cache
def basic_decoders() -> DecoderChain:
    """Return the decoders of fields without media."""
    return DecoderChain([], {})


def as_function(columns: Columns | None) -> ComputeColumns | None:
    """Return the function that computes columns.

    Raises:
        TypeError: ``columns`` is neither a function nor a mapping from names to paths.
    """
    if columns is None or callable(columns):
        return columns
    given: Any = columns
    if not isinstance(given, Mapping) or not all(isinstance(each, str) and each for each in chain(*given.items())):
        raise TypeError(
            "columns must be a function of a sample, or a mapping from names to paths such as "
            f"{{'label': 'cls', 'width': 'json.width'}}, not {columns!r:.200}"
        )
    return FieldColumns(tuple(columns.items()))


def fields_of(compute: ComputeColumns) -> list[str] | None:
    """Return the fields that a function needs, if that is known."""
    if isinstance(compute, ParquetColumns):
        return []
    if not isinstance(compute, FieldColumns):
        return None
    return list(dict.fromkeys(field for _, path in compute.paths for field in _prefixes(path)))


def add_columns(
    index: ShardIndex,
    url: str,
    compute: ComputeColumns,
    *,
    fields: Collection[str] | None,
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> ShardIndex:
    """Return an index with columns that a function computes from the samples.

    Raises:
        UnsupportedSidecarError: the shard is compressed.
        ShardError: the shard cannot be read.
        TypeError: the function returns anything other than a mapping from names to values of one type.
        ValueError: it returns different names for different samples, or a name or a value that cannot be stored.
    """
    index.check_random_access()
    access = AccessOptions(storage_options=storage_options, limits=limits)
    wanted = fields if fields is not None else fields_of(compute)
    numbers, found = np.arange(len(index)), dict[str, list[Value]]()
    with SampleReader([url], lambda _: index, access, fields=wanted) as reader:
        for sample in reader.stream([(np.zeros_like(numbers), numbers)]):
            if not isinstance(sample, dict):
                raise sample or LookupError(f"{redact(url)} lacks a sample of its index")
            try:
                values = compute(sample)
            except Exception as error:
                note(error, f"raised in the function for columns, for {describe_sample(sample)}")
                raise
            _check_names(values, found, sample)
            for name, value in values.items():
                found.setdefault(name, []).append(value)
    columns = {name: _column(name, values, redact(url)) for name, values in found.items()}
    layout = {name: index.columns[name] for name in COLUMNS}
    by = columns_fingerprint(compute, fields)
    return ShardIndex(index.facts, {**layout, **columns}, columns_by=by, name=f"The index of {redact(url)}")


def columns_fingerprint(compute: ComputeColumns, fields: Collection[str] | None) -> str:
    """Return a digest of a function and the fields that it receives."""
    return fingerprint(compute, None if fields is None else sorted(fields))


def _check_names(values: object, found: Mapping[str, Any], sample: Sample) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(
            f"the function for columns must return a mapping from names to values, not {values!r:.100}, for "
            f"{describe_sample(sample)}"
        )
    if found and values.keys() != found.keys():
        raise ValueError(
            f"the function for columns returned {sorted(values)} for {describe_sample(sample)}, but {sorted(found)} "
            "for those before. Return the same names for all, and nan or an empty string if there is no value"
        )
    if reserved := values.keys() & COLUMNS.keys():
        raise ValueError(f"every index already has a column {min(reserved)!r}. Choose another name")


def _column(name: str, values: list[Value], archive: str) -> npt.NDArray[Any]:
    """Return values as an array of one type."""
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    types = {type(value) for value in plain}
    if types == {bool}:
        return np.array(plain, np.bool_)
    if types <= {int, float}:
        try:
            return np.array(plain, np.int64 if types == {int} else np.float64)
        except OverflowError:
            raise ValueError(f"the column {name!r} of {archive} has integers of more than 64 bits") from None
    if types != {str}:
        names = ", ".join(sorted(each.__name__ for each in types))
        raise TypeError(
            f"the column {name!r} of {archive} has values of the types {names}. Return numbers, or text, or Boolean "
            "values, for all samples"
        )
    column = np.array(plain)
    if column.dtype.itemsize > MAX_VALUE_BYTES or column.tolist() != plain:
        raise ValueError(
            f"the column {name!r} of {archive} has a text of more than {MAX_VALUE_BYTES // 4} characters, or one that "
            "ends with a null character. Store a shorter one, such as its length or a category"
        )
    return column.astype("<U1") if column.dtype.itemsize == 0 else column
