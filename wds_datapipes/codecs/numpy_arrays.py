"""Codecs of NumPy's file formats: ``npy npz``. Object arrays, which need pickle, are rejected."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from io import BytesIO
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from wds_datapipes.codecs import Codec
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits

__all__ = ["as_array", "decode_npy", "decode_npz", "encode_npy", "encode_npz", "npy", "npz"]

ARRAY = "an array of NumPy, or a tensor, without objects in it"


def decode_npy(data: bytes) -> NDArray[Any]:
    """Decode an array with its shape and dtype; it is writable."""
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
                    f"{name!r} is not a valid name of an array, which must be a str that does not end in .npy"
                )
            info = zipfile.ZipInfo(f"{name}.npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=True) as entry:
                _write(entry, array)
    return file.getvalue()


def as_array(value: Any) -> NDArray[Any]:
    """Convert an array or tensor to an array; other types, including masked arrays and units, raise a TypeError."""
    if type(value) is np.ndarray or isinstance(value, np.generic | np.memmap):
        return np.asarray(value)
    if callable(getattr(value, "detach", None)) and callable(getattr(value, "numpy", None)):
        array: NDArray[Any] = value.detach().cpu().numpy()
        return array
    raise TypeError(f"{type(value).__name__} is not a plain array")


def _write(file: Any, value: Any) -> None:
    array = as_array(value)
    if array.dtype.hasobject:
        raise ValueError("it holds objects, which would require pickle")
    stream: BinaryIO = file
    np.lib.format.write_array(stream, array, allow_pickle=False)


npy = Codec(decode_npy, encode_npy, ARRAY)
npz = Codec(decode_npz, encode_npz, "a dict of names and arrays (of NumPy, or tensors, without objects in them)")
