"""Extra shards of an earlier, larger run never remain among new shards without a warning or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import JobOptions, ShardWriter, WriteOptions, convert_shards
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.create import create_shards
from wds_datapipes.tools.prepare.sources.listing import Recipe

PATTERN = "out-%03d.tar"
pytestmark = pytest.mark.usefixtures("folder")


def samples(count: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{number:03d}", "cls": number} for number in range(count)]


def write(count: int, pattern: str = PATTERN, **options: Any) -> ShardWriter:
    with ShardWriter(pattern, maxcount=1, **options) as writer:
        for sample in samples(count):
            writer.write(sample)
    return writer


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


def names(*numbers: int) -> list[str]:
    return [f"out-{number:03d}.tar" for number in numbers]


def test_a_writer_warns_of_leftover_shards(folder: Path) -> None:
    write(5)
    with pytest.warns(UserWarning, match=r"'out-003\.tar' and the shards up to 'out-004\.tar' are from") as caught:
        writer = write(3)
    assert caught[0].filename == __file__
    assert writer.old_shards == names(3, 4)
    assert listed(folder) == names(0, 1, 2, 3, 4)


@pytest.mark.parametrize("index", [False, True])
def test_a_writer_removes_them_with_their_indexes(folder: Path, index: bool) -> None:
    write(5, options=WriteOptions(index=True))
    assert write(4, old_shards="keep").old_shards == names(4)
    writer = write(3, old_shards="remove", options=WriteOptions(index=index))
    assert writer.old_shards == []
    assert [name for name in listed(folder) if name.endswith("tar")] == names(0, 1, 2)
    assert not [name for name in listed(folder) if "003" in name or "004" in name]


def test_a_failed_writer_removes_nothing(folder: Path) -> None:
    write(3)
    writer = ShardWriter(PATTERN, maxcount=1, old_shards="remove")
    writer.write(samples(1)[0])
    writer.discard()
    assert listed(folder) == names(0, 1, 2)


def test_in_a_store() -> None:
    write(3, "memory://old/out-%d.tar")
    write(1, "memory://old/out-%d.tar", old_shards="remove")
    assert fsspec.filesystem("memory").ls("/old", detail=False) == ["/old/out-0.tar"]


def test_the_stage_accepts_the_option_and_checks_nothing_when_it_is_built(folder: Path) -> None:
    write(4)
    stage = IterableWrapper(samples(2)).write_wds_shards(PATTERN, maxcount=1, old_shards="remove")
    assert listed(folder) == names(0, 1, 2, 3)
    assert [info.url for info in stage] == names(0, 1)
    assert listed(folder) == names(0, 1)
    with pytest.raises(ValueError, match='old_shards must be "warn", "remove" or "keep", not'):
        IterableWrapper(samples(2)).write_wds_shards(PATTERN, old_shards="drop")


def create(count: int, **options: Any) -> None:
    Path("recipe").write_text("".join(f"{number}.txt text:word\n" for number in range(count)))
    create_shards(Recipe("recipe"), PATTERN, maxcount=1, num_workers=0, **options)


def unchanged(sample: Any) -> Any:
    return sample


def convert(count: int, **options: Any) -> None:
    inputs = [build_shard(f"in-{number}.tar", [{"__key__": "a", "txt": b"x"}]) for number in range(count)]
    Path("out-shards.tar.journal").unlink(missing_ok=True)
    convert_shards(unchanged, inputs, PATTERN, num_workers=0, **options)


@pytest.mark.parametrize("make", [create, convert])
def test_writers_that_know_the_number_of_shards_refuse(make: Callable[..., None], folder: Path) -> None:
    make(4)
    before = {name: Path(name).read_bytes() for name in names(0, 1, 2, 3)}
    with pytest.raises(
        ValueError, match=r"'out-002\.tar' and .*'out-003\.tar' .* Nothing was written\. Remove them, or"
    ):
        make(2)
    assert {name: Path(name).read_bytes() for name in names(0, 1, 2, 3)} == before
    make(2, job=JobOptions(remove_old=True))
    assert [name for name in listed(folder) if name.endswith("tar")] == names(0, 1)
    make(3)
