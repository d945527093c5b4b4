"""The columns of an index: their types, and the check that no offset lies outside its sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.tar.headers import BLOCK

Columns: TypeAlias = Mapping[str, "npt.NDArray[Any]"]
#: Every column of an index and the type of its numbers, which are little-endian in a file and in memory.
COLUMNS = {
    "sample_offsets": "<i8",
    "sample_members": "<i8",
    "member_offsets": "<i8",
    "member_sizes": "<i8",
    "member_fields": "<u4",
    "key_ends": "<i8",
    "key_text": "|u1",
    "field_ends": "<i8",
    "field_text": "|u1",
}
#: The kinds of user columns: Boolean values, integers, floating-point numbers and text of a fixed width.
KINDS = "bifU"
#: The maximum size of a value in these columns, in bytes; a character of text takes 4.
MAX_VALUE_BYTES = 4 * 256


class NamedColumns(dict[str, "npt.NDArray[Any]"]):
    """Columns, with an error for user columns that were not built."""

    index_name = ""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        if len(self["sample_offsets"]) == 1:  # the user's function was never called
            return np.empty(0)
        known = sorted(self.keys() - COLUMNS.keys())
        only = f", only {known}" if known else ""
        raise KeyError(
            f"{self.index_name} has no column {name!r}{only}. Build it with `wds-datapipes index --columns` or "
            "build_indexes(columns=...)"
        )


def check_columns(columns: dict[str, npt.NDArray[Any]]) -> None:
    """Raise ValueError unless the columns are consistent: no offset may be outside its sample."""
    if not columns.keys() >= COLUMNS.keys():
        raise ValueError(f"it has the columns {sorted(columns)}, not {sorted(COLUMNS)}")
    for name, kind in COLUMNS.items():
        if columns[name].dtype != np.dtype(kind) or columns[name].ndim != 1:
            raise ValueError(f"its column {name} is {columns[name].dtype} with {columns[name].ndim} dimensions")
    samples, counts = columns["sample_offsets"], columns["sample_members"]
    offsets, sizes, numbers = columns["member_offsets"], columns["member_sizes"], columns["member_fields"]
    _expect(len(samples) >= 1 and len(counts) == len(samples) == len(columns["key_ends"]) + 1, "its columns of samples")
    _expect(len(offsets) == len(sizes) == len(numbers), "its columns of members")
    _expect(samples[0] >= 0 and np.all(samples[1:] > samples[:-1]), "the offsets of its samples")
    _expect(counts[0] == 0 and counts[-1] == len(offsets) and np.all(counts[1:] > counts[:-1]), "its counts of members")
    _expect(not len(numbers) or numbers.max() < len(columns["field_ends"]), "its fields")
    begins, ends = np.repeat(samples[:-1], np.diff(counts)), np.repeat(samples[1:], np.diff(counts))
    _expect(
        np.all((offsets % BLOCK == 0) & (offsets - BLOCK >= begins) & (offsets <= ends)), "the offsets of its members"
    )
    _expect(np.all((sizes >= 0) & (sizes <= ends - offsets)), "the sizes of its members")
    for name in columns.keys() - COLUMNS.keys():
        column, values = columns[name], f"the values of its column {name}"
        _expect(column.ndim == 1 and len(column) == len(samples) - 1, values)
        _expect(column.dtype.kind in KINDS and column.dtype.itemsize <= MAX_VALUE_BYTES, values)
    for name in ("key", "field"):
        texts, raw = columns[f"{name}_ends"], columns[f"{name}_text"]
        whole = int(texts[-1]) if len(texts) else 0
        _expect(whole == len(raw) and (not len(texts) or texts[0] >= 0), f"its {name}s")
        _expect(np.all(texts[1:] >= texts[:-1]), f"its {name}s")


def _expect(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} are inconsistent")
