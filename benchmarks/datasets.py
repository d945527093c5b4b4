"""The data of the benchmarks: shards written with Python's tarfile, kept in a folder and written once.

SMALL: a text of about 200 bytes and a class. PAX: the same with a PAX header before each member, as written by
webdataset, whose modification times have fractions of a second. IMG: 100 KB in place of a JPEG file, a class and a JSON
record. BIG: an array of 4 MiB. The payload is noise from a fixed seed, so it is the same on all machines; it is not
decoded.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from contest import Contender, Contest, options, parse

__all__ = ["SETS", "DataSet", "folder", "run_on_sets", "write_shard"]

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


def folder(requested: Path | None) -> Path:
    """Return the folder for the data: the requested one, or a default in the system's temporary folder."""
    return requested if requested is not None else Path(tempfile.gettempdir()) / "wds-datapipes-benchmarks"


def run_on_sets(
    document: str | None,
    title: str,
    contenders: Callable[[list[str]], list[Contender]],
    *,
    reference: str,
    rounds: int,
    unit: str = "sample",
) -> tuple[argparse.Namespace, list[Contest]]:
    """Parse the command line, and run a contest on each selected dataset; the title contains ``{}`` for its name."""
    parser = options(document, rounds=rounds)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="the datasets (all)")
    arguments = parse(parser)
    contests = []
    for name in arguments.sets:
        urls = SETS[name].write(folder(arguments.data), arguments.scale)
        contest = Contest(title.format(name), contenders(urls), reference, unit=unit)
        contest.run(arguments.rounds)
        contest.show()
        contests.append(contest)
    return arguments, contests


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
