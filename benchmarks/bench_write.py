"""How fast are shards written?

    python benchmarks/bench_write.py --folder /mnt/disk

Samples in memory are written to one shard in a folder in memory (``/dev/shm``, unless ``--folder`` names another one),
so that the code is measured rather than a disk. The values are bytes, and each writer is used with its defaults: ours
checks keys, encodes by extension and syncs the file; webdataset's encodes; tarfile receives members. SMALL, IMG and BIG
are those of harness/datasets.py. The second contest writes four shards.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import webdataset
from harness.contest import Contender, Contest
from harness.datasets import SETS
from harness.questions import Question, answer, options

from wds_datapipes import ShardWriter, TarWriter, WriteOptions

Sample = dict[str, Any]
MEMORY = Path("/dev/shm")


def samples(name: str, scale: float) -> list[Sample]:
    random = Random(0)
    count = max(4, round(SETS[name].samples * scale))
    return [{"__key__": f"{index:06d}", **SETS[name].sample(random, index)} for index in range(count)]


def payload(sample: Sample) -> int:
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))


def ours(path: Path, data: Iterable[Sample], **settings: Any) -> Iterator[Sample]:
    with TarWriter(path, WriteOptions(**settings)) as shard:
        for sample in data:
            shard.write(sample)
            yield sample


def theirs(path: Path, data: Iterable[Sample], **settings: Any) -> Iterator[Sample]:
    with webdataset.TarWriter(str(path), **settings) as shard:
        for sample in data:
            shard.write(sample)
            yield sample


def by_tarfile(path: Path, data: Iterable[Sample]) -> Iterator[Sample]:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for sample in data:
            for field, value in sample.items():
                if field != "__key__":
                    member = tarfile.TarInfo(f"{sample['__key__']}.{field}")
                    member.size = len(value)
                    archive.addfile(member, io.BytesIO(value))
            yield sample


def raw(path: Path, data: Iterable[Sample]) -> Iterator[Sample]:
    """Write only the bytes."""
    with path.open("wb", buffering=1 << 18) as file:
        for sample in data:
            for field, value in sample.items():
                if field != "__key__":
                    file.write(value)
            yield sample


def many_of_ours(folder: Path, data: list[Sample], **settings: Any) -> Iterator[Sample]:
    with ShardWriter(
        folder / "ours-%03d.tar", maxcount=max(1, len(data) // 4), options=WriteOptions(**settings)
    ) as writer:
        for sample in data:
            writer.write(sample)
            yield sample


def many_of_theirs(folder: Path, data: list[Sample]) -> Iterator[Sample]:
    pattern = str(folder / "theirs-%03d.tar")
    with webdataset.ShardWriter(pattern, maxcount=max(1, len(data) // 4), verbose=0) as writer:
        for sample in data:
            writer.write(sample)
            yield sample


def one_shard(name: str, data: list[Sample], folder: Path) -> Contest:
    contenders = [
        Contender("ours", lambda: ours(folder / "ours.tar", data), payload),
        Contender("ours, with digest", lambda: ours(folder / "digest.tar", data, digest=True), payload),
        Contender("webdataset", lambda: theirs(folder / "theirs.tar", data), payload),
        Contender("tarfile", lambda: by_tarfile(folder / "tarfile.tar", data), payload),
        Contender("raw write", lambda: raw(folder / "raw.bin", data), payload, is_limit=True),
    ]
    return Contest(f"{name}, one shard", contenders, "webdataset")


def many_shards(name: str, data: list[Sample], folder: Path) -> Contest:
    contenders = [
        Contender("ours", lambda: many_of_ours(folder, data), payload),
        Contender("ours, with digest", lambda: many_of_ours(folder, data, digest=True), payload),
        Contender("webdataset", lambda: many_of_theirs(folder, data), payload),
    ]
    return Contest(f"{name}, four shards", contenders, "webdataset")


def writing(arguments: Namespace) -> list[dict[str, Any]]:
    """Write one shard and four, of each dataset."""
    parent = MEMORY if MEMORY.is_dir() else arguments.data
    with tempfile.TemporaryDirectory(dir=arguments.folder or parent) as folder:
        contests = list[dict[str, Any]]()
        for name in ("SMALL", "IMG", "BIG"):
            data = samples(name, arguments.scale)
            both = one_shard(name, data, Path(folder)), many_shards(name, data, Path(folder))
            contests += [contest.run(arguments.rounds) for contest in both]
    return contests


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help=f"where to write ({MEMORY})")
    answer(parser, Question("writing", writing, 7))


if __name__ == "__main__":
    main()
