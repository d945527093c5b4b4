"""tenbin: every truncation is noticed, and errors say what is wrong."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from wds_datapipes.codecs.array_files import MAGIC, decode_tenbin


def chunk(content: bytes) -> bytes:
    return MAGIC + struct.pack("<q", len(content)) + content + b"\0" * (-len(content) % 64)


def encode(array: np.ndarray, info: bytes = b"") -> bytes:
    """Encode one array according to the format, little-endian, without webdataset's gaps."""
    dtype = array.dtype.newbyteorder("<")
    header = struct.pack(f"<8s8sq{array.ndim}q", dtype.str[1:].encode(), info, array.ndim, *array.shape)
    return chunk(header) + chunk(array.astype(dtype).tobytes())


def test_every_truncation_is_noticed() -> None:
    data = encode(np.arange(5.0)) + encode(np.ones((2, 3), np.uint8))
    boundary = len(encode(np.arange(5.0)))
    for size in set(range(1, len(data))) - {boundary}:
        with pytest.raises(ValueError, match="truncated"):
            decode_tenbin(data[:size])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"garbage" * 20, "no tenbin chunk at byte 0"),
        (encode(np.ones(3)) + b"x", "no tenbin chunk at byte 160"),
        (MAGIC + struct.pack("<q", -8) + b"\0" * 64, "truncated"),
        (chunk(b"\0" * 20) + chunk(b""), "header at byte 0 has 20 bytes"),
        (chunk(struct.pack("<8s8sq", b"c8", b"", 0)) + chunk(b"\0" * 8), "dtype 'c8'"),
        (chunk(struct.pack("<8s8sqq", b"f4", b"", 2, 1)) + chunk(b"\0" * 4), "has 2 dimensions"),
        (chunk(struct.pack("<8s8sqq", b"f4", b"", 1, -1)) + chunk(b""), r"sizes \[-1\]"),
        (chunk(struct.pack("<8s8sqq", b"f4", b"", 1, 3)) + chunk(b"\0" * 4), r"shape \(3,\).*4 bytes of data"),
    ],
)
def test_errors_say_what_is_wrong(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode_tenbin(data)
