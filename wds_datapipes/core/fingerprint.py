"""What tells one function from another, so that the work of an earlier one is not taken for that of this one."""

from __future__ import annotations

import functools
import hashlib
import pickle
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

__all__ = ["fingerprint"]

#: How deep functions may hold others.
MAX_DEPTH = 20


def fingerprint(*values: Any) -> str:
    """Return a digest of functions and values, which is the same in another process and on another host.

    Of a function, its name, its code, its defaults and what it has closed over count, and neither comments nor the
    lines where it stands. What it calls by name, and files that it reads, do not count. Another Python may compile
    another code from the same source.

    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 1), fingerprint(lambda x: x + 2, 7)[:1] == ""
    (True, False)
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    digest = hashlib.sha256()
    for value in values:
        digest.update(_told(value, 0).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def _told(value: Any, depth: int) -> str:
    """Describe a value by what it is made of, without any address in memory."""
    if depth > MAX_DEPTH:
        return "..."

    def told(inner: Any) -> str:
        return _told(inner, depth + 1)

    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(told, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{told(key)}: {told(inner)}' for key, inner in value.items())})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(told, value)))})"
    if isinstance(value, functools.partial):
        return f"partial({told(value.func)}, {told(value.args)}, {told(value.keywords)})"
    if isinstance(value, MethodType):
        return f"method({told(value.__func__)}, {told(value.__self__)})"
    if isinstance(value, CodeType):
        return f"code({value.co_code.hex()}, {value.co_names}, {value.co_varnames}, {told(value.co_consts)})"
    if isinstance(value, FunctionType):
        closed_over = [_content(cell) for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, closed_over]
        return f"{value.__module__}.{value.__qualname__}({', '.join(map(told, parts))})"
    if isinstance(value, type | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    kind = type(value)
    call = kind.__dict__.get("__call__")
    try:
        state = hashlib.sha256(pickle.dumps(value, 4)).hexdigest()
    except Exception:  # noqa: BLE001  objects fail in ways of their own; its class has to do then
        state = ""
    return f"{kind.__module__}.{kind.__qualname__}({told(call)}, {state})"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None
