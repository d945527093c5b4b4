"""Pickle codec: ``pyd pickle pkl``. Unpickling can run arbitrary code, so the caller must allow it."""

from __future__ import annotations

import pickle
from typing import Any

from wds_datapipes.codecs import Codec

__all__ = ["decode_pickle", "encode_pickle", "pickled"]

#: The newest protocol that all supported Python versions read, fixed for reproducible bytes.
PROTOCOL = 5


def decode_pickle(data: bytes) -> Any:
    """Unpickle a value, which can run arbitrary code; only called with ``allow_pickle=True``, see `UNSAFE`."""
    return pickle.loads(data)  # noqa: S301 (only with allow_pickle=True)


def encode_pickle(value: Any) -> bytes:
    """Pickle a value; readers must trust the shard."""
    return pickle.dumps(value, PROTOCOL)


pickled = Codec(decode_pickle, encode_pickle, "any picklable value")
