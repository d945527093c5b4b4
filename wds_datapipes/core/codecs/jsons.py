"""Fields that are JSON: ``json jsn``."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["decode_json"]


def decode_json(data: bytes) -> Any:
    """Decode JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark; ``null`` is ``None``.

    >>> decode_json(b'{"boxes": [[0, 1, 2, 3]]}')
    {'boxes': [[0, 1, 2, 3]]}
    """
    return json.loads(data)
