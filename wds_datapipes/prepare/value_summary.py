"""Summaries of values as JSON: arrays by shape and range, long lists by their first items."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

#: The most entries of a list or dict shown, and the deepest level.
ENTRIES, DEPTH = 20, 6
#: The length of a line of JSON.
LINE = 72
#: Marks an array or another value without JSON.
ARRAY = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}{}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"


def summarize_value(value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can represent, with arrays and other types described in a few words."""
    if is_array(value):
        return ARRAY.format(array_kind(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return ARRAY.format(f"{len(value):,} bytes")
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value.bit_length() <= 1000 else ARRAY.format(number_text(value))
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= 400 else f"{value[:400]}..."
    if isinstance(value, Mapping | list | tuple) and depth >= DEPTH:
        return ARRAY.format("...")
    if isinstance(value, Mapping):
        shown = {str(key)[:100]: summarize_value(inner, depth + 1) for key, inner in list(value.items())[:ENTRIES]}
        return shown if len(value) <= ENTRIES else {**shown, "...": f"{len(value) - ENTRIES:,} more"}
    if isinstance(value, list | tuple):
        items = [summarize_value(inner, depth + 1) for inner in value[:ENTRIES]]
        return items if len(value) <= ENTRIES else [*items, ARRAY.format(f"{len(value) - ENTRIES:,} more")]
    return ARRAY.format(reprlib.repr(value))


def pretty_json(value: Any) -> str:
    """Return JSON, indented if it does not fit on a single line."""
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= LINE else json.dumps(value, ensure_ascii=False, indent=2)


def number_text(value: float | None) -> str:
    """Return a number, ``true``, ``false`` or ``null`` as JSON; for a huge integer, its number of bits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"{value.bit_length():,} bits"
    return json.dumps(value)


def is_array(value: Any) -> bool:
    """Whether a value is an array, or a tensor."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def array_kind(value: Any) -> str:
    """Describe an array or a tensor by its shape, dtype and range."""
    kind = "array" if isinstance(value, np.ndarray | np.generic) else type(value).__name__.lower()
    dtype = str(value.dtype).removeprefix("torch.")
    shown = f"{kind} ({', '.join(map(str, value.shape))}) {dtype}"
    array = plain_array(value)
    if array is None or array.dtype.kind not in "biuf" or not array.size:
        return shown
    if array.dtype.kind == "b":
        return f"{shown}, {np.count_nonzero(array):,} true"
    finite = array if array.dtype.kind != "f" else array[np.isfinite(array)]
    span = f", {_short(finite.min())} to {_short(finite.max())}" if finite.size else ""
    return f"{shown}{span}{'' if finite.size == array.size else f', {array.size - finite.size:,} not finite'}"


def _short(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, float | np.floating) else str(number)


def plain_array(value: Any) -> Any:
    """Convert a value to a NumPy array, or return ``None`` if that is impossible."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    try:
        return np.asarray(value.detach().cpu().float() if str(value.dtype) == "torch.bfloat16" else value.detach())
    except Exception:  # noqa: BLE001  sparse and quantized tensors cannot be converted
        return None


def array_text(value: Any) -> str:
    """Show the numbers of a small array."""
    array = plain_array(value)
    if array is None or array.dtype.kind not in "biufcSU":
        return ""
    return np.array2string(array, threshold=32, edgeitems=3, precision=4) if array.ndim <= 1 or array.size <= 32 else ""
