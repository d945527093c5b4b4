"""Serialization of items and exceptions: an item becomes a pickle and out-of-band arrays, which are copied once.

The bytes are a pickle of protocol 5; the large arrays are its out-of-band buffers (PEP 574).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper

from wds_datapipes.errors import WdsError
from wds_datapipes.hints import Message

#: The minimum size of an array that is kept out of band, in bytes.
APART = 16 * 1024

Array = NDArray[Any]


#: The maximum number of values in an item that shares a pickle with others, and of their bytes in total.
PLAIN_VALUES, PLAIN_BYTES = 64, 2048

#: The types of values in such items, besides str and bytes.
_PLAIN = frozenset({int, float, bool, type(None)})

SerializedItem: TypeAlias = tuple[list[bytes], int, list[Array]]
"""A serialized item: the pieces of its pickle (a large bytes object is one), their total size in bytes, and the
out-of-band arrays in the order of the pickle. It is a plain tuple because one is made for each item."""


def plain_copy(item: Any) -> Any:
    """Return a copy, safe from later changes, of a small dictionary of plain values; None for other items."""
    if type(item) is not dict or len(item) > PLAIN_VALUES:
        return None
    left = PLAIN_BYTES
    for key, value in item.items():
        kind = type(value)
        if kind is bytes or kind is str:
            left -= len(value)
        elif kind not in _PLAIN:
            return None
        if type(key) is not str:
            return None
    return item.copy() if left >= 0 else None


class Serializer(pickle.Pickler):
    """Packs items independently: no two items share an object on the other side."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._arrays: list[Array] = []
        # The pickler passes large bytes objects on without copying them.
        file: Any = SimpleNamespace(write=self._parts.append)
        super().__init__(file, protocol=5, buffer_callback=partial(_set_apart, self._arrays))

    def pack(self, item: object) -> SerializedItem:
        """Pack ``item``.

        Raises:
            Exception: any exception of pickling; the serializer remains usable.
        """
        parts, arrays = self._parts, self._arrays
        try:
            self.dump(item)
            if len(parts) == 1 and not arrays:  # most items
                part = parts.pop()
                return [part], len(part), []
            return parts.copy(), sum(map(len, parts)), arrays.copy()
        finally:
            if parts or arrays:
                parts.clear()
                arrays.clear()
            self.clear_memo()

    def reducer_override(self, obj: Any) -> Any:
        """Return how to recreate a value; pickle calls this for each."""
        kind = type(obj)
        if kind is torch.Tensor:
            return self._reduce_tensor(obj)
        if kind is np.ndarray and obj.itemsize and not obj.dtype.hasobject:
            return _array, self._arguments_of(obj)
        if isinstance(obj, type) and (original := _original_of(obj)):
            return _class_of, (original,)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        plain = (
            tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
            and not (tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
        )
        if not plain or not tensor.numel():
            return NotImplemented
        if tensor.dtype in _IN_NUMPY:
            return _tensor, self._arguments_of(tensor.numpy())
        # NumPy needs only the size of an element.
        array = tensor.view(_OF_SIZE[tensor.element_size()]).numpy()
        return _tensor, (*self._arguments_of(array), tensor.dtype)

    def _arguments_of(self, array: Array) -> tuple[Any, ...]:
        """Return the arguments of `_array` for an array; those of NumPy lose some byte orders and read-only flags."""
        dtype, writeable = array.dtype, array.flags.writeable
        order: list[int] | None = None
        if not array.flags.c_contiguous:
            # Dense memory with another order of axes, such as channels_last or Fortran's, arrives in that order.
            strides, shape = array.strides, array.shape
            by_stride = sorted(range(array.ndim), key=lambda axis: (strides[axis], shape[axis]), reverse=True)
            if array.transpose(by_stride).flags.c_contiguous:
                array, order = array.transpose(by_stride), by_stride
        buffer: Any = _PLACEHOLDER
        if array.nbytes >= APART:
            self._arrays.append(array)
        else:
            buffer = bytearray(array.tobytes()) if writeable else array.tobytes()
        # The name of a type is faster than its pickle.
        return buffer, dtype.str if dtype.isbuiltin == 1 else dtype, array.shape, order, writeable


def _set_apart(arrays: list[Array], buffer: pickle.PickleBuffer) -> bool:
    """Keep a buffer out of band (False), or leave it in the pickle (True)."""
    if buffer is _PLACEHOLDER:
        return False  # its array is in the list already
    raw = buffer.raw()
    if raw.nbytes < APART:
        return True
    arrays.append(np.frombuffer(raw, np.uint8))
    return False


#: The most common types that NumPy also has, and one type for each element size in bytes.
_IN_NUMPY = {torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bool}
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

#: The placeholder for an out-of-band array, because an array may be strided, unlike a `PickleBuffer`.
_PLACEHOLDER = pickle.PickleBuffer(bytearray())


def _array(buffer: Any, dtype: Any, shape: tuple[int, ...], order: list[int] | None, writeable: bool) -> Array:
    array: Array = np.ndarray(shape, dtype, buffer)
    array.flags.writeable = writeable
    return array if order is None else array.transpose(sorted(range(len(order)), key=order.__getitem__))


def _tensor(*arguments: Any) -> torch.Tensor:
    tensor = torch.from_numpy(_array(*arguments[:5]))
    return tensor.view(arguments[5]) if arguments[5:] else tensor


def _original_of(cls: type) -> str | None:
    """Return by what Ray finds a class of the main program, if this is the copy of it in a process on another host.

    No module there has it under its name, so pickle would not find it.
    """
    ray: Any = sys.modules.get("ray.cloudpickle.cloudpickle")
    if ray is None or getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
        return None
    found: str | None = ray._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    return found


def _class_of(original: str) -> Any:
    from ray.cloudpickle import cloudpickle

    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[original]


def unpack(pickled: Any, arrays: Iterable[Any] = ()) -> Any:
    """Return the item that was packed; its large arrays and tensors are views of ``arrays``."""
    return pickle.loads(pickled, buffers=arrays)  # noqa: S301  the other process is part of this program


def serialize(value: object) -> bytes:
    """Return the pickle of a value without large arrays."""
    return b"".join(Serializer().pack(value)[0])


def describe(item: object, pack: Callable[[Any], object]) -> str:
    """Describe an item, and the first of its parts that ``pack`` rejects."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(item, dict | list | tuple):
        parts = item.items() if isinstance(item, dict) else enumerate(item)
    for key, part in parts:
        if not takes(pack, part):
            return f"a {type(item).__name__} whose part {key!r} is {_kind_of(part)}"
    return _kind_of(item)


def _kind_of(value: object) -> str:
    name = getattr(value, "__name__", None)
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}{f' ({name})' if name else ''}"


def takes(pack: Callable[[Any], object], value: object) -> bool:
    """Whether ``pack`` pickles a value."""
    try:
        pack(value)
    except Exception:  # noqa: BLE001 - pickling runs user code, which may raise anything
        return False
    return True


class SendableError(ExceptionWrapper):
    """The exception being handled, for another process; if its class cannot be pickled, it becomes RuntimeError.

    Args:
        where: where it was raised; completes "Caught ... error".
    """

    def __init__(self, where: str) -> None:
        super().__init__(sys.exc_info(), where)  # type: ignore[no-untyped-call]
        if not takes(serialize, self.exc_type):
            self.exc_type: type[BaseException] = RuntimeError  # the text contains the name of the class
        raised = sys.exc_info()[1]
        self._hinted = raised.args[0] if isinstance(raised, WdsError) and raised.hints else None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "exc_type": serialize(self.exc_type)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, exc_type=RuntimeError)
        with suppress(Exception):  # this process may lack the class, whose name the text contains
            self.exc_type = unpack(state["exc_type"])

    def reraise(self) -> NoReturn:
        """Raise the exception again, or else a RuntimeError with the same message; the message has all information."""
        text = f"Caught {self.exc_type.__name__} {self.where}.\nOriginal {self.exc_msg}"
        # A generator cannot raise StopIteration.
        if not issubclass(self.exc_type, (StopIteration, StopAsyncIteration)):
            try:
                super().reraise()  # type: ignore[no-untyped-call]
            except Exception as error:  # a user's class may raise when called with a message
                if type(error) is self.exc_type:
                    if self._hinted is not None:
                        error.args = (Message.of(str(error), self._hinted.parts),)
                    raise
        raise RuntimeError(text)
