"""Tenbin codec, webdataset's format for lists of arrays: ``ten tenbin tb``.

The data are a sequence of chunks. A chunk consists of eight magic bytes, the length of its content as a 64-bit integer,
the content, and zeros up to a multiple of 64 bytes. An array has two chunks: a header (a short dtype name and a
comment, eight characters each, then the number of dimensions and the dimensions as 64-bit integers), and its elements
in C order. Numbers are always little-endian; webdataset uses the native byte order, which is nearly always the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs import Codec
from wds_datapipes.codecs.array_files import as_array

MAGIC = b"~TenBin~"
ALIGNMENT = 64
#: Maps short names to dtypes. webdataset lists ``u4``, too, but a bug prevents it from writing and reading it.
DTYPES = {name: np.dtype(f"<{name}") for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")}


def decode_tenbin(data: bytes) -> list[NDArray[Any]]:
    """Decode all arrays with their shapes (including ``()``) and dtypes; they are writable and own their memory.

    Raises:
        ValueError: the data are truncated or not tenbin; the message has the byte offset.
    """
    arrays = []
    chunks = _chunks(data)
    for start, header in chunks:
        shape, dtype = _parse_header(header, start)
        _, content = next(chunks, (0, None))
        if content is None:
            raise ValueError(f"the array with the header at byte {start} has no data: tenbin is truncated")
        if len(content) != prod(shape) * dtype.itemsize:
            raise ValueError(
                f"the array with the header at byte {start} has shape {shape} and dtype {dtype}, "
                f"but {len(content)} bytes of data"
            )
        arrays.append(np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("=")))
    return arrays


def encode_tenbin(value: Any) -> bytes:
    """Encode an array, or a list or tuple of arrays; a single array is read back as a list of one.

    webdataset cannot read uint32 and zero-dimensional arrays, although its format supports them.
    """
    arrays = [as_array(each) for each in (value if isinstance(value, list | tuple) else [value])]
    parts: list[bytes] = []
    for array in arrays:
        name = array.dtype.newbyteorder("<").str[1:]
        if name not in DTYPES:
            raise ValueError(f"tenbin does not support the dtype {array.dtype}, only {' '.join(DTYPES)}")
        header = name.encode().ljust(16, b"\0") + struct.pack(f"<{array.ndim + 1}q", array.ndim, *array.shape)
        for content in (header, array.astype(DTYPES[name], copy=False).tobytes()):
            parts += MAGIC, struct.pack("<q", len(content)), content, bytes(-len(content) % ALIGNMENT)
    return b"".join(parts)


def _chunks(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and content of each chunk."""
    view = memoryview(data)
    start, end = 0, len(data)
    while start < end:
        if data[start : start + 8] != MAGIC[: end - start]:
            raise ValueError(
                f"no tenbin chunk at byte {start}: it starts with {data[start : start + 8]!r}, not {MAGIC!r}"
            )
        length = int.from_bytes(data[start + 8 : start + 16], "little", signed=True)
        content = start + 16
        padded = length + -length % ALIGNMENT
        if length < 0 or padded > end - content:
            raise ValueError(
                f"the tenbin chunk at byte {start} is truncated: it declares {length} bytes, which are {16 + padded} "
                f"with its header and padding, but {end - start} are left"
            )
        yield start, view[content : content + length]
        start = content + padded


def _parse_header(header: memoryview, start: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if len(header) < 24 or len(header) % 8:
        raise ValueError(f"the array header at byte {start} has {len(header)} bytes, so it is not a tenbin header")
    name = bytes(header[:8]).rstrip(b"\0").decode("latin-1")
    if name not in DTYPES:
        raise ValueError(f"the array header at byte {start} has dtype {name!r}; tenbin supports {' '.join(DTYPES)}")
    dimensions, *shape = struct.unpack(f"<{len(header) // 8 - 2}q", header[16:])
    if dimensions != len(shape) or any(size < 0 for size in shape):
        raise ValueError(f"the array header at byte {start} has {dimensions} dimensions, of sizes {shape}")
    return tuple(shape), DTYPES[name]


tenbin = Codec(decode_tenbin, encode_tenbin, f"an array, or a list of arrays, each of {', '.join(DTYPES)}")
