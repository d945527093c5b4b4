"""Checks of common arguments: choices, integers and field names."""

from __future__ import annotations

import operator
from typing import Any, get_args


def check_choice(name: str, value: object, choices: object) -> None:
    """Raise ValueError unless an argument is one of the values of a ``Literal``."""
    if value not in (known := get_args(choices)):
        named = ", ".join(f'"{each}"' for each in known[:-1])
        raise ValueError(f'{name} must be {named} or "{known[-1]}", not {value!r}')


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as an int; NumPy integers are accepted, too.

    Args:
        name: the name of the argument, for messages.
        value: its value.
        least: the smallest permitted integer; any by default.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
    return number


def check_optional_integer(name: str, value: Any, least: int) -> int | None:
    """Return an argument that is None or an integer; see `check_integer`."""
    return None if value is None else check_integer(name, value, least)


def check_fields(fields: object) -> None:
    """Raise TypeError if field names are a single string, because its characters would be taken as names."""
    if isinstance(fields, str):
        raise TypeError(f'fields must be a collection of names, as in ["jpg", "cls"], not the string {fields!r}')
