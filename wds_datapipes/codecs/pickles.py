"""Pickle codec: ``pyd pickle pkl``. Unpickling can run any code, so the caller has to allow it."""

from __future__ import annotations

import pickle
from typing import Any

from wds_datapipes.codecs.codec import Codec

__all__ = ["decode_pickle", "encode_pickle", "pickled"]

#: The newest that all supported Pythons read, named so that all of them write the same.
PROTOCOL = 5


def decode_pickle(data: bytes) -> Any:
    """Unpickle, which can run any code: `UNSAFE` lists the extensions, and the caller has said that it trusts them."""
    return pickle.loads(data)  # noqa: S301 (reached with unsafe=True alone)


def encode_pickle(value: Any) -> bytes:
    """Pickle; who reads it has to trust the shard."""
    return pickle.dumps(value, PROTOCOL)


pickled = Codec(decode_pickle, encode_pickle, "whatever can be pickled")
