"""Pack positions for states, as text of a few bytes each."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

#: Replaces the positions that an outline of a state omits.
OUTLINE = "outline"
#: With fewer rows, the result is a readable list.
MIN_ROWS = 16
#: From this number of rows on, a Huffman table for each byte of a column saves more than the 60 bytes that it takes.
TABLE_ROWS = 250
#: The maximum number of bytes to decompress, enough for millions of rows, because corrupt text may expand a
#: thousandfold.
MAX_BYTES = 1 << 28

#: The type of columns, and the number of integers in the head: rows, columns, and the greatest common divisor.
_INTEGERS, _HEAD = np.dtype("<i8"), 3


def pack_rows(rows: Sequence[Sequence[int]]) -> list[list[int]] | str:
    """Return rows of integers, such as positions, as text; if there are few, or some are not positions, as lists.

    The text contains the gaps between the sorted positions, their sizes, and their order. In each column, the bytes of
    the same significance are compressed together.

    Args:
        rows: for each, a shard, two offsets, the second of which is -1 at the end of the shard, and any other numbers.
    """
    if len(rows) < MIN_ROWS or len({*map(len, rows)}) != 1:
        return [[*row] for row in rows]
    table = np.array(rows, np.int64)
    shard, start, end = table.T[:3]
    size = np.where(end == -1, 0, end - start)
    if np.any((size <= 0) != (end == -1)):
        return cast("list[list[int]]", table.tolist())
    unit = int(np.gcd.reduce(np.concatenate((start, size)))) or 1
    keys = np.column_stack((table[:, 3:], shard, start // unit, size // unit))
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    steps = np.diff(keys, axis=0, prepend=np.zeros_like(keys[:1]))
    steps[1:, -2] -= keys[:-1, -1]
    is_gap = steps[:, :-1].any(axis=1)
    gaps = steps[is_gap, :-1].T
    head = np.array([*keys.shape, unit], _INTEGERS).tobytes() + np.packbits(is_gap).tobytes()
    # Search only for runs, because there is nothing else to find; this takes hardly any time.
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    parts, mode = [packer.compress(head)], zlib.Z_BLOCK if len(rows) >= TABLE_ROWS else zlib.Z_NO_FLUSH
    for column in (order, *((gaps << 1) ^ (gaps >> 63)), keys[:, -1]):
        for place in column.astype(_INTEGERS).view(np.uint8).reshape(-1, _INTEGERS.itemsize).T:
            parts += packer.flush(mode), packer.compress(place.tobytes())
    return base64.b64encode(b"".join([*parts, packer.flush()])).decode()


def unpack_rows(packed: Any) -> Any:
    """Return the rows that `pack_rows` has packed.

    Raises:
        ValueError: the text is corrupt, or replaces positions that an outline omits.
    """
    if not isinstance(packed, str):
        return packed
    if packed == OUTLINE:
        raise ValueError("it is an outline, which lacks the waiting samples. Read the states that ranks_to_read lists")
    try:
        data = zlib.decompressobj(-15).decompress(base64.b64decode(packed, validate=True), MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"packed positions cannot be decompressed: {error}") from error
    count, width, unit = np.frombuffer(data, _INTEGERS, _HEAD).tolist()
    if not (0 < count <= len(data) and _HEAD <= width <= len(data)):
        raise ValueError(f"packed positions have {count} rows of {width} numbers")
    places = np.frombuffer(data, np.uint8, offset=_HEAD * _INTEGERS.itemsize)
    ends = -(-count // 8)
    is_gap = np.unpackbits(places[:ends], count=count).astype(bool)

    def column(rows: int) -> npt.NDArray[np.int64]:
        nonlocal ends
        start, ends = ends, ends + rows * _INTEGERS.itemsize
        values = np.ascontiguousarray(places[start:ends].reshape(-1, rows).T).view(_INTEGERS)
        return values.reshape(rows).astype(np.int64)

    order, gaps, steps = column(count), int(is_gap.sum()), np.zeros((count, width - 1), np.int64)
    for number in range(width - 1 if gaps else 0):
        signed = column(gaps)
        steps[is_gap, number] = ((signed >> 1) & np.iinfo(np.int64).max) ^ -(signed & 1)
    size = column(count)
    if np.any(np.sort(order) != np.arange(count)):
        raise ValueError("packed positions have no order")
    steps[1:, -1] += size[:-1]
    keys = np.cumsum(steps, axis=0)
    start = keys[:, -1] * unit
    table = np.empty((count, width), np.int64)
    table[order] = np.column_stack((keys[:, -2], start, np.where(size == 0, -1, start + size * unit), keys[:, :-2]))
    return table.tolist()
