"""How fast are shards written?

    python benchmarks/bench_writing.py --json writing.json --plot writing.png

Samples in memory are written to one shard in a folder in memory (``/dev/shm``, unless ``--data`` names another one), so
that the code is measured rather than a disk. The values are bytes, and each writer is used with its defaults: ours
checks keys, encodes by extension and syncs the file; webdataset's encodes; tarfile receives members. SMALL, IMG and BIG
are those of bench_reading. The second contest writes four shards.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import webdataset
from contest import Contender, Contest, options, parse, plot_contests, write_report
from datasets import SETS

from wds_datapipes import ShardWriter, TarWriter, WriteOptions

Sample = dict[str, Any]


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


def main() -> None:
    arguments = parse(options(__doc__, rounds=7))
    memory = Path("/dev/shm")
    parent = arguments.data or (memory if memory.is_dir() else None)
    contests = []
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for name in ("SMALL", "IMG", "BIG"):
            data = samples(name, arguments.scale)
            for contest in (one_shard(name, data, Path(folder)), many_shards(name, data, Path(folder))):
                contest.run(arguments.rounds)
                contest.show()
                contests.append(contest)
    write_report(arguments.json, [contest.facts() for contest in contests])
    plot_contests(arguments.plot, contests)


if __name__ == "__main__":
    main()
