"""How fast are JPEG images decoded?

    python benchmarks/bench_decoding.py --json decoding.json --plot decoding.png

Samples in memory are decoded by ``wds_decode`` and by webdataset's ``decode`` with the same spec: images of 400 to 500
pixels, and photographs of two megapixels. Before timing, the numbers of arrays and their bytes are compared.
``min_size=256`` decodes the large ones at the smallest JPEG scale whose shorter side has at least that size. It
intentionally does less work: what a crop of 224 pixels needs.

Results relative to webdataset: 1.06 to torchrgb8, 1.02 to rgb8, 1.0 to torchrgb, because Pillow does the work in both;
two megapixels with ``min_size=256`` 1.65.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import webdataset
from contest import Contender, Contest, options, parse, plot_contests, write_report
from PIL import Image

from wds_datapipes import ImageDecoder
from wds_datapipes.codecs.decoding import wds_decode

Sample = dict[str, Any]
SPECS = ("torchrgb8", "rgb8", "torchrgb")


def photograph(random: np.random.Generator, width: int, height: int) -> bytes:
    """Return a JPEG file with large shapes and fine grain, which compresses about as well as a photograph."""
    shapes = Image.fromarray(random.integers(0, 256, (height // 40, width // 40, 3), np.uint8))
    smooth = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = random.normal(0, 6, (height, width, 1))
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def photographs(count: int, shortest: int, longest: int) -> list[Sample]:
    random = np.random.default_rng(0)
    sides = random.integers(shortest, longest, (count, 2))
    return [
        {"__key__": f"{index:04d}", "__url__": "memory", "jpg": photograph(random, int(width), int(height))}
        for index, (width, height) in enumerate(sides)
    ]


def payload(sample: Sample) -> int:
    return int(sample["jpg"].nbytes)


def ours(samples: list[Sample], decoder: str | ImageDecoder) -> Iterable[Sample]:
    return wds_decode(samples, decoder)


def theirs(samples: list[Sample], spec: str) -> Iterable[Sample]:
    pipeline: Iterable[Sample] = webdataset.DataPipeline(lambda: iter(samples), webdataset.decode(spec))
    return pipeline


def contest(title: str, samples: list[Sample], spec: str, *, scaled: bool) -> Contest:
    contenders = [
        Contender(f"ours, {spec}", lambda: ours(samples, spec), payload),
        Contender(f"webdataset, {spec}", lambda: theirs(samples, spec), payload),
    ]
    if scaled:
        decoder = ImageDecoder(spec, min_size=256)
        small = Contender(f"ours, {spec}, min_size=256", lambda: ours(samples, decoder), payload, is_limit=True)
        contenders.append(small)
    return Contest(f"{title} to {spec}", contenders, f"webdataset, {spec}", unit="image")


def main() -> None:
    arguments = parse(options(__doc__, rounds=7))
    small = photographs(max(2, int(100 * arguments.scale)), 400, 500)
    large = photographs(max(2, int(12 * arguments.scale)), 1200, 1700)
    contests = [contest("400 to 500 pixels", small, spec, scaled=False) for spec in SPECS]
    contests.append(contest("Two megapixels", large, "rgb8", scaled=True))
    for one in contests:
        one.run(arguments.rounds)
        one.show()
    write_report(arguments.json, [one.facts() for one in contests])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
