"""The codec type: a decoder from bytes to a value, and the encoder back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Codec", "describe_value"]


class Codec(NamedTuple):
    """A codec for one kind of field: ``decode`` returns what ``encode`` was given."""

    decode: Callable[[bytes], Any]
    #: Raises for what it cannot write faithfully, and never guesses.
    encode: Callable[[Any], bytes]
    #: What ``encode`` takes, as the end of the sentence "It takes ...".
    takes: str


def describe_value(value: object) -> str:
    """Describe a value for a message: its type, and the dtype and shape of an array.

    >>> describe_value(None), describe_value({"a": 1}), describe_value("seven")
    ('None', 'a dict', "the str 'seven'")
    """
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | str):
        shown = repr(value[:40] if isinstance(value, str) else value)
        return f"the {name} {shown[:50]}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {name} of {value.dtype} and shape {tuple(value.shape)}"
    if callable(getattr(value, "getbands", None)):  # a Pillow image
        return f"a {name} of mode {getattr(value, 'mode', '')}"
    return f"a {name}"
