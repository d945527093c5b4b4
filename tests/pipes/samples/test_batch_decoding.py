"""``decode_batch``: the same as ``wds_decode``, ``batch`` and ``collate``; random crops; errors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel_pipelines import open_service
from error_facts import naming
from plain_codecs import encoded, photo
from same_values import assert_same
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import CenterCrop, ErrorBudget, ImageDecoder, RandomResizedCrop, ShardList, collate_samples
from wds_datapipes.errors import DecodeError, UnsafeInputError
from wds_datapipes.loading.report import count_skipped
from wds_datapipes.pipes.samples.decode_batch import BatchDecoder
from wds_datapipes.pipes.samples.wds_decode import SampleDecoder
from wds_datapipes.testing import build_shard

Pipe = IterDataPipe[Any]
RANDOM_CROP = RandomResizedCrop((12, 9), flip_probability=0.5)


def image(seed: int, height: int = 20, width: int = 30, form: str = "JPEG", mode: str = "RGB") -> bytes:
    return encoded(photo(height, width, mode, seed), form)


def samples(count: int, **options: Any) -> list[dict[str, Any]]:
    return [
        {"__key__": str(n), "__url__": "a.tar", "jpg": image(n, **options), "cls": b"%d" % n, "txt": b"%d!" % n}
        for n in range(count)
    ]


def wrapped(items: list[Any]) -> Pipe:
    pipe: Pipe = IterableWrapper(items)
    return pipe


@pytest.mark.parametrize("spec", ["torchrgb8", "torchrgba8", "l"])
@pytest.mark.parametrize("crop", [None, CenterCrop(8)])
def test_it_is_decoding_batching_and_collating(spec: str, crop: CenterCrop | None) -> None:
    decoder = ImageDecoder(spec, crop=crop)
    source = samples(7)
    wanted = list(wrapped(source).wds_decode(decoder).batch(3).collate())
    for num_threads in (1, 3):
        found = list(wrapped(source).batch(3).decode_batch(decoder, num_threads=num_threads))
        assert [list(batch) for batch in found] == [["__key__", "__url__", "jpg", "cls", "txt"]] * 3
        assert_same(found, wanted)


def test_other_fields_are_decoded_as_usual_and_collated_by_a_function() -> None:
    source = [{**sample, "seg.png": image(n, form="PNG"), "json": b"[1]"} for n, sample in enumerate(samples(2))]
    [batch] = (
        wrapped(source).batch(2).decode_batch("torchrgb8", txt=len, only="jpg txt json", collate_fn=collate_samples)
    )
    assert batch["jpg"].shape == (2, 3, 20, 30)
    assert batch["txt"].tolist() == [2, 2]
    assert batch["json"] == [[1], [1]]
    assert batch["cls"] == [b"0", b"1"]
    assert batch["seg.png"] == [sample["seg.png"] for sample in source]


def test_compressed_images_and_other_buffers_are_decoded() -> None:
    import gzip

    source = [{"__key__": "a", "ppm.gz": gzip.compress(b"P6 1 1 255 abc"), "jpg": bytearray(image(0))}]
    [batch] = wrapped(source).batch(1).decode_batch("rgb8")
    assert bytes(batch["ppm.gz"].numpy()) == b"abc"
    assert batch["jpg"].shape == (1, 20, 30, 3)


# Random crops -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> str:
    for shard in range(4):
        keyed: list[dict[str, bytes | str]] = [
            {"__key__": f"{shard}-{n}", "jpg": image(10 * shard + n), "cls": str(n)} for n in range(5)
        ]
        build_shard(tmp_path / f"{shard}.tar", keyed)
    return str(tmp_path / "{0..3}.tar")


def cropped(shards: str, num_threads: int | None) -> Pipe:
    """Decode and crop images; without a number of threads, one at a time."""
    pipe: Any = ShardList(shards).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(4)
    decoder = ImageDecoder("torchrgb8", crop=RANDOM_CROP)
    decoded: Pipe = (
        pipe.wds_decode(decoder)
        if num_threads is None
        else pipe.batch(3).decode_batch(decoder, num_threads=num_threads)
    )
    return decoded


def epochs(pipe: Pipe, workers: int, count: int = 2) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the images of each epoch by key."""
    with open_service(pipe, workers) as loader:
        for _ in range(count):
            found: dict[str, torch.Tensor] = {}
            for item in loader:
                keys, images = item["__key__"], item["jpg"]
                found |= {keys: images} if isinstance(keys, str) else dict(zip(keys, images, strict=True))
            yield found


@pytest.mark.parametrize(("num_threads", "others"), [(None, [None]), (1, [1, 4])])
def test_random_crops_depend_on_the_epoch_and_the_sample_only(
    num_threads: int | None, others: list[int | None], shards: str
) -> None:
    first, second = epochs(cropped(shards, num_threads), 0)
    assert len(first) == 20
    assert not any(torch.equal(first[key], second[key]) for key in first)
    for other in others:
        for found, wanted in zip(epochs(cropped(shards, other), 3), (first, second), strict=True):
            assert_same(found, wanted, ordered=False)


@pytest.mark.parametrize("build", ["wds_decode", "decode_batch"])
def test_images_of_a_sample_get_the_same_crop(build: str) -> None:
    source = wrapped([{**sample, "seg.jpg": sample["jpg"]} for sample in samples(4)])
    decoder = ImageDecoder("torchrgb8", crop=RANDOM_CROP)
    pipe = source.wds_decode(decoder) if build == "wds_decode" else source.batch(2).decode_batch(decoder)
    for item in pipe:
        assert torch.equal(item["jpg"], item["seg.jpg"])


def test_only_random_decoders_take_a_seed() -> None:
    source = wrapped([])
    for decoder, takes_seed in (("rgb8", False), (ImageDecoder("rgb8", crop=RANDOM_CROP), True)):
        for stage in (source.wds_decode(decoder), source.decode_batch(decoder)):
            assert hasattr(stage, "set_seed") is takes_seed
            assert isinstance(stage, SampleDecoder | BatchDecoder)
            assert hasattr(pickle.loads(pickle.dumps(stage)), "set_seed") is takes_seed


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("crop", [None, RANDOM_CROP])
@pytest.mark.parametrize("broken", ["jpg", "cls"])
def test_a_sample_that_fails_is_raised_or_skipped(num_threads: int, crop: Any, broken: str) -> None:
    source = samples(6)
    for n in (1, 2, 4):
        source[n][broken] = b"broken"

    def decoded(**options: Any) -> list[Any]:
        decoder = ImageDecoder("torchrgb8", crop=crop)
        pipe = wrapped(source).batch(2).decode_batch(decoder, num_threads=num_threads, **options)
        try:
            return list(pipe)
        finally:
            skipped.append(count_skipped(pipe).total)

    skipped: list[int] = []
    message = rf"field '{broken}' of sample '1' in shard 'a.tar' cannot be decoded by .*broken"
    with pytest.raises(DecodeError, match=message):
        decoded()
    found = decoded(on_error="skip")
    assert [batch["__key__"] for batch in found] == [["0"], ["3"], ["5"]]
    assert [batch["cls"].tolist() for batch in found] == [[0], [3], [5]]
    if crop is None:
        [wanted] = wrapped(source[3:4]).wds_decode("torchrgb8")
        assert torch.equal(found[1]["jpg"][0], wanted["jpg"])
    assert skipped[-1] == 3
    with pytest.warns(UserWarning, match="decode_batch skipped"):
        assert len(decoded(on_error="warn")) == 3
    assert len(decoded(on_error=ErrorBudget(max_errors=3, warn=False))) == 3


def test_a_handler_may_end_the_stage_after_the_samples_before() -> None:
    source = [{"__key__": str(n), "cls": b"x" if n == 3 else b"1"} for n in range(6)]
    pipe = wrapped(source).batch(2).decode_batch(on_error=lambda error: False)
    assert [batch["__key__"] for batch in pipe] == [["0", "1"], ["2"]]


def test_images_of_different_sizes_or_fields_are_errors_that_say_what_to_do() -> None:
    source = samples(3)
    source[1]["jpg"] = image(1, height=24)
    message = r"sample '1' .* 24 x 30 pixels, but the batch has images of 20 x 30.*RandomResizedCrop\(224\)"
    with pytest.raises(DecodeError, match=message):
        list(wrapped(source).batch(3).decode_batch("rgb8"))
    [batch] = wrapped(source).batch(3).decode_batch("rgb8", num_threads=2, on_error="skip")
    assert batch["__key__"] == ["0", "2"]
    assert batch["jpg"].shape == (2, 20, 30, 3)
    source[1]["png"] = source[1].pop("jpg")
    with pytest.raises(DecodeError, match=r"sample '0' has .*'jpg'.* sample '1' has .*'png'.*rename fields"):
        list(wrapped(source[:2]).batch(2).decode_batch("rgb8"))


def test_items_other_than_lists_of_samples_are_an_error() -> None:
    with pytest.raises(TypeError, match=naming("decode_batch", "dict", ".batch()")):
        list(wrapped(samples(1)).decode_batch("rgb8"))
    with pytest.raises(TypeError, match="decode_batch needs samples, which are dicts"):
        list(wrapped([(1, 2)]).batch(1).decode_batch("rgb8"))


def test_unsafe_fields_and_decoded_ones_are_errors() -> None:
    source = wrapped([{"__key__": "a", "pkl": pickle.dumps(1)}]).batch(1)
    with pytest.raises(UnsafeInputError, match="pass allow_pickle=True to decode_batch"):
        list(source.decode_batch())
    assert list(source.decode_batch(allow_pickle=True)) == [{"__key__": ["a"], "pkl": torch.tensor([1])}]
    with pytest.raises(DecodeError, match=naming("'jpg'", "'a'", "list")):
        list(wrapped([{"__key__": "a", "jpg": [1]}]).batch(1).decode_batch("rgb8"))
