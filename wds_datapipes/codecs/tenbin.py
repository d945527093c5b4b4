"""Tenbin codec, webdataset's format for lists of arrays: ``ten tenbin tb``.

The data is a sequence of chunks. A chunk is eight magic bytes, the length of its content as a 64-bit integer, the
content, and zeros up to a multiple of 64 bytes. An array is two chunks: a header of 64-bit integers (a short dtype
name and a free text, each as eight characters, the number of dimensions, the dimensions), then its elements in C
order. Everything is little-endian on every machine; webdataset uses the byte order of the machine, which is nearly
always the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs.codec import Codec
from wds_datapipes.codecs.numpy_arrays import as_array

__all__ = ["decode_tenbin", "encode_tenbin", "tenbin"]

MAGIC = b"~TenBin~"
ALIGNMENT = 64
#: Short name -> dtype. webdataset knows ``u4`` too, but by a slip can neither write nor read it.
DTYPES = {name: np.dtype(f"<{name}") for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")}


def decode_tenbin(data: bytes) -> list[NDArray[Any]]:
    """Decode all arrays, each with its shape (also ``()``) and dtype; they are writable and own their memory.

    Raises:
        ValueError: the data is cut short, or is not tenbin; the message has the byte offset.
    """
    arrays = []
    chunks = _chunks(data)
    for start, header in chunks:
        shape, dtype = _parse_header(header, start)
        _, content = next(chunks, (0, None))
        if content is None:
            raise ValueError(f"the array whose header is at byte {start} has no data: tenbin is cut short")
        if len(content) != prod(shape) * dtype.itemsize:
            raise ValueError(
                f"the array whose header is at byte {start} has shape {shape} and dtype {dtype}, "
                f"but {len(content)} bytes of data"
            )
        arrays.append(np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("=")))
    return arrays


def encode_tenbin(value: Any) -> bytes:
    """Encode an array, or a list or tuple of arrays; one array is read back as a list of one.

    webdataset cannot read uint32 and arrays without dimensions, for which it has the format all the same.
    """
    arrays = [as_array(each) for each in (value if isinstance(value, list | tuple) else [value])]
    parts: list[bytes] = []
    for array in arrays:
        name = array.dtype.newbyteorder("<").str[1:]
        if name not in DTYPES:
            raise ValueError(f"tenbin has no dtype {array.dtype}, but {' '.join(DTYPES)}")
        header = name.encode().ljust(16, b"\0") + struct.pack(f"<{array.ndim + 1}q", array.ndim, *array.shape)
        for content in (header, array.astype(DTYPES[name], copy=False).tobytes()):
            parts += MAGIC, struct.pack("<q", len(content)), content, bytes(-len(content) % ALIGNMENT)
    return b"".join(parts)


def _chunks(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield where each chunk begins, and its content."""
    view = memoryview(data)
    start, end = 0, len(data)
    while start < end:
        if data[start : start + 8] != MAGIC[: end - start]:
            raise ValueError(
                f"no tenbin chunk at byte {start}: it begins with {data[start : start + 8]!r}, not {MAGIC!r}"
            )
        if end - start < 16:
            raise ValueError(
                f"the tenbin chunk at byte {start} is cut short: 16 bytes of header, and {end - start} are left"
            )
        (length,) = struct.unpack_from("<q", data, start + 8)
        content = start + 16
        padded = length + -length % ALIGNMENT
        if length < 0 or padded > end - content:
            raise ValueError(
                f"the tenbin chunk at byte {start} is cut short: {length} bytes and their padding to "
                f"{padded}, and {end - content} are left"
            )
        yield start, view[content : content + length]
        start = content + padded


def _parse_header(header: memoryview, start: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if len(header) < 24 or len(header) % 8:
        raise ValueError(f"the array header at byte {start} has {len(header)} bytes: no tenbin header")
    name = bytes(header[:8]).rstrip(b"\0").decode("latin-1")
    if name not in DTYPES:
        raise ValueError(f"the array header at byte {start} has dtype {name!r}; tenbin has {' '.join(DTYPES)}")
    dimensions, *shape = struct.unpack(f"<{len(header) // 8 - 2}q", header[16:])
    if dimensions != len(shape) or any(size < 0 for size in shape):
        raise ValueError(f"the array header at byte {start} has {dimensions} dimensions, of sizes {shape}")
    return tuple(shape), DTYPES[name]


tenbin = Codec(decode_tenbin, encode_tenbin, f"an array, or a list of arrays, each of {', '.join(DTYPES)}")
