"""Introspection of functions, classes and objects: the parts that identify them."""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

__all__ = [
    "CONSTANTS",
    "CONTAINERS",
    "PLAIN",
    "arguments_of",
    "content_of",
    "global_names",
    "home_of",
    "in_order",
    "is_constant",
    "is_opaque",
    "is_secret",
    "is_users",
    "short_name",
]

#: Packages whose functions and classes are identified by name. The code of all others counts.
LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "torchdata", "wds_datapipes"}

#: Modules whose objects count by their class alone: their content changes while they are used, or is secret.
OPAQUE = {
    *("_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "random", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "weakref", "numpy.random", "torch._C"),
    *("adlfs", "aiohttp", "boto3", "botocore", "fsspec", "gcsfs", "httpx", "requests", "s3fs", "urllib3"),
}

#: Names of arguments that hold credentials, which are renewed, and belong in no digest.
SECRET = re.compile(
    r"(?i)(?:^|_)(?:auth|authorization|client_kwargs|cookies?|credentials?|headers|passphrase|passwd|password|secret"
    r"|storage_options|(?:access|account|api|private|secret)_?key)$"
    r"|^_?(?:(?:access|api|auth|bearer|hf|refresh|sas|security|session)_)?token$"
)

#: Types whose values are what they print, and all that cannot change.
PLAIN = (type(None), bool, int, float, complex)
CONSTANTS = (*PLAIN, str, bytes)
#: Types of collections.
CONTAINERS = (tuple, list, dict, set, frozenset)


def is_users(module: str) -> bool:
    """Whether a module is neither of Python, nor of torch, nor of this package, so that its code counts."""
    return module.partition(".")[0] not in LIBRARIES


def is_secret(name: str) -> bool:
    """Whether an argument of this name holds credentials.

    >>> [is_secret(name) for name in ("token", "storage_options", "api_key", "tokenizer", "key", "max_tokens")]
    [True, True, True, False, False, False]
    """
    return SECRET.search(name) is not None


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Return the arguments that an object was made with, if it keeps them under their names, or ``_`` and their names.

    None if it does not, or has a way of its own to be pickled.
    """
    kind = type(value)
    if any(
        getattr(kind, name, None) is not getattr(object, name, None)
        for name in ("__getstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    ):
        return None
    try:
        names = list(inspect.signature(kind.__init__).parameters)[1:]
    except (TypeError, ValueError):
        return None
    held = getattr(value, "__dict__", {})
    found = {name: held.get(name, held.get(f"_{name}", inspect.Parameter.empty)) for name in names}
    return None if not found or inspect.Parameter.empty in found.values() else found


def short_name(qualname: str) -> str:
    """Return a name without that of the function in which it is defined."""
    return qualname.rpartition("<locals>.")[2]


def is_opaque(kind: type) -> bool:
    """Whether objects of a class count by the class alone."""
    names = [str(base.__module__).split(".") for base in kind.__mro__]
    return any(name[0] in OPAQUE or ".".join(name[:2]) in OPAQUE for name in names)


def is_constant(value: Any) -> bool:
    """Whether a value is a plain one that cannot change."""
    return type(value) in CONSTANTS or (type(value) in (tuple, frozenset) and all(map(is_constant, value)))


def home_of(value: FunctionType | type) -> str:
    """Return the module in which a function or a class is defined."""
    return str(value.__globals__.get("__name__", "")) if isinstance(value, FunctionType) else value.__module__


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables that code, or a function in it, reads."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from global_names(const)


def content_of(cell: Any) -> Any:
    """Return what a function closes over; None if it is not there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def in_order(items: Collection[Any]) -> Collection[Any]:
    """Return items that may come in any order, such as those of a set, in one that follows from themselves."""
    try:
        return sorted(items)
    except TypeError:
        return list(items)
