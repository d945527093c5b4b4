"""The command ``shuffle``, and behaviour that ``sort`` shares with it."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import resource
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.index import check_index, read_index
from wds_datapipes.redaction import redact
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard

Read = list[tuple[str, dict[str, bytes]]]


def read(*urls: str) -> Read:
    """The samples of shards, with their fields."""
    samples = group_samples(read_shards(urls))
    return [(sample["__key__"], {f: v for f, v in sample.items() if f[:2] != "__"}) for sample in samples]


def keys(*urls: str) -> list[str]:
    return [key for key, _ in read(*urls)]


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@pytest.fixture
def many(folder: Path) -> list[str]:
    """Write 300 samples, with fields up to 30 kB, to shards of uneven sizes."""
    rng = random.Random(0)
    samples: list[dict[str, bytes | str]] = [
        {"__key__": f"{n:04d}", "bin": rng.randbytes(rng.choice([0, 100, 5000, 30_000])), "cls": f"{n % 7}"}
        for n in range(300)
    ]
    ends = [0, 1, 120, 121, 250, 300]
    return [build_shard(f"m-{at}.tar", samples[begin:end]) for at, (begin, end) in enumerate(pairwise(ends))]


def test_all_samples_come_in_the_drawn_order(program: Any, many: list[str]) -> None:
    before = read(*many)
    done = program("shuffle", "m-*.tar", "--seed", "5", "--maxcount", "110", "-o", "s-%d.tar")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"(s-\d.tar: (110|80) samples, [\d.]+ [kM]B\n){3}", done.out)
    after = read("s-0.tar", "s-1.tar", "s-2.tar")
    assert sorted(after) == before != after
    assert names() == sorted([*many, "s-0.tar", "s-1.tar", "s-2.tar"])


def test_the_bytes_do_not_depend_on_shards_nor_on_their_indexes(program: Any, many: list[str]) -> None:
    assert program("cat", *many, "-o", "all.tar").code == 0
    assert program("shuffle", *many, "-o", "o-0.tar").code == 0
    assert program("shuffle", "all.tar", "-o", "o-1.tar").code == 0
    assert program("index", "all.tar").code == 0
    assert program("shuffle", "all.tar", "-o", "o-2.tar").code == 0
    assert Path("o-0.tar").read_bytes() == Path("o-1.tar").read_bytes() == Path("o-2.tar").read_bytes()
    assert program("shuffle", *many, "-o", "other.tar", "--seed", "1").code == 0
    assert sorted(read("other.tar")) == sorted(read("o-0.tar"))
    assert keys("other.tar") != keys("o-0.tar")


def test_every_target_and_every_store(program: Any, shards: list[str]) -> None:
    assert program("shuffle", *shards, "-o", "o.tar").code == 0
    whole = Path("o.tar").read_bytes()
    assert program("shuffle", *shards, "-o", "pipe:cat > piped.tar").code == 0
    assert Path("piped.tar").read_bytes() == whole
    assert program("shuffle", *shards, "-o", "memory://shuffled/x-%d.tar").code == 0
    assert read("memory://shuffled/x-0.tar") == read("o.tar")
    assert program("sort", "memory://shuffled/x-0.tar", "-o", "back.tar.gz").code == 0
    assert read("back.tar.gz") == read(*shards)


@pytest.mark.parametrize("source", ["-", "pipe:cat a-1.tar", "z.tar.gz"])
def test_a_shard_without_random_access_is_refused(program: Any, shards: list[str], source: str) -> None:
    assert program("cat", "a-1.tar", "-o", "z.tar.gz").code == 0
    for command in ("shuffle", "sort"):
        for more in ([], ["--skip-bad"]):
            done = program(command, "a-0.tar", source, "-o", "o.tar", *more)
            assert (done.code, done.out) == (2, "")
            assert done.err.startswith(f"Error: {source} is compressed or has no random access")
            assert "Write it to an uncompressed file first, for example with wds-datapipes cat" in done.err
    assert not Path("o.tar").exists()


def test_shards_of_a_web_server_are_read_by_ranges(program: Any, many: list[str], nginx: Any) -> None:
    if not nginx.is_running:
        nginx.start()
    (nginx.files / "shuffled").mkdir()
    for name in many:
        shutil.copy(name, nginx.files / "shuffled")
    assert program("shuffle", *many, "-o", "here.tar").code == 0
    for place in ("", "whole/"):
        done = program("shuffle", f"http://127.0.0.1:{nginx.http}/{place}shuffled/m-{{0..4}}.tar", "-o", "there.tar")
        assert ("is compressed or has no random access" in done.err) is bool(place)
        assert done.code == (2 if place else 0)
    assert Path("there.tar").read_bytes() == Path("here.tar").read_bytes()


def test_shards_have_indexes_new_keys_and_facts(program: Any, shards: list[str]) -> None:
    arguments = ["--index", "--json", "--rekey", "{shard}/{number:03d}", "--maxcount", "8"]
    facts = json.loads(program("shuffle", *shards, *arguments).out)
    assert [(shard["url"], shard["samples"]) for shard in facts["shards"]] == [
        ("shuffle-000000.tar", 8),
        ("shuffle-000001.tar", 4),
    ]
    for shard in facts["shards"]:
        check_index(read_index(f"{shard['url']}.wdsidx"), shard["url"], depth="headers")
    found = keys("shuffle-000000.tar", "shuffle-000001.tar")
    assert sorted(found) == [f"a-{number // 4}/{number:03d}" for number in range(12)] != found


def test_shuffled_shards_can_be_sorted_back(program: Any, many: list[str]) -> None:
    assert program("shuffle", *many, "-o", "s.tar", "--rekey", "{number:06d}/{key}").code == 0
    assert program("sort", "s.tar", "-o", "back.tar").code == 0
    assert [(key.partition("/")[2], fields) for key, fields in read("back.tar")] == read(*many)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("-o a-%d.tar", 2, "'a-%d.tar' may overwrite 'a-0.tar', which is an input"),
        ("-o none/s-%d.tar", 1, "there is no folder 'none'"),
        ("-o none/s.tar", 1, "there is no folder 'none'"),
        ("--maxsize much", 2, "--maxsize must be"),
        ("--rekey {shard}", 2, "makes the same key for all samples"),
        ("-o - --json", 2, "cannot both go to standard output"),
        ("-o pipe:false", 1, "The command 'false'"),
        ("-o - --index", 2, "has no folder for sidecar files"),
        ("--compress rar", 2, "rar"),
        ("none.tar", 2, "There is no file 'none.tar'"),
        ("a-0.tar", 1, "The sample '00' occurs twice, the second time in a-0.tar, and"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(
    program: Any, shards: list[str], arguments: str, code: int, message: str
) -> None:
    before = {name: Path(name).read_bytes() for name in shards}
    for command in ("shuffle", "sort"):
        done = program(command, "a-{0..2}.tar", *arguments.split())
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith("Error: ")
        assert message in done.err
        assert done.err.count("\n") == 1
        assert ("twice" in message) is ("--rekey" in done.err and code == 1)
        assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_bad_shard_is_reported_before_anything_is_written(program: Any, shards: list[str]) -> None:
    Path("a-1.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    done = program("shuffle", *shards, "--maxcount", "1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: a-1.tar ends at byte 4000")
    assert names() == shards
    done = program("shuffle", *shards, "a-0.tar", "none.tar", "-o", "o.tar", "--skip-bad")
    assert done.code == 0
    assert sorted(keys("o.tar")) == ["00", "01", "02", "03", "10", "20", "21", "22", "23"]
    told = sorted(line.split(": ")[1] for line in done.err.splitlines())
    assert told == [*["EncodeError"] * 4, "ShardOpenError", "TruncatedShardError"]


def test_an_unwritable_key_is_reported_before_anything_is_written(program: Any, folder: Path) -> None:
    build_shard("x.tar", [{"__key__": f"{name}/{name}", "txt": "x"} for name in ("abcd", "efgh")])
    build_shard("y.tar", [{"__key__": "v1.0/a", "txt": "x"}])
    done = program("sort", "x.tar", "y.tar", "--rekey", "{key:.4}", "--maxcount", "1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: The key 'v1.0' cannot be written")
    assert names() == ["x.tar", "y.tar"]
    assert program("sort", "x.tar", "y.tar", "--rekey", "{key:.4}", "-o", "o.tar", "--skip-bad").code == 0
    assert keys("o.tar") == ["abcd", "efgh"]


def test_numbers_may_be_those_of_folders(program: Any, shards: list[str]) -> None:
    Path("part-0").mkdir()
    assert program("shuffle", *shards, "-o", "part-%d/x.tar").code == 0
    assert sorted(keys("part-0/x.tar")) == keys(*shards)


def test_an_archive_is_shuffled_in_place(program: Any, shards: list[str]) -> None:
    before = read("a-0.tar")
    assert program("shuffle", "a-0.tar", "-o", "a-0.tar", "--seed", "1").code == 0
    assert sorted(read("a-0.tar")) == before != read("a-0.tar")


def test_a_full_disk_leaves_nothing_incomplete(program: Any, many: list[str], nothing_left: None) -> None:
    sizes = sum(Path(name).stat().st_size for name in many)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes // 2, before[1]))
    try:
        done = program("shuffle", *many, "-o", "o.tar")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: The shard 'o.tar'")
    assert "File too large" in done.err
    assert names() == many


def test_memory_does_not_grow_with_the_size_of_samples(folder: Path) -> None:
    """A process shuffles next to nothing, and then 40 MB; its peak memory is reported after each."""
    data = random.Random(0).randbytes(1 << 20)
    for shard in range(4):
        build_shard(
            f"l-{shard}.tar",
            [{"__key__": f"{shard}-{n:03d}", "bin": data[n * 1000 : n * 1000 + 40_000 + n]} for n in range(250)],
        )
    build_shard("s.tar", [{"__key__": "x", "bin": b"x"}])
    script = str(Path(__file__).with_name("peak_memory.py"))
    little, much = ["shuffle", "s.tar", "-o", "s.out"], ["shuffle", "l-*.tar", "-o", "l.out"]
    done = subprocess.run([sys.executable, script, *little, "--", *much], capture_output=True, text=True, check=True)
    least, found = map(int, done.stderr.split())
    assert len(keys("l.out")) == 1000
    assert found - least < 28_000_000  # of 40 MB; what the allocator keeps differs


def test_ctrl_c_leaves_nothing(program: Any, many: list[str], nothing_left: None) -> None:
    """The signal comes from a command, to this process, while it writes."""
    # Not $PPID, which is the process that ends the shell along with this one.
    target = f"pipe:head -c 100000 > /dev/null; kill -INT {os.getpid()}; sleep 60"
    done = program("shuffle", *many, "-o", target)
    assert (done.code, done.out, done.err) == (130, "", "Interrupted\n")
    assert names() == many


def test_a_terminal_shows_each_pass(folder: Path) -> None:
    for number in range(3):
        build_shard(f"b-{number}.tar", [{"__key__": f"{number}-{n}", "bin": bytes(9000)} for n in range(200)])
    target = "pipe:dd of=o.tar bs=1M count=1 iflag=fullblock status=none; sleep 0.2; cat >> o.tar"
    first, second = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    running = subprocess.Popen(
        [sys.executable, "-m", "wds_datapipes", "shuffle", "b-0.tar", "b-1.tar", "b-2.tar", "-o", target],
        stdin=subprocess.DEVNULL,
        stdout=second,
        stderr=second,
        env=environment,
    )
    os.close(second)
    said = b""
    try:
        while chunk := os.read(first, 1 << 16):
            said += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(first)
    assert running.wait(timeout=600) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert re.search(r"Indexing \S+ +\d/3 +shards", text)
    assert re.search(r"Copying \S+ +\d+/600 +samples +[\d,]+ samples/s +[\d.]+ [kM]B/s", text)
    assert text.endswith(f"{redact(target)}: 600 samples, 5.84 MB\r\n")
