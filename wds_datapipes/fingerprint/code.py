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

#: Modules whose objects count by class only, since their content changes during use or is secret.
OPAQUE = {
    *("_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "random", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "weakref", "numpy.random", "torch._C"),
    *("adlfs", "aiohttp", "boto3", "botocore", "fsspec", "gcsfs", "httpx", "requests", "s3fs", "urllib3"),
}

#: Names of arguments with credentials, which are excluded from digests.
SECRET = re.compile(
    r"(?i)(?:^|_)(?:auth|authorization|client_kwargs|cookies?|credentials?|headers|passphrase|passwd|password|secret"
    r"|storage_options|(?:access|account|api|private|secret)_?key)$"
    r"|^_?(?:(?:access|api|auth|bearer|hf|refresh|sas|security|session)_)?token$"
)

#: Types whose values are identified by their repr, and all immutable types.
PLAIN = (type(None), bool, int, float, complex)
CONSTANTS = (*PLAIN, str, bytes)
#: Collection types.
CONTAINERS = (tuple, list, dict, set, frozenset)


def is_users(module: str) -> bool:
    """Whether a module is not from Python, NumPy, torch or this package, so that its code counts."""
    return module.partition(".")[0] not in LIBRARIES


def is_secret(name: str) -> bool:
    """Whether an argument of this name holds credentials.

    >>> [is_secret(name) for name in ("token", "storage_options", "api_key", "tokenizer", "key", "max_tokens")]
    [True, True, True, False, False, False]
    """
    return SECRET.search(name) is not None


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Return the arguments that an object was created with, if it stores them under their names or ``_`` plus the name.

    None if it does not, or has custom pickling.
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
    attributes = getattr(value, "__dict__", {})
    found = {name: attributes.get(name, attributes.get(f"_{name}", inspect.Parameter.empty)) for name in names}
    return None if not found or inspect.Parameter.empty in found.values() else found


def short_name(qualname: str) -> str:
    """Return a qualified name without the enclosing function."""
    return qualname.rpartition("<locals>.")[2]


def is_opaque(kind: type) -> bool:
    """Whether objects of a class count by class only."""
    names = [str(base.__module__).split(".") for base in kind.__mro__]
    return any(name[0] in OPAQUE or ".".join(name[:2]) in OPAQUE for name in names)


def is_constant(value: Any) -> bool:
    """Whether a value is plain and immutable."""
    return type(value) in CONSTANTS or (type(value) in (tuple, frozenset) and all(map(is_constant, value)))


def home_of(value: FunctionType | type) -> str:
    """Return the module in which a function or a class is defined."""
    return str(value.__globals__.get("__name__", "")) if isinstance(value, FunctionType) else value.__module__


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables read by code, or by functions defined in it."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from global_names(const)


def content_of(cell: Any) -> Any:
    """Return the content of a closure cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def in_order(items: Collection[Any]) -> Collection[Any]:
    """Return unordered items, such as those of a set, in sorted order if they are comparable."""
    try:
        return sorted(items)
    except TypeError:
        return list(items)
