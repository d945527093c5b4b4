"""The state of a pipeline as text: made once, where the pipeline runs, and read only where it is loaded.

It is JSON. The addresses of the samples that wait in a shuffle are nearly all of it. Rows of numbers would take longer
to write, and twice the room, so that columns are here in their place. Each is its least value, what all are a multiple
of beyond it, the bytes of a number, and the numbers in base64, the lowest byte first.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import StateError

__all__ = ["decode_state", "encode_state"]

#: Fewer rows than these stay as they are.
FEWEST = 16

#: Samples begin and end at a multiple of this, in bytes.
BLOCK = 512

#: Differences of larger numbers have more than 64 bits.
LARGEST = 1 << 62

#: Where a stage has the addresses of the samples that wait: each is a row of shard, start, end, and more.
WAITING = "waiting"
#: Where they are in the text, if they are many.
PACKED = "waiting in columns"

Numbers = npt.NDArray[np.int64]


def encode_state(stages: Sequence[Mapping[str, Any] | None] | None) -> str:
    """Return a state as text.

    Args:
        stages: the state. Addresses may be the rows of an array.
    """
    return json.dumps(_pack(stages), separators=(",", ":"))


def decode_state(text: str) -> list[dict[str, Any] | None] | None:
    """Return the state that `encode_state` was called on.

    Raises:
        StateError: it is not what `encode_state` returns.
    """
    try:
        state = _unpack(json.loads(text))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:  # binascii's are ValueErrors
        raise StateError(f"This state of a loader is not whole: {error}") from None
    if not (state is None or isinstance(state, list)):
        raise StateError(f"This state of a loader is not whole: the states of its stages are {state!r}")
    return state


def _pack(value: Any) -> Any:
    if isinstance(value, Mapping):
        columns = _columns(value.get(WAITING))
        rest = {key: _pack(each) for key, each in value.items() if key != WAITING or columns is None}
        return rest if columns is None else {**rest, PACKED: columns}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_pack(each) if isinstance(each, Mapping | list | tuple) else each for each in value]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        rest = {key: _unpack(each) for key, each in value.items() if key != PACKED}
        return {**rest, WAITING: _rows(**value[PACKED])} if PACKED in value else rest
    if isinstance(value, list):
        return [_unpack(each) if isinstance(each, dict | list) else each for each in value]
    return value


def _columns(rows: Any) -> dict[str, Any] | None:
    """Return rows as columns, if they are many, and each has as many whole numbers."""
    if not isinstance(rows, list | np.ndarray) or len(rows) < FEWEST:
        return None
    if isinstance(rows, np.ndarray):
        columns = rows.T.copy()
    else:
        try:
            if len({*map(len, rows)}) > 1 or len(rows[0]) < 3:
                return None
            numbers = array("q", chain.from_iterable(rows))
        except (TypeError, OverflowError):
            return None
        columns = np.frombuffer(numbers, np.int64).reshape(len(rows), -1).T.copy()
    if columns.min() < -LARGEST or columns.max() > LARGEST:
        return None
    is_open = columns[2] == -1  # up to the end of the shard, which stands as a length of 0
    columns[2] -= columns[1]
    if not columns[2].all():
        return None
    columns[2][is_open] = 0
    return {"rows": len(rows), "columns": list(map(_packed_column, columns))}


def _packed_column(column: Numbers) -> list[Any]:
    least = int(column.min())
    column = column - least
    factor = 1 if (column % BLOCK).any() else BLOCK
    column //= factor
    size = next(size for size in (1, 2, 4, 8) if int(column.max()) < 1 << 8 * size)
    return [least, factor, size, b64encode(column.astype(f"<u{size}").tobytes()).decode()]


def _rows(rows: int, columns: list[tuple[int, int, int, str]]) -> list[list[int]]:
    # The room for all is taken when each is known to be as long as it says.
    read = [np.frombuffer(b64decode(text, validate=True), f"<u{size}").reshape(rows) for _, _, size, text in columns]
    found = np.empty((rows, len(columns)), np.int64)
    for number, (least, factor, *_) in enumerate(columns):
        found[:, number] = read[number].astype(np.int64) * factor + least
    is_open = found[:, 2] == 0
    found[:, 2] += found[:, 1]
    found[is_open, 2] = -1
    values: list[list[int]] = found.tolist()
    return values
