"""How fast are JPEG images decoded, and cropped?

    python benchmarks/bench_decode.py

Samples in memory: images of 400 to 500 pixels, and photographs of two megapixels. They are decoded by ``wds_decode``
with the extra ``turbo`` and without it, and by webdataset's ``decode`` with the same spec. "Crop" is a random resized
crop of 224 pixels, mirrored half of the time, for which webdataset decodes to Pillow images, which are cropped and
resized as torchvision does it. All contenders draw the same boxes from the keys. "Batches" are tensors of 16 images.

Before timing, the numbers of images and their bytes are compared, and for crops also the pixels. Those that decode at
a fraction of the size (``min_size``) intentionally do less work; their mean difference from the others is printed.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch
import webdataset
from harness.contest import Contender, Contest
from harness.datasets import photograph
from harness.questions import Question, answer, options
from PIL import Image
from torch.utils.data import default_collate
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ImageDecoder, RandomResizedCrop
from wds_datapipes.codecs import jpeg
from wds_datapipes.codecs.decoding import DecoderChain
from wds_datapipes.codecs.field_chain import convert_samples

Sample = dict[str, Any]
SPECS = ("torchrgb8", "rgb8", "torchrgb")
CROP = RandomResizedCrop(224, flip_probability=0.5)
BATCH = 16


def photographs(count: int, shortest: int, longest: int) -> list[Sample]:
    random = np.random.default_rng(0)
    sides = random.integers(shortest, longest, (count, 2))
    return [
        {"__key__": f"{index:04d}", "__url__": "memory", "jpg": photograph(random, int(width), int(height))}
        for index, (width, height) in enumerate(sides)
    ]


def payload(sample: Sample) -> int:
    return int(sample["jpg"].nbytes)


def by_pillow(begin: Callable[[], Iterable[Any]]) -> Callable[[], Iterator[Any]]:
    """Return a function that yields the same with the extra ``turbo`` switched off."""

    def run() -> Iterator[Any]:
        turbo, jpeg._simplejpeg = jpeg._simplejpeg, lambda: None  # type: ignore[assignment]  # as if not installed
        try:
            yield from begin()
        finally:
            jpeg._simplejpeg = turbo

    return run


def theirs(samples: list[Sample], *stages: Any) -> Iterable[Any]:
    pipeline: Iterable[Any] = webdataset.DataPipeline(lambda: iter(samples), *stages)
    return pipeline


def contest(title: str, samples: list[Sample], spec: str) -> Contest:
    ours = functools.partial(convert_samples, samples, DecoderChain([spec], {}))
    contenders = [
        Contender("ours, turbo", ours, payload),
        Contender("ours, Pillow", by_pillow(ours), payload),
        Contender("webdataset", lambda: theirs(samples, webdataset.decode(spec)), payload),
    ]
    return Contest(f"{title} to {spec}", contenders, "webdataset", unit="image")


def cropped(samples: list[Sample], decoder: ImageDecoder) -> Iterator[Sample]:
    """Crop each image to the box that its key determines."""
    for sample in samples:
        seeded = decoder.with_rng(functools.partial(Random, sample["__key__"]))
        yield {**sample, "jpg": seeded.decode(sample["jpg"])}


def crop_image(sample: Sample) -> Sample:
    """Crop and resize a Pillow image, and return a tensor, as the transforms of torchvision do."""
    image = sample["jpg"]
    box = CROP.select(image.width, image.height, Random(sample["__key__"]))
    part = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    part = part.resize(CROP.shape[::-1], Image.Resampling.BILINEAR)
    if box.is_mirrored:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return {**sample, "jpg": torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()}


def crop_contest(title: str, samples: list[Sample]) -> Contest:
    exact, small = ImageDecoder("torchrgb8", crop=CROP), ImageDecoder("torchrgb8", crop=CROP, min_size=224)

    def by_webdataset() -> Iterable[Any]:
        return theirs(samples, webdataset.decode("pil"), webdataset.map(crop_image))

    begins = {
        "ours, turbo": lambda: cropped(samples, exact),
        "ours, Pillow": by_pillow(lambda: cropped(samples, exact)),
        "webdataset": by_webdataset,
        "ours, turbo, min_size=224": lambda: cropped(samples, small),
        "ours, Pillow, min_size=224": by_pillow(lambda: cropped(samples, small)),
    }
    wanted = [sample["jpg"].int() for sample in by_webdataset()]
    for name, begin in begins.items():
        differences = [(sample["jpg"] - pixels).abs() for sample, pixels in zip(begin(), wanted, strict=True)]
        worst = max(int(each.max()) for each in differences)
        mean = sum(float(each.float().mean()) for each in differences) / len(differences)
        print(f"{name}: pixels differ by {mean:.3f} levels on average, and {worst} at most")
        if worst > 1 and "min_size" not in name:
            raise AssertionError(f"{name} does not crop as webdataset's users do")
    contenders = [Contender(name, begin, payload, is_limit="min_size" in name) for name, begin in begins.items()]
    return Contest(f"{title}, cropped", contenders, "webdataset", unit="image")


def batch_contest(title: str, samples: list[Sample]) -> Contest:
    decoder = ImageDecoder("torchrgb8", crop=CROP)

    def decoded(num_threads: int) -> Iterable[Any]:
        pipe = IterableWrapper(samples, deepcopy=False).batch(BATCH)
        batches: Iterable[Any] = pipe.decode_batch(decoder, num_threads=num_threads)
        return batches

    def by_webdataset() -> Iterable[Any]:
        batched = webdataset.batched(BATCH, collation_fn=default_collate)
        return theirs(samples, webdataset.decode("pil"), webdataset.map(crop_image), batched)

    contenders = [
        Contender("ours, decode_batch", lambda: decoded(1), payload),
        Contender("ours, decode_batch, 2 threads", lambda: decoded(2), payload),
        Contender(
            "ours, wds_decode, batch, collate",
            lambda: IterableWrapper(samples, deepcopy=False).wds_decode(decoder).batch(BATCH).collate(),
            payload,
        ),
        Contender("webdataset", by_webdataset, payload),
    ]
    return Contest(f"{title}, cropped, in batches", contenders, "webdataset", unit="tensor")


def decoding(arguments: Namespace) -> list[dict[str, Any]]:
    """Decode, crop and batch small and large images."""
    torch.set_num_threads(1)
    small = photographs(max(2, int(96 * arguments.scale)), 400, 500)
    large = photographs(max(2, int(16 * arguments.scale)), 1200, 1700)
    contests = []
    for title, samples in (("400 to 500 pixels", small), ("Two megapixels", large)):
        contests += [contest(title, samples, spec) for spec in SPECS]
        contests += [crop_contest(title, samples), batch_contest(title, samples)]
    return [each.run(arguments.rounds) for each in contests]


if __name__ == "__main__":
    answer(options(__doc__), Question("decoding", decoding, 7))
