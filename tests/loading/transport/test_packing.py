"""Packing preserves every value of any type; the law is ``unpack(pack(item)) == item``."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
import random
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from error_facts import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from same_values import assert_same

from wds_datapipes.loading.transport.flow_control import TOGETHER_BYTES
from wds_datapipes.loading.transport.protocol import INLINE
from wds_datapipes.loading.transport.serialization import APART, SendableError, Serializer, describe, serialize, unpack

#: The machine may be busy.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

EDGES = sorted({edge + more for edge in (APART, INLINE, TOGETHER_BYTES) for more in (-200, -1, 0, 1)})

Array = NDArray[Any]

PACKER = Serializer()


def carried(item: Any, packer: Serializer = PACKER) -> Any:
    """Pack an item, copy its arrays as into a segment, and unpack it."""
    packed = packer.pack(item)
    parts, size, arrays = packed
    assert size == sum(map(len, parts))
    return unpack(b"".join(parts), [bytearray(array.tobytes("A")) for array in arrays])


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Sample:
    key: str
    fields: dict[str, Any]
    extra: Any = None


# plain values

Leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from(EDGES).map(bytes),
    st.sampled_from(EDGES).map(bytearray),
    st.sampled_from(EDGES).map("ü".__mul__),
    st.sampled_from(EDGES).map(lambda size: np.arange(size, dtype=np.uint8)),
    st.sampled_from([np.float32(2.5), np.int64(-1), np.datetime64("2024-01-01"), np.str_("s"), np.bool_(True)]),
    st.sampled_from([torch.float32, torch.Size([2, 3]), torch.device("cpu"), np.dtype(">i4"), Ellipsis, range(3)]),
    st.sampled_from([datetime(2024, 1, 1, tzinfo=timezone.utc), Path("a/b.tar"), slice(1, 2), len, Pair, 1 << 5000]),
)
Hashable = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))


def containers(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(part, max_size=4),
        st.lists(part, max_size=4).map(tuple),
        st.dictionaries(Hashable, part, max_size=4),
        st.dictionaries(st.text(), part, max_size=4).map(collections.OrderedDict),
        st.sets(Hashable, max_size=4),
        st.frozensets(Hashable, max_size=4),
        st.lists(part, max_size=4).map(collections.deque).map(list),
        st.builds(Pair, part, part),
        st.builds(Sample, st.text(), st.dictionaries(st.text(), part, max_size=3), part),
    )


Item = st.recursive(Leaf, containers, max_leaves=8)


@given(Item)
@settings(BUSY, max_examples=60)
def test_plain_and_nested_values(item: Any) -> None:
    assert_same(carried(item), item)


@pytest.mark.parametrize("size", [0, 1, *EDGES, 300_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, str, np.ndarray, torch.Tensor])
def test_sizes_around_the_edges(kind: type, size: int) -> None:
    make: dict[type, Callable[[bytes], Any]] = {
        bytes: bytes,
        bytearray: bytearray,
        str: lambda data: data.decode("latin-1"),
        np.ndarray: lambda data: np.frombuffer(bytearray(data), np.uint8),
        torch.Tensor: lambda data: torch.frombuffer(bytearray(data or b"x"), dtype=torch.uint8)[: len(data)],
    }
    value = make[kind](random.Random(size).randbytes(size))
    item = {"before": "x", "value": value, "after": [1]}
    assert_same(carried(item), item)
    assert len(PACKER.pack(item)[2]) == (kind in (np.ndarray, torch.Tensor) and size >= APART)


def test_a_large_bytes_object_is_not_copied() -> None:
    large = bytes(10 * TOGETHER_BYTES)
    assert any(part is large for part in PACKER.pack({"large": large})[0])


# arrays

DTYPES: list[Any] = [
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G"),
    *(">i2", ">u8", ">f4", ">c16", "M8[ns]", "m8[D]", ">M8[s]", "U3", ">U2", "S5", "V7", "O"),
    [("a", "i4"), ("b", "f8"), ("c", "S3")],
    [("a", "i1"), ("nested", [("b", ">f4"), ("c", "u2", (3,))])],
    {"names": ["x", "y"], "formats": ["u1", "f8"], "offsets": [3, 8], "itemsize": 24},
    {"names": ["x", "y"], "formats": ["u4", "u1"], "offsets": [0, 2]},
]


def filled(dtype: np.dtype[Any], count: int) -> Array:
    """Return an array of any type whose elements differ."""
    if dtype.names:
        whole = np.zeros(count, dtype)
        for name in dtype.names:
            field = whole[name]
            field[...] = filled(field.dtype, field.size).reshape(field.shape)
        return whole
    if dtype.kind == "O":
        objects = np.empty(count, object)
        objects[:] = [(number, str(number)) if number % 3 else None for number in range(count)]
        return objects
    if dtype.kind in "bU" or dtype.char in "gG":
        numbers: Array = (np.arange(count) % (2 if dtype.kind == "b" else 97)).astype(dtype)
        return numbers
    raw = random.Random(count).randbytes(count * dtype.itemsize)  # including NaN and NaT
    noise: Array = np.frombuffer(raw, dtype).copy()
    return noise


@pytest.mark.parametrize("dtype", ["u1", ">f4", "M8[ns]", [("a", "i4"), ("b", "f8")]], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", [0, 8, 1000, APART - 200, APART, APART + 200, 200_000])
def test_read_only_stays_read_only_and_writable_stays_writable(size: int, order: str, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    shape = (2, size // 2 // dtype.itemsize)
    for writeable in (True, False):
        array = np.asarray(filled(dtype, shape[0] * shape[1]).reshape(shape), order=order)  # type: ignore[call-overload]  # no overload takes a str
        array.flags.writeable = writeable
        got = carried(array)
        assert got.flags.writeable == writeable
        assert_same(got, array)
        if writeable:
            got[...] = np.zeros((), dtype)


@given(
    st.sampled_from([np.dtype(each) for each in DTYPES]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([1, APART]),
    st.data(),
)
@settings(BUSY, max_examples=150)
def test_arrays_of_every_type_seen_through_any_slices(
    dtype: np.dtype[Any], shape: tuple[int, ...], repeated: int, data: st.DataObject
) -> None:
    shape = (*shape, -(-repeated // dtype.itemsize))
    array = filled(dtype, int(np.prod(shape))).reshape(shape)
    array = array.transpose(data.draw(st.permutations(range(len(shape)))))
    array = array[tuple(data.draw(st.one_of(st.just(slice(None)), st.slices(size))) for size in array.shape)]
    got, end = carried((array, "end"))
    assert_same((got, end), (array, "end"))
    if not dtype.hasobject and 1 not in shape:
        assert len(PACKER.pack(array)[2]) == (array.nbytes >= APART)
        axes = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
        if array.transpose(axes).flags.c_contiguous and array.size and 1 not in array.shape:
            assert got.strides == array.strides  # dense memory keeps its order
        assert got.flags.writeable


# tensors

TENSOR_DTYPES = [
    each
    for name in sorted(dir(torch))
    if isinstance(each := getattr(torch, name), torch.dtype) and str(each) == f"torch.{name}" and name[0] != "q"
    if not name.startswith("quint")
]


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of any type, of random bits."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(random.Random(count).randbytes(count), np.uint8).copy()
    if dtype == torch.bool:
        raw %= 2
    return torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


TENSOR_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1),
    "permuted": lambda tensor: tensor.permute(2, 0, 3, 1),
    "sliced": lambda tensor: tensor[:, ::2, 1:],
    "begun later": lambda tensor: tensor[1:],
    "expanded": lambda tensor: tensor[:1].expand(3, -1, -1, -1),
    "one element": lambda tensor: tensor[:1, 1:2, :1, ::2][..., :1],
    "one of many": lambda tensor: tensor.reshape(-1)[::5][:1],
    "no dimension": lambda tensor: tensor[0, 1, 0, 1],
    "empty": lambda tensor: tensor[:, :0],
    "unfolded": lambda tensor: tensor.unfold(3, 2, 1),
}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether some order of dimensions makes a tensor contiguous, ignoring dimensions of size one."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch warns of complex32
@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_tensors_of_every_type_and_layout(dtype: torch.dtype) -> None:
    # Some are stored separately, some are not.
    for layout, width in itertools.product(TENSOR_LAYOUTS, (4, APART // dtype.itemsize // 20)):
        tensor = TENSOR_LAYOUTS[layout](tensor_of(dtype, 3, 6, 5, width))
        if layout == "empty" and dtype not in {torch.float32, torch.int64}:
            continue  # torch pickles tensors without elements, but not of all types
        got = carried([tensor])[0]
        assert_same(got, tensor)
        if tensor.numel() and is_dense(tensor):
            wide = [dim for dim, size in enumerate(tensor.shape) if size != 1]
            assert [got.stride(dim) for dim in wide] == [tensor.stride(dim) for dim in wide]
        if tensor.numel():
            got.view(torch.uint8 if dtype.itemsize == 1 else dtype).flatten()[:1] = tensor.view(  # it can be written
                torch.uint8 if dtype.itemsize == 1 else dtype
            ).flatten()[:1]


class Marked(torch.Tensor):
    """A subclass, with the methods of a tensor."""


def with_attribute(count: int) -> torch.Tensor:
    tensor = torch.arange(count)
    tensor.label = "seven"  # type: ignore[attr-defined]  # any attribute can be set
    return tensor


#: Values that torch or NumPy pickle themselves, and what must be equal.
OWN: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "gradient": (lambda n: torch.arange(float(n), requires_grad=True) * 2, lambda got: got.tolist()),
    "leaf": (lambda n: torch.arange(float(n), requires_grad=True), lambda got: (got.is_leaf, got.tolist())),
    "parameter": (lambda n: torch.nn.Parameter(torch.arange(float(n))), lambda got: got.tolist()),
    "attribute": (with_attribute, lambda got: (got.label, got.tolist())),
    "subclass": (lambda n: torch.arange(n).as_subclass(Marked), lambda got: got.tolist()),
    "conjugate": (lambda n: torch.full((n,), 1 + 2j).conj(), lambda got: got.tolist()),
    "negative": (lambda n: torch.full((n,), 1 + 2j).conj().imag, lambda got: got.tolist()),
    "sparse": (lambda n: torch.eye(n % 300).to_sparse(), lambda got: got.to_dense().tolist()),
    "compressed": (lambda n: torch.eye(n % 300).to_sparse_csr(), lambda got: got.to_dense().tolist()),
    "nested": (lambda n: torch.nested.nested_tensor([torch.ones(2, n)]), lambda got: got.unbind()[0].tolist()),
    "quantised": (
        lambda n: torch.quantize_per_tensor(torch.arange(float(n)), 0.5, 3, torch.qint8),
        lambda got: (got.qscheme(), got.int_repr().tolist()),
    ),
    "masked": (lambda n: np.ma.MaskedArray(np.arange(n), mask=np.arange(n) % 2 == 1), lambda got: got.tolist()),
    "record": (lambda n: np.rec.fromarrays([np.arange(n)], dtype=[("a", "i8")]), lambda got: got.tolist()),
    "text": (lambda n: np.array(["ü" * 50] * n, dtype=np.dtypes.StringDType()), lambda got: got.tolist()),
    "image": (lambda n: Image.linear_gradient("L").resize((n % 300, 7)), lambda got: (got.size, got.tobytes())),
    "palette": (lambda n: Image.new("P", (n % 300, 7), 3), lambda got: (got.getpalette(), got.tobytes())),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of features that change
@pytest.mark.parametrize("count", [5, 10_000])
@pytest.mark.parametrize("kind", OWN)
def test_values_with_their_own_pickle(kind: str, count: int) -> None:
    make, facts = OWN[kind]
    value = make(count)
    got = carried([value])[0]
    assert type(got) is type(pickle.loads(pickle.dumps(value, protocol=5)))
    assert facts(got) == facts(value)


# shared parts


@pytest.mark.parametrize("size", [10, 3 * APART])
def test_parts_shared_within_an_item_stay_shared(size: int) -> None:
    array, tensor, text = np.arange(size), torch.arange(size), ["x" * size]
    once = carried([array, tensor, text, {"again": (array, tensor, text)}])
    assert once[3]["again"][0] is once[0]
    assert once[3]["again"][1] is once[1]
    assert once[3]["again"][2] is once[2]
    assert len(PACKER.pack([array, array])[2]) == (size > 10)


# user-defined buffers


class Owner:
    """Exports its buffer, according to PEP 574."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Owner, (pickle.PickleBuffer(self.buffer),)


@pytest.mark.parametrize("size", EDGES)
def test_buffers_of_other_classes_are_kept_apart(size: int) -> None:
    buffers: list[Any] = [bytes(size), bytearray(size), np.arange(size, dtype=np.uint8)]
    for buffer in buffers:
        got = carried(Owner(buffer))
        assert bytes(got.buffer) == bytes(buffer)
        assert memoryview(got.buffer).readonly == memoryview(buffer).readonly
        assert len(PACKER.pack(Owner(buffer))[2]) == (size >= APART)


# unpackable items


def test_an_unpackable_part_is_named() -> None:
    lock = threading.Lock()

    def local() -> None: ...

    named = {
        "an object of type _thread.lock": lock,
        "a dict whose part 'meta' is an object of type _thread.lock": {"a": 1, "meta": lock, "z": lock},
        "a tuple whose part 1 is an object of type builtins.list": (1, [0, 1, {4: "x", 5: lock}]),
        "a Pair whose part 1 is an object of type _thread.lock": Pair(1, lock),
        "a list whose part 0 is an object of type builtins.function (local)": [local],
        "an object of type builtins.generator (<genexpr>)": (0 for _ in "abc"),
    }
    for text, item in named.items():
        with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
            PACKER.pack(item)
        assert describe(item, PACKER.pack) == text


class Refusing:
    """Raises an error when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@given(st.lists(st.tuples(st.booleans(), Item), max_size=6))
@settings(BUSY, max_examples=30)
def test_a_failed_item_does_not_affect_the_next(items: list[tuple[bool, Any]]) -> None:
    packer = Serializer()
    for fails, item in items:
        if fails:
            with pytest.raises(LookupError, match="not me"):
                packer.pack([item, np.zeros(APART), Refusing(LookupError("not me")), item])
        else:
            assert_same(carried(item, packer), item)
            assert len(packer.pack(7)[2]) == 0


# errors


def test_an_error_whose_class_the_main_process_lacks_has_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("only_there")
    monkeypatch.setitem(sys.modules, "only_there", module)
    module.OddError = type("OddError", (ValueError,), {"__module__": "only_there"})
    try:
        raise module.OddError("the sample is odd")
    except ValueError:
        packed = serialize(SendableError("in worker 0"))
    with pytest.raises(module.OddError):
        unpack(packed).reraise()
    monkeypatch.delitem(sys.modules, "only_there")
    with pytest.raises(RuntimeError, match=naming("in worker 0", "only_there.OddError: the sample is odd")):
        unpack(packed).reraise()
