"""Fields that are numpy's own files: ``npy npz``. Neither ever unpickles, so arrays of objects are refused."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["decode_npy", "decode_npz"]


def decode_npy(data: bytes) -> NDArray[Any]:
    """Decode one array, with the shape and dtype it was saved with; it is writable."""
    array: NDArray[Any] = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    return array


def decode_npz(data: bytes) -> dict[str, NDArray[Any]]:
    """Decode all arrays of an archive, by name and in its order."""
    archive = np.load(BytesIO(data), allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("one array, as in an npy field, and not an archive of arrays")
    with archive:
        return dict(archive)
