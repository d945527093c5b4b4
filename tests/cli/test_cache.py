"""The command ``cache``: local copies of shards."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ShardList
from wds_datapipes.index import IndexOptions, Manifest, build_indexes, write_manifest

Run = Callable[..., Any]


def warm(program: Run, *arguments: str) -> Any:
    return program("cache", "warm", *arguments, "--dir", "copies")


def kept() -> list[str]:
    return sorted(path.name.partition("-")[2] for path in Path("copies").glob("*-*"))


def test_cached_shards_are_not_fetched_again(program: Run, shards: list[str]) -> None:
    assert warm(program, *shards).lines == ["3 shards, 30.7 kB: 3 downloaded, 0 already cached"]
    assert warm(program, *shards, *shards).lines == ["3 shards, 30.7 kB: 0 downloaded, 3 already cached"]
    Path(shards[0]).unlink()
    assert len(list(ShardList(shards).cache_wds_shards("copies").load_wds_shards())) > 0


def test_ls_names_shards_and_sizes(program: Run, shards: list[str]) -> None:
    warm(program, *shards)
    done = program("cache", "ls", "--dir", "copies")
    assert done.lines == [*(f"{shard}  10.2 kB" for shard in sorted(shards)), "3 copies, 30.7 kB"]
    facts = [json.loads(line) for line in program("cache", "ls", "--dir", "copies", "--json").lines]
    assert [(each["shard"], each["bytes"]) for each in facts] == [(shard, 10240) for shard in sorted(shards)]
    assert all(Path(each["path"]).read_bytes() == Path(each["shard"]).read_bytes() for each in facts)


def test_a_shard_that_cannot_be_fetched_is_reported_after_the_others(program: Run, shards: list[str]) -> None:
    done = warm(program, "gone.tar", *shards)
    assert done.code == 1
    assert done.lines == ["3 shards, 30.7 kB: 3 downloaded, 0 already cached"]
    assert re.fullmatch("Error: There is no file 'gone.tar'.*\n", done.err)


def test_a_too_small_limit_is_reported(program: Run, shards: list[str]) -> None:
    done = warm(program, *shards, "--max-bytes", "15k")
    assert (done.code, done.err) == (
        1,
        "Error: 2 of the copies were evicted again, as the shards together exceed --max-bytes\n",
    )
    assert len(kept()) == 1
    done = program("cache", "warm", shards[0], "--dir", "others", "--max-bytes", "1k")
    assert (done.code, done.err) == (
        1,
        f"Error: {shards[0]} is larger than the cache, or the cache is full of copies in use\n",
    )


def test_copies_are_verified_by_a_manifest(program: Run, shards: list[str]) -> None:
    write_manifest(Manifest(build_indexes(shards, options=IndexOptions(digest=True))), "manifest.json")
    assert warm(program, *shards, "--manifest", "manifest.json").code == 0
    data = bytearray(Path(shards[0]).read_bytes())
    data[-1] ^= 1
    Path(shards[0]).write_bytes(data)
    done = program("cache", "warm", *shards, "--dir", "others", "--manifest", "manifest.json")
    assert done.code == 1
    assert f"Error: {shards[0]} was downloaded, but its SHA-256 is" in done.err


def test_verify_finds_changed_copies(program: Run, shards: list[str]) -> None:
    warm(program, *shards)
    assert program("cache", "verify", "--dir", "copies").lines == ["3 copies, 30.7 kB: no faults"]
    path = next(Path("copies").glob(f"*-{Path(shards[0]).name}"))
    with path.open("ab") as stream:
        stream.write(b"x")
    for option, advice, left in (
        ([], r"Remove it with --remove; otherwise the next reader downloads it again", 3),
        (["--remove"], r"It was removed", 2),
    ):
        done = program("cache", "verify", "--dir", "copies", *option)
        assert done.code == 1
        assert done.lines[0].endswith(": 1 fault")
        told = rf"Error: The copy \S+ of {re.escape(shards[0])} is damaged: it has 10241 bytes, not 10240\. {advice}\n"
        assert re.fullmatch(told, done.err)
        assert len(kept()) == left
    assert json.loads(program("cache", "verify", "--dir", "copies", "--json").out) == {"copies": 2, "faults": []}


def test_clear_keeps_recently_used_copies_and_those_in_use(program: Run, shards: list[str]) -> None:
    warm(program, "--at-once", "1", *shards)
    assert program("cache", "clear", "--dir", "copies", "--max-bytes", "11k").lines == [
        "2 copies removed, 1 left, 10.2 kB"
    ]
    assert kept() == [Path(shards[2]).name]
    reading = iter(ShardList(shards[2]).cache_wds_shards("copies").load_wds_shards())
    next(reading)
    assert program("cache", "clear", "--dir", "copies").lines == ["0 copies removed, 1 left, 10.2 kB"]
    list(reading)
    del reading
    assert json.loads(program("cache", "clear", "--dir", "copies", "--json").out) == {
        "removed": 1,
        "left": 0,
        "bytes": 0,
    }


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_a_missing_folder_is_reported(program: Run, command: str) -> None:
    done = program("cache", command, "--dir", "nowhere")
    assert (done.code, done.err) == (
        2,
        "Error: There is no folder 'nowhere'. Name the folder passed to .cache_wds_shards()\n",
    )
