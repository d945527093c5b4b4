"""The basic table: one good field and bad bytes for every extension, and the properties of the table."""

from __future__ import annotations

import gzip
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import torch
from plain_codecs import wds_decode
from webdataset import tenbin

from wds_datapipes.codecs import CODECS, UNSAFE
from wds_datapipes.errors import DecodeError, UnsafeInputError

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def saved(save: Callable[..., Any], *values: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    save(file, *values, **named)
    return file.getvalue()


def torch_saved(value: Any) -> bytes:
    return saved(lambda file: torch.save(value, file))


TEXT = ("grüße\n".encode(), "grüße\n", b"\xff\xfe", "UnicodeDecodeError")
INTEGER = (b" 42\n", 42, b"3.0", "invalid literal for int")
JSON = (b'{"a": [1, null]}', {"a": [1, None]}, b"{", "JSONDecodeError")
MSGPACK = (msgpack.packb({1: "x", "k": b"y"}), {1: "x", "k": b"y"}, b"\x92\x01", "incomplete input")
PICKLE = (pickle.dumps({"a": 1}), {"a": 1}, b"\x80", "EOFError|UnpicklingError")
TENBIN = (bytes(tenbin.encode_buffer([ARRAY])), [ARRAY], b"~TenBin~short", "truncated")

#: Extension -> good bytes, their value, bad bytes, and the text of the error.
CASES: dict[str, tuple[bytes, Any, bytes, str]] = {
    "cbor": (cbor2.dumps({"a": [1, 2]}), {"a": [1, 2]}, b"\x82\x01", "premature end"),
    **dict.fromkeys(("class", "cls", "cls2", "count", "id", "index", "inx"), INTEGER),
    **dict.fromkeys(("htm", "html", "text", "transcript", "txt"), TEXT),
    **dict.fromkeys(("jsn", "json"), JSON),
    **dict.fromkeys(("mp", "msg", "msgpack"), MSGPACK),
    "npy": (saved(np.save, ARRAY), ARRAY, saved(np.save, ARRAY)[:-1], "ValueError"),
    "npz": (saved(np.savez, a=ARRAY, b=ARRAY.T), {"a": ARRAY, "b": ARRAY.T}, saved(np.save, ARRAY), "not an archive"),
    **dict.fromkeys(("pickle", "pkl", "pyd"), PICKLE),
    "pth": (torch_saved({"w": torch.ones(2)}), {"w": torch.ones(2)}, torch_saved(1)[:-30], "RuntimeError"),
    **dict.fromkeys(("tb", "ten", "tenbin"), TENBIN),
}


def decode(field: str, data: object, **options: Any) -> Any:
    [sample] = wds_decode([{"__key__": "k", "__url__": "s.tar", field: data}], **options)
    assert list(sample) == ["__key__", "__url__", field]
    return sample[field]


def same(left: object, right: object) -> bool:
    """Compare representations, because nested arrays cannot be compared; those of small arrays contain all values."""
    return repr(left) == repr(right)


def test_every_extension_has_a_case() -> None:
    assert sorted(CASES) == list(CODECS)


@pytest.mark.parametrize("extension", CASES)
def test_good_bytes_become_their_value_by_the_last_extension_after_gz(extension: str) -> None:
    good, value, _, _ = CASES[extension]
    packed = gzip.compress(good)
    for field, data in {
        extension: good,
        f"left.{extension}": bytearray(good),
        f"a.b.{extension}": memoryview(good),
        f"{extension}.gz": packed,
        f"{extension}.gz.gz": gzip.compress(packed),
    }.items():
        assert same(decode(field, data, allow_pickle=extension in UNSAFE), value)


@pytest.mark.parametrize("extension", CASES)
def test_bad_bytes_are_a_complete_decode_error(extension: str) -> None:
    _, _, bad, text = CASES[extension]
    with pytest.raises(DecodeError, match=text) as caught:
        decode(extension, bad, allow_pickle=extension in UNSAFE)
    message = str(caught.value)
    assert f"field '{extension}' of sample 'k' in shard 's.tar' cannot be decoded by the {extension} codec" in message
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in message


@pytest.mark.parametrize("extension", sorted(UNSAFE))
def test_pickles_are_refused_unless_allowed(extension: str) -> None:
    with pytest.raises(
        UnsafeInputError, match=rf"field '{extension}' of sample 'k' in shard 's.tar'.*allow_pickle=True.*only="
    ):
        decode(extension, CASES[extension][0], on_error="skip")
    assert decode(extension, CASES[extension][0], **{extension: bytes}) == CASES[extension][0]


class Planted:
    """An object whose unpickling runs code."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return plant, ()


def plant() -> str:
    Planted.ran = True
    return "planted"


def test_pth_loads_only_weights_unless_allowed_and_arrays_of_objects_are_never_unpickled() -> None:
    data = torch_saved({"w": torch.ones(2), "x": Planted()})
    with pytest.raises(UnsafeInputError, match=r"holds more than tensors.*plant.*allow_pickle=True"):
        decode("pth", data, on_error="skip")
    assert not Planted.ran
    loaded = decode("pth", data, allow_pickle=True)
    assert Planted.ran
    assert loaded["x"] == "planted"
    objects = np.array([Planted()], dtype=object)
    Planted.ran = False
    for extension, data in {"npy": saved(np.save, objects), "npz": saved(np.savez, a=objects)}.items():
        with pytest.raises(DecodeError, match="allow_pickle=False"):
            decode(extension, data, allow_pickle=True)
    assert not Planted.ran


def test_unknown_extensions_stay_bytes() -> None:
    for field in ("bin", "txtt", "x", "pt", "csv"):
        assert decode(field, b"\xff\x00") == b"\xff\x00"
    assert decode("bin.gz", gzip.compress(b"raw")) == b"raw"
    assert decode("gz", gzip.compress(b"raw")) == b"raw"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "data are empty"),
        (gzip.compress(b"text", mtime=0)[:-3], "EOFError"),
        (gzip.compress(b"text" * 50, mtime=0)[:-8] + b"\0" * 8, "CRC check failed"),
    ],
)
def test_bad_gzip_is_a_decode_error(data: bytes, text: str) -> None:
    with pytest.raises(DecodeError, match=f"field 'txt.gz'.*cannot be decoded by gzip.*{text}"):
        decode("txt.gz", data)


def test_codecs_are_imported_on_first_use_and_never_torch() -> None:
    code = (
        "import sys, types; package = types.ModuleType('wds_datapipes')\n"
        f"package.__path__ = {list(__import__('wds_datapipes').__path__)!r}; sys.modules['wds_datapipes'] = package\n"
        "from wds_datapipes.codecs.decoding import DecoderChain\n"
        "from wds_datapipes.codecs.field_chain import convert_samples\n"
        "print(list(convert_samples([{'json': b'1'}], DecoderChain([], {}))))\n"
        "print('wds_datapipes.codecs.array_files' in sys.modules, DecoderChain(['rgb8'], {}).stage)\n"
        "print(sorted({'torch', 'msgpack', 'cbor2', 'av'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "[{'json': 1}]\nFalse wds_decode\n[]\n"


@pytest.mark.parametrize(("name", "data", "value"), [("cls", b"7", 7), ("id", b" 7\n", 7), ("json", b"[7]", [7])])
def test_numbers_and_json_may_begin_with_a_byte_order_mark(name: str, data: bytes, value: object) -> None:
    (sample,) = wds_decode([{"__key__": "a", name: b"\xef\xbb\xbf" + data}])
    assert sample[name] == value
    with pytest.raises(DecodeError, match=r"invalid literal|Expecting value"):
        list(wds_decode([{"__key__": "a", name: b"\xef\xbb\xbfx"}]))
