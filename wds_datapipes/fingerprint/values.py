"""Fingerprints: digests that identify functions, classes and values by their code and arguments."""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
import sys
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from itertools import islice
from os import PathLike, fspath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from wds_datapipes.fingerprint.code import (
    CONSTANTS,
    CONTAINERS,
    PLAIN,
    arguments_of,
    content_of,
    global_names,
    home_of,
    in_order,
    is_constant,
    is_opaque,
    is_secret,
    is_users,
    short_name,
)
from wds_datapipes.redaction import mask_credentials, may_hold_credentials

__all__ = ["Fingerprint", "fingerprint"]

#: The maximum nesting depth; deeper values count by type only.
MAX_DEPTH = 40
#: The maximum numbers of values and bytes that are digested; beyond them, only types and sizes count.
MAX_VALUES, MAX_BYTES = 200_000, 256 << 20
#: Larger collections are digested in batches of this many items.
LARGE, BATCH = 1000, 100

#: The code flags that distinguish generators and signatures; others depend on where a function is defined.
FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


def fingerprint(*values: Any) -> str:
    """Return a digest of functions and values that is the same in another process and on another host.

    A function is identified by its name, code, defaults and closure, and the code of the functions and classes of its
    module that it calls by name. An object is identified by its class and the arguments that it was created with; if it
    does not store these under their names, by its pickled state. A method ``fingerprint()`` that returns a string
    replaces both. Module names, comments and line numbers are ignored, so a script has the same fingerprint as the same
    code in a module. So are credentials, random generators, other global variables, and the content of files. Another
    release of Python may compile the same source to different code.

    The cost is bounded: beyond 256 MiB or 200,000 values, only sizes and types count.

    >>> fingerprint(str.upper, {"size": 224}) == fingerprint(str.upper, {"size": 224})
    True
    >>> fingerprint(str.upper, {"size": 224}) == fingerprint(str.upper, {"size": 256})
    False
    """
    found = Fingerprint()
    for value in values:
        found.add(value)
    return found.hexdigest()


class Fingerprint:
    """A digest to which values are added one by one.

    Args:
        without: classes whose objects are excluded.
    """

    def __init__(self, without: tuple[type, ...] = ()) -> None:
        self._without = without
        self._digest = hashlib.sha256()
        self._remaining_values = MAX_VALUES
        self._remaining_bytes = MAX_BYTES
        #: The objects being added, to detect cycles.
        self._open: list[int] = []
        #: The cached digests of functions and classes, and the objects themselves, to keep their IDs valid.
        self._cached: dict[int, tuple[bytes, Any]] = {}

    def hexdigest(self) -> str:
        """Return the digest of the added values, as 16 characters."""
        return self._digest.hexdigest()[:16]

    def add(self, value: Any) -> None:
        """Add a value."""
        if id(value) in self._open and not isinstance(value, CONSTANTS):
            self._put("cycle", str(len(self._open) - self._open.index(id(value))))
            return
        self._remaining_values -= 1
        if len(self._open) >= MAX_DEPTH or self._remaining_values < 0:
            self._put("...", type(value).__qualname__)
            return
        self._open.append(id(value))
        try:
            self._add(value)
        finally:
            self._open.pop()

    def _put(self, kind: str, text: str | bytes = b"") -> None:
        """Digest a token unambiguously: no other sequence of tokens has the same bytes."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        self._digest.update(b"%s:%d:" % (kind.encode(), len(data)))
        self._digest.update(data)

    def _add(self, value: Any) -> None:
        if isinstance(value, self._without):
            self._put("without")
        elif type(value) in PLAIN or value is Ellipsis:
            self._put("plain", repr(value))
        elif isinstance(value, str) and not isinstance(value, Enum):
            self._put("str", mask_credentials(value) if may_hold_credentials(value) else str(value))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._add_bytes(memoryview(value).cast("B") if memoryview(value).contiguous else bytes(value))
        elif isinstance(value, FunctionType | CodeType | type):
            self._add_once(value)
        elif isinstance(value, Enum):
            self._put("enum", f"{short_name(type(value).__qualname__)}.{value.name}")
        elif isinstance(value, PathLike):
            self._put("path", mask_credentials(str(fspath(value))))
        elif isinstance(value, ModuleType):
            self._put("module", value.__name__.rpartition(".")[2])
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, property):
            self._add_all("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self._add_all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            self._add_all("method", (value.__func__, value.__self__))
        elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif is_opaque(type(value)):
            self._put("opaque", short_name(type(value).__qualname__))
        elif isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            self._put("builtin", value.__qualname__)
            self.add(None if isinstance(owner, ModuleType) else owner)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value))
        else:
            self._add_object(value)

    def _add_all(self, kind: str, values: Iterable[Any]) -> None:
        self._put(kind)
        for value in values:
            self.add(value)

    def _add_once(self, value: FunctionType | CodeType | type) -> None:
        """Add a function, code or class, and cache its digest."""
        if id(value) not in self._cached:
            outer, self._digest = self._digest, hashlib.sha256()
            try:
                if isinstance(value, FunctionType):
                    self._add_function(value)
                elif isinstance(value, CodeType):
                    self._add_code(value, None)
                else:
                    self._add_class(value)
                self._cached[id(value)] = self._digest.digest(), value
            finally:
                self._digest = outer
        self._put("known", self._cached[id(value)][0])

    def _add_bytes(self, data: Any) -> None:
        self._put("bytes", str(len(data)))
        part = data[: max(self._remaining_bytes, 0)]
        self._remaining_bytes -= len(data)
        self._digest.update(part)

    def _add_array(self, array: Any) -> None:
        self._put("array", f"{array.dtype.str} {array.shape}")
        if array.dtype.hasobject:
            self._add_items(array.ravel().tolist())
        else:
            self._add_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b"")

    def _add_tensor(self, tensor: Any) -> None:
        self._put("tensor", f"{tensor.dtype} {tuple(tensor.shape)}")
        try:
            flat = tensor.detach().cpu().contiguous().flatten()
            self._add_array(flat.view(sys.modules["torch"].uint8).numpy())
        except (RuntimeError, TypeError, NotImplementedError):  # a layout without dense bytes, such as sparse
            self._put("opaque")

    def _add_function(self, function: FunctionType) -> None:
        home = function.__globals__.get("__name__", "")
        wrapped = getattr(function, "__wrapped__", None)
        if not is_users(home):
            if home.startswith("torch.utils.data") and wrapped is not None:  # its wrapper of a datapipe's methods
                self.add(wrapped)
                return
            self._put("function", f"{home}.{function.__qualname__}")
            if "<locals>" in function.__qualname__:  # created by another function
                self._add_closure(function)
            return
        self._put("function", short_name(function.__qualname__))
        self._add_code(function.__code__, function.__doc__)
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        self._add_closure(function)
        for name in sorted(set(global_names(function.__code__))):
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType | type) and is_users(home_of(called)):
                self._put("calls", name)
                self.add(called)

    def _add_closure(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._put("cell", name)
            if not is_secret(name):
                self.add(content_of(cell))

    def _add_code(self, code: CodeType, docstring: str | None) -> None:
        consts = code.co_consts
        if docstring is not None and consts and consts[0] == docstring:
            consts = (None, *consts[1:])
        self._put("code", code.co_code)
        self._put("handlers", getattr(code, "co_exceptiontable", b""))
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & FLAGS
        self._put("facts", repr((counts, code.co_names, code.co_varnames)))
        self._add_all("consts", consts)

    def _add_class(self, kind: type) -> None:
        self._put("class", short_name(kind.__qualname__))
        for base in kind.__mro__:
            self._put("base", short_name(base.__qualname__))
            for name, value in sorted(vars(base).items()) if is_users(base.__module__) else ():
                is_own = not (name.startswith("__") and name.endswith("__")) and is_constant(value)
                if is_own or isinstance(value, FunctionType | staticmethod | classmethod | property):
                    self._put("attribute", name)
                    self.add(value)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        self._put("object", short_name(kind.__qualname__))
        self.add(kind)
        own = getattr(value, "fingerprint", None)
        if callable(own):
            self._put("own", str(own()))
        elif isinstance(value, CONTAINERS):
            self._add_container(value)
            if kind not in CONTAINERS and kind.__module__ != "collections":
                self._add_facts(getattr(value, "__dict__", {}))
        elif getattr(value, "__qualname__", None) is not None:  # a library function not written in Python
            self._put("named", str(value.__qualname__))
        elif (arguments := arguments_of(value)) is not None:
            self._add_facts(arguments)
        else:
            try:
                reduced = value.__reduce_ex__(4)
            except Exception:  # noqa: BLE001  any error; only the class counts then
                self._put("opaque")
                return
            if isinstance(reduced, str):
                self._put("global", reduced)
                return
            self._add_reduced(*reduced)

    def _add_reduced(
        self,
        maker: Any,
        arguments: tuple[Any, ...],
        state: Any = None,
        items: Iterable[Any] | None = None,
        pairs: Iterable[Any] | None = None,
        setter: Any = None,  # noqa: ARG002  part of the reduce protocol
    ) -> None:
        """Add an object by the result of its ``__reduce_ex__``."""
        self._put("made by", getattr(maker, "__qualname__", type(maker).__qualname__))
        self._add_all("arguments", arguments)
        for each in state if isinstance(state, tuple) else (state,):
            self._add_facts(each) if isinstance(each, dict) else self.add(each)
        self._add_items(list(items or ()))
        self._add_items(list(pairs or ()))

    def _add_container(self, value: Any) -> None:
        if isinstance(value, dict):
            if len(value) <= LARGE:
                self._add_facts(value)
            else:
                self._add_pairs(value, in_order(value))
        elif isinstance(value, set | frozenset):
            self._add_items(in_order(value) if len(value) > LARGE else sorted(value, key=self._digest_of))
        else:
            self._add_items(value)

    def _add_facts(self, facts: Mapping[Any, Any]) -> None:
        """Add names or keys with their values, sorted and without secrets."""
        known = {key: value for key, value in facts.items() if not (isinstance(key, str) and is_secret(key))}
        self._put("facts", str(len(known)))
        is_named = all(type(key) is str for key in known)
        for key in sorted(known) if is_named else sorted(known, key=self._digest_of):
            self.add(key)
            self.add(known[key])

    def _digest_of(self, value: Any) -> bytes:
        outer, self._digest = self._digest, hashlib.sha256()
        try:
            self.add(value)
            return self._digest.digest()
        finally:
            self._digest = outer

    def _add_items(self, items: Collection[Any]) -> None:
        self._put("items", str(len(items)))
        if len(items) <= LARGE:
            for item in items:
                self.add(item)
            return
        iterator = iter(items)
        while self._remaining_values > 0 and self._remaining_bytes > 0 and (batch := list(islice(iterator, BATCH))):
            self._add_batch(batch)

    def _add_pairs(self, table: Mapping[Any, Any], keys: Collection[Any]) -> None:
        self._put("pairs", str(len(table)))
        iterator = iter(keys)
        while self._remaining_values > 0 and self._remaining_bytes > 0 and (batch := list(islice(iterator, BATCH))):
            self._add_batch(batch)
            self._add_batch([table[key] for key in batch])

    def _add_batch(self, batch: list[Any]) -> None:
        """Add a batch of items, at the speed of C if they are plain."""
        if all(type(item) is str for item in batch):
            text = "\0".join(batch)
            self._add_bytes(
                (mask_credentials(text) if may_hold_credentials(text) else text).encode("utf-8", "surrogatepass")
            )
            return
        try:
            # Up to version 2, the data does not depend on object identity. Since Python 3.11, sets are marshalled in a
            # deterministic order.
            data = marshal.dumps(batch, 2) if sys.version_info >= (3, 11) else None
        except ValueError:
            data = None
        if data is not None:
            self._add_bytes(data)
            return
        for item in batch:
            self.add(item)
