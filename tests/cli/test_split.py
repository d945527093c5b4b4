"""The command ``split``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.index import check_index, read_index
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard


def keys(*urls: str) -> list[str]:
    return [sample["__key__"] for sample in group_samples(read_shards(urls))]


def contents(*urls: str) -> dict[str, dict[str, bytes]]:
    samples = group_samples(read_shards(urls))
    return {sample["__key__"]: {f: v for f, v in sample.items() if f[:2] != "__"} for sample in samples}


def test_shards_of_another_size(program: Any, shards: list[str]) -> None:
    done = program("split", "a-{0..2}.tar", "--maxcount", "5")
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        "split-000000.tar: 5 samples, 10.8 kB",
        "split-000001.tar: 5 samples, 11.3 kB",
        "split-000002.tar: 2 samples, 5.12 kB",
    ]
    written = [f"split-{number:06d}.tar" for number in range(3)]
    assert keys(*written) == keys(*shards)
    assert contents(*written) == contents(*shards)


def test_shards_by_bytes(program: Any, shards: list[str]) -> None:
    done = program("split", *shards, "--maxsize", "6kB", "-o", "s-%d.tar", "--json")
    facts = json.loads(done.out)
    assert [shard["samples"] for shard in facts["shards"]] == [2] * 6
    assert all(shard["bytes"] <= 6000 + 1024 for shard in facts["shards"])
    assert set(facts) == {"shards", "skipped"}


def test_parts_depend_only_on_keys(program: Any, folder: Path) -> None:
    samples: list[dict[str, bytes | str]] = [{"__key__": f"{n:04d}", "txt": f"{n}"} for n in range(600)]
    build_shard("x.tar", samples[:400])
    build_shard("y.tar", samples[400:])
    build_shard("z.tar", samples[::-2])
    arguments = ["-p", "train=80", "-p", "val=20", "-o", "{part}-%d.tar", "--json"]
    facts = json.loads(program("split", "x.tar", "y.tar", *arguments).out)
    train, val = keys("train-0.tar"), keys("val-0.tar")
    assert facts["parts"] == {"train": len(train), "val": len(val)}
    assert sorted(train + val) == keys("x.tar", "y.tar")
    assert contents("train-0.tar", "val-0.tar") == contents("x.tar", "y.tar")
    assert 70 < len(val) < 170
    program("split", "z.tar", *arguments)
    assert set(keys("val-0.tar")) == set(val) & set(keys("z.tar"))
    program("split", "x.tar", "y.tar", *arguments, "--seed", "1")
    assert keys("val-0.tar") != val


def test_a_bad_shard_leaves_finished_ones_alone(program: Any, shards: list[str]) -> None:
    Path("a-1.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    done = program("split", *shards, "--maxcount", "3", "-o", "s-%d.tar")
    assert (done.code, done.out) == (1, "")
    assert sorted(path.name for path in Path().glob("s-*")) == ["s-0.tar"]
    assert keys("s-0.tar") == ["00", "01", "02"]
    done = program("split", *shards, "--maxcount", "3", "-o", "s-%d.tar", "--skip-bad")
    assert done.code == 0
    assert done.err.startswith("Skipped: TruncatedShardError: a-1.tar ends at byte 4000")
    assert keys("s-0.tar", "s-1.tar", "s-2.tar") == ["00", "01", "02", "03", "10", "20", "21", "22", "23"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-o o.tar", "must have a placeholder for the number"),
        ("-p a=1 -o o-%d.tar", "--part requires {part} in --output"),
        ("-o {part}-%d.tar", "--part requires {part} in --output"),
        ("-p a -o {part}-%d.tar", "--part must be NAME=SHARE"),
        ("-p a=0 -o {part}-%d.tar", "--part must be NAME=SHARE"),
        ("-p a=1 -p a=2 -o {part}-%d.tar", "--part must be NAME=SHARE"),
        ("-p a=nan -o {part}-%d.tar", "--part must be NAME=SHARE"),
        ("--maxsize 0", "--maxsize must be"),
        ("none.tar", "There is no file"),
    ],
)
def test_wrong_use(program: Any, shards: list[str], arguments: str, message: str) -> None:
    done = program("split", "a-0.tar", *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert sorted(path.name for path in Path().iterdir()) == shards


def test_a_part_has_indexes_and_does_not_overwrite_its_source(program: Any, shards: list[str]) -> None:
    parts = ["-p", "a=1", "-p", "b=1", "--index"]
    assert program("split", *shards, *parts, "-o", "x-{part}-%d.tar").code == 0
    for part in "ab":
        check_index(read_index(f"x-{part}-0.tar.wdsidx"), f"x-{part}-0.tar", depth="headers")
    done = program("split", *shards, *parts, "-o", "{part}-%d.tar")
    assert (done.code, done.out) == (2, "")
    assert "may overwrite 'a-0.tar', which is an input" in done.err
    assert contents(*shards) == contents("x-a-0.tar", "x-b-0.tar")
