"""Key rules: split a member's name into the key of its sample and the name of its field."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["KeyRule", "first_dot", "is_meta", "last_dot"]

KeyRule: TypeAlias = Callable[[str], "tuple[str, str] | None"]
"""Maps a member's name to ``(key, field)``, or to ``None`` for a file that belongs to no sample."""


def first_dot(name: str) -> tuple[str, str] | None:
    """Split at the first dot of the base name, the rule of the format; the directory stays in the key.

    Hidden files (whose base name begins with a dot), directories and files without a dot belong to no sample.

    Examples:
        >>> first_dot("train/000123.seg.png")
        ('train/000123', 'seg.png')
        >>> first_dot("v1.2/a.jpg")
        ('v1.2/a', 'jpg')
        >>> first_dot("train/._000123.jpg"), first_dot("README")
        (None, None)
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base:
        return None
    return name[:dot], name[dot + 1 :]


def last_dot(name: str) -> tuple[str, str] | None:
    """Split at the last dot of the base name, for keys that contain dots.

    Examples:
        >>> last_dot("scan-1.25mm.png")
        ('scan-1.25mm', 'png')
        >>> last_dot("train/.hidden.png") is None
        True
    """
    base = name.rfind("/") + 1
    dot = name.rfind(".", base)
    if dot <= base or name[base] == ".":
        return None
    return name[:dot], name[dot + 1 :]


def is_meta(name: str) -> bool:
    """Whether a member describes the shard: the first part of its name begins and ends with two underscores.

    >>> is_meta("__index__"), is_meta("__meta__/classes.json"), is_meta("d/__meta__"), is_meta("__a__.txt")
    (True, True, False, False)
    """
    first = name.partition("/")[0]
    return len(first) >= 4 and first.startswith("__") and first.endswith("__")
