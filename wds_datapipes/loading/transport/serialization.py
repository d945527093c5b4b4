"""Serialization of items: a pickle, with large arrays and tensors out of band, so that they are copied once.

The bytes are a pickle of protocol 5, and the arrays are its out-of-band buffers (PEP 574).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["SerializedItem", "Serializer", "describe", "takes", "unpack"]

#: The minimum size of an array that is kept out of band, in bytes.
APART = 16 * 1024

#: The maximum size of a pickle after which its pickler holds little memory, in bytes.
SMALL = 4 * 1024

#: The maximum depth at which `describe` searches for the unpicklable part.
MAX_DEPTH = 10

Array = NDArray[Any]


class SerializedItem(NamedTuple):
    """A serialized item.

    Attributes:
        parts: the pickle, in pieces. One may be a large bytes object of the item itself.
        size: their total size, in bytes.
        arrays: the out-of-band arrays, in the order of the pickle.
    """

    parts: list[bytes]
    size: int
    arrays: list[Array]


class Serializer:
    """Packs items, each independently: no two share an object on the other side."""

    def __init__(self) -> None:
        self._pickler = _Pickler()
        self._largest = 0

    def renew(self) -> None:
        """Discard the memory left by large items, which would slow down small ones."""
        if self._largest > SMALL:
            self._pickler = _Pickler()
            self._largest = 0

    def pack(self, item: object) -> SerializedItem:
        """Pack ``item``.

        Raises:
            Exception: any exception of pickling; the serializer remains usable.
        """
        pickler = self._pickler
        parts, arrays = pickler.parts, pickler.arrays
        try:
            pickler.dump(item)
            size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
            if size > self._largest:
                self._largest = size
            return SerializedItem(parts.copy(), size, arrays.copy())
        finally:
            parts.clear()
            arrays.clear()
            pickler.clear_memo()


class _Pickler(pickle.Pickler):
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.arrays: list[Array] = []
        super().__init__(_Writer(self.parts.append), protocol=5, buffer_callback=self._set_apart)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            return self._reduce_tensor(obj)
        if kind is np.ndarray and obj.itemsize and not obj.dtype.hasobject:
            return self._reduce_array(obj)
        return NotImplemented

    def _reduce_array(self, array: Array) -> Any:
        # NumPy's own method would lose the byte order, or the read-only flag, of some arrays.
        flags = array.flags
        order: Literal["C", "F"] = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
        if array.nbytes >= APART:
            self.arrays.append(array)
            return _array, (_PLACEHOLDER, array.dtype, array.shape, order, flags.writeable)
        data = array.tobytes(order)
        return _array, (bytearray(data) if flags.writeable else data, array.dtype, array.shape, order, flags.writeable)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        name = _IN_NUMPY.get(tensor.dtype)
        if name is not None and not tensor.__dict__:
            # A fast path for most tensors, which takes a quarter of the time. NumPy rejects the others.
            with suppress(RuntimeError, TypeError):
                array: Array = tensor.numpy()
                if array.size and array.flags.c_contiguous:
                    return _tensor, (self._write_array(array), name, array.shape, None)
        plain = (
            tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
        )
        if not plain or not tensor.numel():
            return NotImplemented
        # Dense memory with another order of dimensions, such as channels_last, arrives in that order.
        order: list[int] | None = None
        if not tensor.is_contiguous():
            strides, shape = tensor.stride(), tensor.shape
            by_stride = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], shape[dim]), reverse=True)
            if tensor.permute(by_stride).is_contiguous():
                tensor, order = tensor.permute(by_stride), by_stride
        # NumPy lacks many of torch's types, but needs only the size of an element.
        array = tensor.view(_OF_SIZE[tensor.element_size()]).numpy()
        return _tensor, (self._write_array(array), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), order)

    def _write_array(self, array: Array) -> Any:
        """Return a placeholder for the bytes of an array, which is kept out of band if it is large."""
        if array.nbytes < APART:
            return bytearray(array.tobytes())
        self.arrays.append(array)
        return _PLACEHOLDER

    def _set_apart(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a buffer out of band (False), or leave it in the pickle (True)."""
        if buffer is _PLACEHOLDER:
            return False  # its array is in the list already
        raw = buffer.raw()
        if raw.nbytes < APART:
            return True
        self.arrays.append(np.frombuffer(raw, np.uint8))
        return False


class _Writer:
    """The file that the pickler writes to. It receives large bytes objects without copying."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write


#: Types that NumPy also has, by the size of an element in bytes.
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
#: The names of types that NumPy also has. Looking up a name is faster than pickling a type.
_IN_NUMPY = {
    getattr(torch, name): name
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "complex64")
}

#: The placeholder of an out-of-band array, which may be strided, unlike a `PickleBuffer`.
_PLACEHOLDER = pickle.PickleBuffer(bytearray())


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any, writeable: bool) -> Array:
    array: Array = np.ndarray(shape, dtype, buffer, order=order)
    array.flags.writeable = writeable
    return array


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...], order: list[int] | None) -> torch.Tensor:
    tensor = torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape)
    return tensor if order is None else tensor.permute(_inverse(order))


def unpack(pickled: Any, arrays: Iterable[Any] = ()) -> Any:
    """Return the item that was packed; its large arrays and tensors are views of ``arrays``."""
    return pickle.loads(pickled, buffers=arrays)  # noqa: S301  the other process is a part of this program


def describe(item: object, pack: Callable[[Any], object]) -> str:
    """Describe an item, and the part of it that ``pack`` rejects."""
    path, seen = "", [item]
    while len(seen) <= MAX_DEPTH:
        for key, part in _parts(item):
            if all(part is not each for each in seen) and not takes(pack, part):
                path += f"a {type(item).__name__} whose part {key!r} is "
                break
        else:
            break
        item = part
        seen.append(item)
    if isinstance(item, FunctionType):
        code = item.__code__
        return f"{path}the function {item.__qualname__} (line {code.co_firstlineno} of {code.co_filename})"
    if isinstance(item, type):
        return f"{path}the class {item.__module__}.{item.__qualname__}"
    return f"{path}an object of type {type(item).__module__}.{type(item).__qualname__}"


def _parts(item: object) -> Iterable[tuple[Any, Any]]:
    """Return the parts of an item, with their keys or names."""
    if isinstance(item, dict):
        return item.items()
    if isinstance(item, (list, tuple)):
        return enumerate(item)
    if isinstance(item, partial):
        return [("func", item.func), ("args", item.args), ("keywords", item.keywords)]
    return () if isinstance(item, FunctionType | type) else getattr(item, "__dict__", {}).items()


def takes(pack: Callable[[Any], object], value: object) -> bool:
    """Whether ``pack`` pickles a value."""
    try:
        pack(value)
    except Exception:  # noqa: BLE001 - pickling runs user code, and any exception is the answer
        return False
    return True
