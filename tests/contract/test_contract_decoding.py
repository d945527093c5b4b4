"""What webdataset's tests pin of decoding.

The numbers in the names are explained in `contract.md`.
"""

from __future__ import annotations

import gzip
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import webdataset
from plain_codecs import encoded
from same_values import assert_same as assert_same_in_order
from torch.utils.data import IterDataPipe
from webdataset import tenbin

from wds_datapipes import ShardList, handle_extension
from wds_datapipes.errors import DecodeError, UnsafeInputError
from wds_datapipes.testing import build_shard

COUNT = 47
HEIGHT, WIDTH = 6, 5

assert_same = partial(assert_same_in_order, ordered=False)


@pytest.fixture(autouse=True)
def shard(folder: Path) -> None:
    """A small version of the shard that most of webdataset's tests read."""
    rng = np.random.default_rng(0)
    samples: list[dict[str, str | bytes]] = []
    for n in range(COUNT):
        pixels = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        samples.append(
            {
                "__key__": f"{n:03}",
                "png": encoded(PIL.Image.fromarray(pixels)),
                "cls": f"{n}",
                "wnid": b"n1",
                "xml": b"<a/>",
            }
        )
    build_shard("images.tar", samples)


def theirs(url: str = "images.tar") -> Any:
    return webdataset.WebDataset(url, shardshuffle=False)


def ours(url: str = "images.tar") -> IterDataPipe[dict[str, Any]]:
    pipe: IterDataPipe[dict[str, Any]] = ShardList(url).load_wds_shards().group_samples()
    return pipe


def test_06_an_image_spec_and_the_basic_decoders() -> None:
    got = list(ours().wds_decode("rgb"))
    assert all(sample["png"].shape == (HEIGHT, WIDTH, 3) for sample in got)
    assert [sample["cls"] for sample in got] == list(range(COUNT))
    assert_same(got, list(theirs().decode("rgb")))


def test_25_specs_give_arrays_or_images_and_no_decoding_bytes() -> None:
    for spec, kind in (("rgb8", np.ndarray), ("pil", PIL.Image.Image)):
        got = list(ours().wds_decode(spec))
        assert isinstance(got[0]["png"], kind)
        assert_same(got, list(theirs().decode(spec)))
    raw = next(iter(ours()))
    assert {type(value) for name, value in raw.items() if not name.startswith("__")} == {bytes}
    assert_same(raw, next(iter(theirs())))


def test_26_only_named_fields_are_decoded() -> None:
    for specs, only, decoded in [((), "cls", "cls"), (("l",), ["jpg", "png"], "png")]:
        got = list(ours().wds_decode(*specs, only=only))
        assert [name for name, value in got[0].items() if not isinstance(value, bytes | str)] == [decoded]
        assert_same(got, list(theirs().decode(*specs, only=only)))


def test_28_floats_are_the_same_in_arrays_and_in_tensors() -> None:
    arrays, tensors = ours().wds_decode("rgb"), ours().wds_decode("torchrgb")
    for one, other in zip(arrays, tensors, strict=True):
        assert torch.equal(torch.from_numpy(one["png"]).permute(2, 0, 1), other["png"])
    assert_same(list(tensors), list(theirs().decode("torchrgb")))


def test_53_every_image_spec() -> None:
    for spec in webdataset.autodecode.imagespecs:
        got = next(iter(ours().wds_decode(spec)))["png"]
        assert_same(got, next(iter(theirs().decode(spec)))["png"])


def test_27_a_gzipped_field_keeps_its_name() -> None:
    url = build_shard("zipped.tar", [{"__key__": f"{n}", "txt.gz": gzip.compress(b"hello\n")} for n in range(3)])
    got = list(ours(url).wds_decode())
    assert [(sample["txt.gz"], sample["__url__"]) for sample in got] == [("hello\n", url)] * 3
    assert_same(got, list(theirs(url).decode()))


class EvenOnly:
    """A user's decoder that fails on every other sample, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, field: str, data: bytes) -> int | None:
        if not field.endswith("cls"):
            return None
        self.calls += 1
        if int(data) % 2:
            raise RuntimeError(f"{int(data)} is odd")
        return int(data)


def test_19_a_failing_decoder_is_an_error_or_drops_its_samples() -> None:
    with pytest.raises(webdataset.DecodingError):
        list(theirs().decode(EvenOnly()))
    with pytest.raises(DecodeError, match=r"'cls' of sample '001' in shard 'images\.tar'.*EvenOnly.*1 is odd"):
        list(ours().wds_decode(EvenOnly()))
    decoder = EvenOnly()
    got = list(ours().wds_decode(decoder, on_error=webdataset.ignore_and_continue))
    assert (len(got), decoder.calls) == (24, COUNT)
    assert_same(got, list(theirs().decode(EvenOnly(), handler=webdataset.ignore_and_continue)))


def length_of_png(field: str, data: bytes) -> int | None:
    return len(data) if field.endswith("png") else None


def test_29_user_decoders() -> None:
    sizes = [len(sample["png"]) for sample in ours()]
    got = list(ours().wds_decode(length_of_png))
    assert [sample["png"] for sample in got] == sizes
    assert_same(got, list(theirs().decode(length_of_png)))
    assert_same(list(ours().wds_decode(handle_extension("jpg png", len))), got)
    assert_same(got, list(theirs().decode(webdataset.handle_extension("jpg png", len))))
    names = []
    next(iter(ours().wds_decode(lambda field, data: names.append(field))))
    assert names == ["png", "cls", "wnid", "xml"]  # theirs gets ".png" and so on


def test_33_arrays_of_every_shape_and_kind_as_tenbin() -> None:
    dtypes = ("u1", "i2", "i4", "i8", "f2", "f4", "f8")
    wanted = [np.ones((2, *shape), dtype) * 7 for dtype in dtypes for shape in ((), (0,), (7,), (3, 28))]
    url = build_shard("arrays.tar", [{"__key__": "a", "ten": bytes(tenbin.encode_buffer(wanted))}])
    got = list(ours(url).wds_decode())
    assert_same(got[0]["ten"], wanted)
    assert_same(got, list(theirs(url).decode()))


def test_49_keywords_get_bytes_and_unknown_fields_stay_bytes() -> None:
    url = build_shard("odd.tar", [{"__key__": "a", "txt": b"text", "odd": b"12"}])
    assert next(iter(theirs(url).xdecode(("*.odd", lambda stream: int(stream.read())))))["odd"] == 12
    with pytest.raises(ValueError, match="No decoder found for odd"):
        list(theirs(url).xdecode())
    assert next(iter(ours(url).wds_decode()))["odd"] == b"12"
    got = next(iter(ours(url).wds_decode(odd=int)))
    assert (got["txt"], got["odd"]) == ("text", 12)


def read_image(stream: io.BytesIO) -> Any:
    return np.asarray(PIL.Image.open(stream))


def decode_image(data: bytes) -> Any:
    return read_image(io.BytesIO(data))


def read_class(stream: io.BytesIO) -> int:
    return int(stream.read())


def test_54_functions_by_extension_leave_the_other_fields() -> None:
    got = list(ours().wds_decode(png=decode_image, cls=int))
    assert got[0]["png"].shape == (HEIGHT, WIDTH, 3)
    assert_same(got, list(theirs().xdecode(png=read_image, cls=read_class, must_decode=False)))


def test_73_fields_that_can_run_code_are_refused_unless_the_stage_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    torch.save({"weights": torch.ones(2)}, buffer)
    pickled = build_shard("pickled.tar", [{"__key__": "a", "pkl": pickle.dumps({1, 2}), "pth": buffer.getvalue()}])
    assert next(iter(theirs(pickled).decode()))["pkl"] == {1, 2}  # allowed unless a global flag forbids it
    with pytest.raises(UnsafeInputError, match=r"'pkl' of sample 'a' in shard 'pickled\.tar' was not decoded"):
        list(ours(pickled).wds_decode())
    with pytest.raises(UnsafeInputError):  # no handler skips it
        list(ours(pickled).wds_decode(on_error=webdataset.ignore_and_continue))
    assert next(iter(ours(pickled).wds_decode(allow_pickle=True)))["pkl"] == {1, 2}
    weights = next(iter(ours(pickled).wds_decode(only="pth")))["pth"]
    assert torch.equal(weights["weights"], torch.ones(2))
    # There is no global flag: each pipeline states what it allows.
    monkeypatch.setenv("WDS_SECURE", "1")
    monkeypatch.setattr(webdataset.utils, "enforce_security", True)
    assert next(iter(ours(f"pipe:cat {pickled}").wds_decode(allow_pickle=True)))["pkl"] == {1, 2}
