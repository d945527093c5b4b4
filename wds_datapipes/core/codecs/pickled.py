"""Fields that are Python pickles: ``pyd pickle pkl``. Unpickling runs what the data says, so they need consent."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["decode_pickle"]


def decode_pickle(data: bytes) -> Any:
    """Unpickle, which can run any code: `UNSAFE` lists the extensions, and the caller has said that it trusts them."""
    return pickle.loads(data)  # noqa: S301 (reached with unsafe=True alone)
