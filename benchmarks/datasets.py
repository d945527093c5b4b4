"""The data that benchmarks read: shards written with Python's tarfile, kept in a folder and written once.

SMALL: a text of about 200 bytes and a class. PAX: the same with a PAX header before each member, as webdataset's own
writer makes it, since it gives members the time of day to a fraction. IMG: 100 KB that stand for a JPEG file, a class
and a JSON record. BIG: an array of 4 MiB. Payload is noise from a fixed seed, so it is the same at each place; nobody
decodes it here.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

__all__ = ["SETS", "DataSet", "folder", "write_shard"]

Fields = Mapping[str, bytes]


class DataSet(NamedTuple):
    """How a data set is made: so many shards of so many samples."""

    name: str
    shards: int
    samples: int
    sample: Callable[[Random, int], Fields]
    tar_format: int
    #: What all members have as their time; a fraction of a second takes a PAX header.
    mtime: float = 0

    def write(self, where: Path, scale: float = 1.0) -> list[str]:
        """Write the shards that are not there yet; a scale of 0.1 makes a tenth of the samples."""
        count = max(2, round(self.samples * scale))
        where.mkdir(parents=True, exist_ok=True)
        paths = []
        for shard in range(self.shards):
            path = where / f"{self.name.lower()}-{count}-{shard}.tar"
            if not path.exists():
                random = Random(shard)
                samples = ((f"{index:06d}", self.sample(random, index)) for index in range(count))
                write_shard(path, samples, self.tar_format, self.mtime)
            paths.append(str(path))
        return paths


def write_shard(
    path: Path, samples: Iterator[tuple[str, Fields]], tar_format: int = tarfile.USTAR_FORMAT, mtime: float = 0
) -> None:
    """Write one shard from keys and fields; a run that is broken off leaves no half of one."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with tarfile.open(partial, "w", format=tar_format) as archive:
        for key, fields in samples:
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                member.mtime = mtime
                archive.addfile(member, io.BytesIO(data))
    partial.replace(path)


def folder(asked: Path | None) -> Path:
    """Return the folder to keep data in: the one that was asked for, or one of the system's temporary ones."""
    return asked if asked is not None else Path(tempfile.gettempdir()) / "wds-datapipes-benchmarks"


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
