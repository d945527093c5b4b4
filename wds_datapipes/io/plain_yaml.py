"""YAML of others: plain values, and none that takes more room than its text says."""

from __future__ import annotations

from typing import Any

__all__ = ["plain_yaml"]

#: The most that all values take together, in characters and entries, where a text is short; aliases count each time.
MAX_VALUES = 1_000_000
#: The most entries that a mapping has which merges others (``<<``), since merging copies them.
MAX_MERGED = 10_000
#: What PyYAML raises beside its own errors: for a date that is none, an empty number, a text that nests too deep.
ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def plain_yaml(yaml: Any, text: str | bytes) -> Any:
    """Return the values of a text.

    A few lines of aliases can stand for more values than any memory holds, once somebody copies or prints them.

    Args:
        yaml: the module of PyYAML.
        text: what to read.

    Raises:
        ValueError: it is no YAML of plain values, or its aliases stand for too much.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # the package is optional
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MAX_MERGED:
                raise ValueError(f"a mapping has more than {MAX_MERGED} entries together with those that it merges")

    try:
        value = yaml.load(text, Loader)
        size = _size(value, {})
    except (yaml.YAMLError, *ERRORS) as error:
        raise ValueError(
            f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        ) from error
    if size > max(MAX_VALUES, 10 * len(text)):
        raise ValueError(f"its aliases stand for {size} characters and values, and the text has {len(text)}")
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Count what would be printed, and what is there several times as often; each value is looked at once."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) not in known:
        known[id(value)] = -1  # it is being counted
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    elif known[id(value)] < 0:
        raise ValueError("an alias stands for a value that it is itself a part of")
    return known[id(value)]
