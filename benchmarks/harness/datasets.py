"""The data of the benchmarks: shards written with Python's tarfile, kept in a folder and written once.

SMALL: a text of about 200 bytes and a class. PAX: the same with a PAX header before each member, as written by
webdataset, whose modification times have fractions of a second. IMG: 100 KB in place of a JPEG file, a class and a JSON
record. BIG: an array of 4 MiB. The payload is noise from a fixed seed, so it is the same on all machines; it is not
decoded.

PHOTOGRAPHS are for programs that decode: JPEG files like those of a camera (quality 90, chroma subsampled 4:2:0), of
400 to 500 pixels and about 80 KB ("IMG"), or of two megapixels and about 650 KB ("PHOTO"). Those of IMAGENET are
as large as ImageNet's: about 500 x 375 pixels, and 110 KB. Their classes number them, so that samples can be identified
after batching.
"""

from __future__ import annotations

import io
import os
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from harness.contest import Contender, Contest

__all__ = [
    "IMAGENET",
    "PHOTOGRAPHS",
    "SETS",
    "DataSet",
    "PhotographSet",
    "contests_on_sets",
    "photograph",
    "write_shard",
]

Fields = Mapping[str, bytes]


class DataSet(NamedTuple):
    """The specification of a dataset."""

    name: str
    shards: int
    samples: int
    sample: Callable[[Random, int], Fields]
    tar_format: int
    #: The modification time of all members; a fraction of a second needs a PAX header.
    mtime: float = 0

    def write(self, folder: Path, scale: float = 1.0) -> list[str]:
        """Write missing shards; a scale of 0.1 gives a tenth of the samples."""
        count = max(2, round(self.samples * scale))
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for shard in range(self.shards):
            path = folder / f"{self.name.lower()}-{count}-{shard}.tar"
            if not path.exists():
                random = Random(shard)
                samples = ((f"{index:06d}", self.sample(random, index)) for index in range(count))
                write_shard(path, samples, self.tar_format, self.mtime)
            paths.append(str(path))
        return paths


class PhotographSet(NamedTuple):
    """The specification of a dataset of JPEG files.

    Attributes:
        name: the first part of the names of the shards.
        shards: the number of shards.
        samples: the number of samples in a shard.
        distinct: the number of different images, which are repeated under other keys.
        sides: the smallest width and height, and the largest ones, in pixels.
        grain: the standard deviation of the noise, in levels of 255.
    """

    name: str
    shards: int
    samples: int
    distinct: int
    sides: tuple[tuple[int, int], tuple[int, int]]
    grain: float

    def write(self, folder: Path, scale: float = 1.0, *, multiple: int = 1) -> list[str]:
        """Write missing shards, each with a multiple of this number of samples."""
        count = multiple * max(1, round(self.samples * scale / multiple))
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name.lower()}-jpeg-{count}-{shard}.tar" for shard in range(self.shards)]
        if not all(path.exists() for path in paths):
            random = np.random.default_rng(0)
            sides = random.integers(*self.sides, (min(self.distinct, count * self.shards), 2))
            images = [photograph(random, int(width), int(height), self.grain) for width, height in sides]
            for shard, path in enumerate(paths):
                numbers = range(shard * count, (shard + 1) * count)
                write_shard(path, ((f"{n:06d}", {"jpg": images[n % len(images)], "cls": b"%06d" % n}) for n in numbers))
        return [str(path) for path in paths]


def photograph(random: np.random.Generator, width: int, height: int, grain: float = 6) -> bytes:
    """Return a JPEG file with large shapes and fine grain, which compresses about as well as a photograph."""
    shapes = Image.fromarray(random.integers(0, 256, (height // 40, width // 40, 3), np.uint8))
    smooth = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = random.normal(0, grain, (height, width, 1))
    pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90, subsampling="4:2:0")
    return file.getvalue()


def write_shard(
    path: Path, samples: Iterator[tuple[str, Fields]], tar_format: int = tarfile.USTAR_FORMAT, mtime: float = 0
) -> None:
    """Write a shard from keys and fields, atomically."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with tarfile.open(partial, "w", format=tar_format) as archive:
        for key, fields in samples:
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                member.mtime = mtime
                archive.addfile(member, io.BytesIO(data))
    partial.replace(path)


def contests_on_sets(
    arguments: Namespace,
    title: str,
    contenders: Callable[[list[str]], list[Contender]],
    reference: str,
    *,
    unit: str = "sample",
) -> list[dict[str, Any]]:
    """Run a contest on each dataset that the command line selects; the title contains ``{}`` for its name."""
    contests = []
    for name in arguments.sets:
        urls = SETS[name].write(arguments.data, arguments.scale)
        contests.append(Contest(title.format(name), contenders(urls), reference, unit=unit).run(arguments.rounds))
    return contests


def _small(random: Random, index: int) -> Fields:
    return {"txt": random.randbytes(random.randint(75, 125)).hex().encode(), "cls": b"%d" % (index % 1000)}


def _image(random: Random, index: int) -> Fields:
    record = b'{"width": 480, "height": 360, "id": %d}' % index
    return {"jpg": random.randbytes(random.randint(60_000, 140_000)), "cls": b"%d" % (index % 1000), "json": record}


def _big(random: Random, _index: int) -> Fields:
    file = io.BytesIO()
    np.save(file, np.frombuffer(random.randbytes(4096 * 1024), np.float32).reshape(1024, 1024))
    return {"npy": file.getvalue()}


SETS = {
    "SMALL": DataSet("SMALL", 2, 5000, _small, tarfile.USTAR_FORMAT),
    "PAX": DataSet("PAX", 2, 5000, _small, tarfile.PAX_FORMAT, mtime=1_700_000_000.5),
    "IMG": DataSet("IMG", 2, 500, _image, tarfile.GNU_FORMAT),
    "BIG": DataSet("BIG", 2, 32, _big, tarfile.USTAR_FORMAT),
}

PHOTOGRAPHS = {
    "IMG": PhotographSet("IMG", 8, 384, 512, ((400, 400), (500, 500)), 10),
    "PHOTO": PhotographSet("PHOTO", 8, 128, 128, ((1200, 1200), (1700, 1700)), 6),
}
#: Images as those of ImageNet.
IMAGENET = PhotographSet("IMAGENET", 16, 1024, 1024, ((475, 350), (525, 400)), 26)
