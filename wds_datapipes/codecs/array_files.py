"""Codecs for arrays: NumPy's ``npy`` and ``npz`` without objects, torch's ``pth``, and webdataset's tenbin."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from math import prod
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs import Codec
from wds_datapipes.errors import UnsafeInputError
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits

#: The magic bytes of archives written by ``torch.save`` since torch 1.6. Their parts have checksums, so a file whose
#: pickle is rejected is not damaged, but holds more than tensors.
ZIP_MAGIC = b"PK\x03\x04"
ARRAY = "a NumPy array or a tensor, without objects"


def decode_npy(data: bytes) -> NDArray[Any]:
    """Decode a writable array with its shape and dtype."""
    array: NDArray[Any] = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    return array


def encode_npy(value: Any) -> bytes:
    """Encode an array."""
    file = BytesIO()
    _write(file, value)
    return file.getvalue()


def decode_npz(data: bytes, *, limits: ReadLimits = DEFAULT_LIMITS) -> dict[str, NDArray[Any]]:
    """Decode all arrays of an archive by name, in order.

    Raises:
        ReadLimitError: the arrays expand to more than the limits.
    """
    archive = np.load(BytesIO(data), allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("it is a single array, as in an npy field, not an archive")
    with archive:
        entries = cast(zipfile.ZipFile, archive.zip).infolist()
        # zipfile returns at most the declared size of an entry.
        limits.check_field(len(data), sum(entry.file_size for entry in entries), "npz data")
        return dict(archive)


def encode_npz(value: Any) -> bytes:
    """Encode arrays by name, compressed, and without timestamps for reproducible bytes."""
    if not isinstance(value, Mapping):
        raise TypeError("it is not a mapping of names to arrays")
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in value.items():
            if not isinstance(name, str) or "\0" in name or name.endswith(".npy"):
                raise ValueError(
                    f"{name!r} is not a valid name of an array: it must be a str that does not end in .npy"
                )
            info = zipfile.ZipInfo(f"{name}.npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=True) as entry:
                _write(entry, array)
    return file.getvalue()


def as_array(value: Any) -> NDArray[Any]:
    """Convert an array or tensor to a plain array; other types, including masked arrays, raise TypeError."""
    if type(value) is np.ndarray or isinstance(value, np.generic | np.memmap):
        return np.asarray(value)
    if callable(getattr(value, "detach", None)) and callable(getattr(value, "numpy", None)):
        array: NDArray[Any] = value.numpy(force=True)
        return array
    raise TypeError(f"{type(value).__name__} is not a plain array")


def _write(file: Any, value: Any) -> None:
    array = as_array(value)
    if array.dtype.hasobject:
        raise ValueError("it holds objects, which would require pickle")
    stream: BinaryIO = file
    np.lib.format.write_array(stream, array, allow_pickle=False)


def decode_pth(data: bytes) -> Any:
    """Load tensors and plain Python containers of them; other objects could run code and are rejected.

    Raises:
        UnsafeInputError: the file holds other objects.
    """
    import torch

    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not data.startswith(ZIP_MAGIC):
            raise
        raise UnsafeInputError(
            f"it holds more than tensors, and loading it can run arbitrary code ({_reason(error)})"
        ) from error


def decode_trusted_pth(data: bytes) -> Any:
    """Load tensors and any other objects by unpickling, which can run arbitrary code."""
    import torch

    return torch.load(BytesIO(data), map_location="cpu", weights_only=False)  # only with allow_pickle=True


def encode_pth(value: Any) -> bytes:
    """Save tensors and plain Python containers of them; values that `decode_pth` would reject are rejected.

    Raises:
        UnsafeInputError: the value holds other objects.
    """
    data = encode_trusted_pth(value)
    decode_pth(data)
    return data


def encode_trusted_pth(value: Any) -> bytes:
    """Save anything that torch can save. For a view of a larger tensor, only the view is saved."""
    import torch

    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if is_dense and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _reason(error: pickle.UnpicklingError) -> str:
    """Extract the reason from torch's long message."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "WeightsUnpickler error" in line), lines[0] if lines else "no reason given")


npy = Codec(decode_npy, encode_npy, ARRAY)
npz = Codec(decode_npz, encode_npz, "a dict that maps names to NumPy arrays or tensors, without objects")
pth = Codec(decode_pth, encode_pth, "a tensor, or plain values, lists and dicts that hold tensors")
trusted_pth = Codec(decode_trusted_pth, encode_trusted_pth, "any value that torch.save supports")


# Tenbin is webdataset's format for lists of arrays. The data are a sequence of chunks. A chunk consists of eight magic
# bytes, the length of its content as a 64-bit integer, the content, and zeros up to a multiple of 64 bytes. An array
# has two chunks: a header (a short dtype name and a comment, eight characters each, then the number of dimensions and
# the dimensions as 64-bit integers), and its elements in C order. Numbers are always little-endian; webdataset uses
# the native byte order, which is nearly always the same.

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
