"""Fingerprints: short digests that identify functions and values by their code and arguments."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import pickle
import re
import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from wds_datapipes.redaction import redact_text
from wds_datapipes.redaction.urls import mask_credentials, may_hold_credentials
from wds_datapipes.user_warnings import warn_user

#: This package.
OWN = "wds_datapipes"
#: Packages whose functions and classes are identified by name; all others are identified by their code.
LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "torchdata", OWN}

#: Modules whose objects are identified by class only, because their content changes during use and determines no items.
OPAQUE = {
    *("_random", "_thread", "asyncio", "concurrent", "logging", "multiprocessing", "queue", "random"),
    *("threading", "weakref", "numpy.random", "torch._C"),
}

#: Names of arguments that hold credentials; digests exclude their values.
SECRET = re.compile(
    r"(?i)(?:^|_)(?:auth|authorization|client_kwargs|cookies?|credentials?|headers|passphrase|passwd|password|secret"
    r"|storage_options|(?:access|account|api|private|secret)_?key)$"
    r"|^_?(?:(?:access|api|auth|bearer|hf|refresh|sas|security|session)_)?token$"
)

#: The types of constants, and the types that are pickled unchanged.
CONSTANTS = (type(None), bool, int, float, complex, type(Ellipsis), str, bytes)
PICKLED = {type(None), bool, int, float, str, bytes, bytearray, list, tuple}
#: Longer lists of strings, such as URLs, are joined before they are searched for credentials; larger dicts hold no
#: arguments.
LARGE = 1000
#: The attributes that identify objects of these types.
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    ModuleType: ("__name__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    MethodType: ("__func__", "__self__"),
}
#: Values with a longer repr are shown by their fingerprints.
SHOWN_CHARACTERS = 160
#: The code flags that distinguish signatures and generators; others depend on where a function is defined.
FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR


def fingerprint(*values: Any, without: tuple[type, ...] = ()) -> str:
    """Return a digest of functions and values that is the same in another process and on another host.

    A function is identified by its name, bytecode, defaults and closure, the global constants with uppercase names that
    it reads, and the global functions and classes that it uses. An object is identified by its class and the arguments
    that it was created with, or by its pickled state if it does not store these arguments under their names. If it has
    a method ``fingerprint()``, the string that the method returns replaces both. Module names, comments and line
    numbers are ignored, so a script has the same fingerprint as the same code in a module. So are credentials, random
    generators, locks, other global variables, and the content of files. Another release of Python may compile the same
    source to different code.

    Args:
        values: the values.
        without: classes whose objects are excluded.

    Warns:
        UserWarning: an object cannot be pickled, so only its class counts.

    >>> fingerprint(str.upper, {"size": 224}) == fingerprint(str.upper, {"size": 224})
    True
    >>> fingerprint(str.upper, {"size": 224}) == fingerprint(str.upper, {"size": 256})
    False
    """
    return _Digest(without, {}).digest(values).hex()[:16]


def format_value(value: Any, without: tuple[type, ...] = ()) -> str:
    """Return a short text that identifies a value: the repr of a small, plain value, or a name and a fingerprint.

    >>> format_value("jpg;png"), format_value(["jpg", 3]), format_value(len)[:5]
    ("'jpg;png'", "['jpg', 3]", 'len #')
    """
    if (own := _own_fingerprint(value)) is not None:
        return own
    if isinstance(value, type) and not is_users(value.__module__):
        return _name(value)
    if _is_plain(value) and len(text := repr(value)) <= SHOWN_CHARACTERS and redact_text(text) == text:
        return text
    name = f"partial of {_name(value.func)}" if isinstance(value, functools.partial) else _name(value)
    shown = value.shown_options() if hasattr(value, "shown_options") and is_own(type(value)) else ""
    return f"{name}{shown} #{fingerprint(value, without=without)[:12]}"


def is_users(module: str) -> bool:
    """Whether a module is user code, outside of Python, NumPy, torch, torchdata and this package."""
    return module.partition(".")[0] not in LIBRARIES


def is_own(kind: type) -> bool:
    """Whether a class belongs to this package."""
    return kind.__module__.partition(".")[0] == OWN


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument is a constant, or options of this package, that equal its default.

    >>> is_default(1, 1), is_default(True, 1), is_default([1], [1])
    (True, False, False)
    """
    if value is default or type(value) is not type(default):
        return value is default
    return (
        fingerprint(value) == fingerprint(default) if is_own(type(value)) else _is_constant(value) and value == default
    )


def is_secret(name: object) -> bool:
    """Whether an argument of this name holds credentials.

    >>> [is_secret(name) for name in ("token", "storage_options", "api_key", "tokenizer", "key", "max_tokens")]
    [True, True, True, False, False, False]
    """
    return isinstance(name, str) and SECRET.search(name) is not None


class _Digest(pickle.Pickler):
    """Hashes a value by pickling it; plain values are pickled at the speed of C.

    Args:
        without: classes whose objects are excluded.
        known: the digests of functions, classes and objects by ID, with the objects themselves, to keep the IDs valid.
    """

    def __init__(self, without: tuple[type, ...], known: dict[int, tuple[bytes, Any]]) -> None:
        self._hash = sha256()
        super().__init__(SimpleNamespace(write=self._hash.update), protocol=5)
        self.fast = True  # object identity does not count
        self._without, self._known = without, known

    def digest(self, value: Any) -> bytes:
        """Return the digest of a value."""
        nested = _Digest(self._without, self._known)
        nested.dump(value)
        return nested._hash.digest()

    def persistent_id(self, value: Any) -> bytes | None:
        """Return a replacement to pickle for a value, or None to pickle the value itself."""
        kind = type(value)
        if kind is list and len(value) > LARGE:
            with contextlib.suppress(TypeError):  # they are not all strings
                return _digest_by_blocks(value) or self.digest("\0".join(value))
        if kind is str and may_hold_credentials(value):
            return mask_credentials(value).encode("utf-8", "surrogatepass")
        if kind in PICKLED:
            return None
        if id(value) not in self._known:
            self._known[id(value)] = b"cycle", value
            self._known[id(value)] = self.digest([*self._parts(value)]), value
        return self._known[id(value)][0]

    def _parts(self, value: Any) -> Any:
        """Return what identifies a value: the name of its kind, and other values."""
        kind = type(value)
        if isinstance(value, self._without):
            return ("without",)
        if isinstance(value, FunctionType):
            return _function_parts(value)
        if isinstance(value, type):
            return _class_parts(value)
        if isinstance(value, CodeType):
            return _code_parts(value)
        if kind in ATTRIBUTES:
            return kind.__name__, *(getattr(value, name) for name in ATTRIBUTES[kind])
        if isinstance(value, set | frozenset):
            return "set", kind.__name__, *sorted(map(self.digest, value))
        if kind is dict:
            keys = list(value)
            with contextlib.suppress(TypeError):  # keys of several types keep their order
                keys.sort()
            names = set() if len(keys) > LARGE else {*filter(is_secret, keys)}
            return "dict", keys, [None if key in names else value[key] for key in keys]
        return _object_parts(value)


def _digest_by_blocks(texts: list[str]) -> bytes | None:
    """Return the digest of many joined strings without joining them all, if they are ASCII and hold no credentials."""
    size = sum(map(len, texts)) + len(texts) - 1
    if not 1 << 16 <= size < 1 << 32:  # others are pickled in another format
        return None
    digest = sha256(b"\x80\5X" + size.to_bytes(4, "little"))  # as strings are pickled
    for first in range(0, len(texts), LARGE):
        block = "\0".join(texts[first : first + LARGE])
        if not block.isascii() or may_hold_credentials(block):
            return None
        digest.update((f"\0{block}" if first else block).encode())
    digest.update(b".")
    return digest.digest()


def _function_parts(function: FunctionType) -> Iterator[Any]:
    module = str(function.__globals__.get("__name__", ""))
    wrappers = ("torch.utils.data", "wds_datapipes.datapipes")  # of methods of datapipes
    if module.startswith(wrappers) and hasattr(function, "__wrapped__"):
        yield function.__wrapped__
        return
    if is_users(module):
        yield from ("function", _name(function))
        yield from _code_parts(function.__code__, function.__doc__)
        yield from (function.__defaults__, function.__kwdefaults__)
        for name in sorted(_names_used(function.__code__)):
            found = function.__globals__.get(name)
            if (isinstance(found, FunctionType | type) and is_users(found.__module__ or "")) or (
                name.isupper() and (_is_constant(found) or isinstance(found, np.ndarray | re.Pattern))
            ):
                yield from (name, found)
    else:
        place = OWN if module.partition(".")[0] == OWN else module  # a release may move it to another module
        yield from ("function", place, function.__qualname__)
        if "<locals>" not in function.__qualname__:
            return  # the name identifies it
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name
        if not is_secret(name):
            try:
                yield cell.cell_contents
            except ValueError:
                yield "empty"


def _code_parts(code: CodeType, docstring: str | None = None) -> Iterator[Any]:
    has_docstring = docstring is not None and code.co_consts[:1] == (docstring,)
    constants = (None, *code.co_consts[1:]) if has_docstring else code.co_consts
    yield from ("code", code.co_code, getattr(code, "co_exceptiontable", b""), code.co_flags & FLAGS)
    yield from (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    yield from (code.co_names, code.co_varnames, constants)


def _names_used(code: CodeType) -> set[str]:
    """Return the names of global variables and attributes in code and in the functions defined in it."""
    return {*code.co_names}.union(*(_names_used(each) for each in code.co_consts if isinstance(each, CodeType)))


def _class_parts(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        yield from ("class", _name(base))
        for name, value in sorted(vars(base).items()) if is_users(base.__module__) else ():
            is_special = name.startswith("__") and name.endswith("__")
            if isinstance(value, FunctionType | staticmethod | classmethod | property) or (
                _is_constant(value) and not is_special
            ):
                yield from (name, value)


def _object_parts(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
            dense = value.detach().cpu().contiguous().flatten()
            return "tensor", kind, str(value.dtype), tuple(value.shape), dense.view(torch.uint8).numpy()
        if isinstance(value, np.memmap):  # identified by its file; the content does not count
            return "file", str(value.filename), value.offset, value.dtype.str, value.shape, value.strides
        modules = [base.__module__.split(".") for base in kind.__mro__]
        if any(not OPAQUE.isdisjoint((module[0], ".".join(module[:2]))) for module in modules):
            return "object", kind
        if (found := _own_fingerprint(value) or _arguments_of(value)) is not None:
            return "object", kind, found
        reduced = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
    except Exception as error:  # noqa: BLE001  any error
        warn_user(
            f"An object of {kind.__qualname__} cannot be distinguished from others of its class ({error}): a state, a "
            "cache or shards made with a different one are accepted. Give the class a method fingerprint() that "
            "returns a string that identifies the object"
        )
        return "undetermined", kind.__qualname__
    if isinstance(reduced, str):
        return "object", kind, reduced
    return "object", kind, *reduced[:3], *map(list, filter(None, reduced[3:5]))


def _own_fingerprint(value: Any) -> str | None:
    """Return the result of the method ``fingerprint()`` of an object that has one."""
    own = None if isinstance(value, type) else getattr(value, "fingerprint", None)
    return str(own()) if callable(own) else None


def _arguments_of(value: Any) -> dict[str, Any] | None:
    """Return the constructor arguments of an object that stores all of them under their names, with or without ``_``.

    Those of an object of this package are without the ones that have their default, so that a release may add some.
    Return None if some are missing, or if the class customizes pickling.
    """
    kind = type(value)
    custom = ("__getstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in custom):
        return None
    try:
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    attributes = getattr(value, "__dict__", {})
    empty = inspect.Parameter.empty
    found = {each.name: attributes.get(each.name, attributes.get(f"_{each.name}", empty)) for each in parameters}
    if not found or any(value is empty for value in found.values()):
        return None
    defaults = {each.name: each.default for each in parameters} if is_own(kind) else {}
    return {name: value for name, value in found.items() if not is_default(value, defaults.get(name, empty))}


def _is_constant(value: Any) -> bool:
    """Whether a value is plain and immutable."""
    return type(value) in CONSTANTS or (type(value) in (tuple, frozenset) and all(map(_is_constant, value)))


def _name(value: Any) -> str:
    """Return the name of a function or class, or of an object's class, without the enclosing functions."""
    name = getattr(value, "__qualname__", None)
    return (name if isinstance(name, str) else type(value).__qualname__).rpartition("<locals>.")[2]


def _is_plain(value: Any) -> bool:
    """Whether a value, or everything in a collection, is plain, and no key names a credential."""
    if type(value) is dict:
        return not any(map(is_secret, value)) and all(map(_is_plain, chain.from_iterable(value.items())))
    return all(map(_is_plain, value)) if type(value) is list else _is_constant(value)
