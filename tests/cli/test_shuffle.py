"""The command ``shuffle``, and what ``sort`` shares with it."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import check_index, read_index
from wds_datapipes.prepare.reorder.sort_key import RandomSortKey
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


def test_all_samples_are_there_in_the_order_that_is_drawn(program: Any, many: list[str]) -> None:
    before = read(*many)
    done = program("shuffle", "m-*.tar", "--seed", "5", "--maxcount", "110", "-o", "s-%d.tar")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"(s-\d.tar: (110|80) samples, [\d.]+ [kM]B\n){3}", done.out)
    order = sorted(range(300), key=RandomSortKey(5))
    assert read("s-0.tar", "s-1.tar", "s-2.tar") == [before[place] for place in order]
    assert names() == sorted([*many, "s-0.tar", "s-1.tar", "s-2.tar"])


def test_the_bytes_do_not_depend_on_memory_nor_on_shards(program: Any, many: list[str]) -> None:
    assert program("cat", *many, "-o", "all.tar.gz").code == 0
    whole = []
    for number, (source, memory) in enumerate(
        [("m-*.tar", "1GB"), ("m-*.tar", "300kB"), ("m-*.tar", "20kB"), ("m-*.tar", "1"), ("all.tar.gz", "100kB")]
    ):
        target = f"o-{number}.tar"
        assert program("shuffle", source, "-o", target, "--memory", memory, "--tmp", ".").code == 0
        whole.append(Path(target).read_bytes())
    assert whole == whole[:1] * 5
    assert names() == sorted([*many, "all.tar.gz", *(f"o-{number}.tar" for number in range(5))])
    assert program("shuffle", "m-*.tar", "-o", "other.tar", "--seed", "1").code == 0
    assert sorted(read("other.tar")) == sorted(read("o-0.tar"))
    assert keys("other.tar") != keys("o-0.tar")


def test_every_target_and_every_source(process: Any, program: Any, shards: list[str]) -> None:
    assert program("shuffle", *shards, "-o", "o.tar").code == 0
    whole = Path("o.tar").read_bytes()
    done = process("shuffle", "-", "a-1.tar", "pipe:cat a-2.tar", "-o", "-", stdin=Path("a-0.tar").read_bytes())
    assert (done.code, done.out, done.err) == (0, whole, "")
    assert program("shuffle", *shards, "-o", "pipe:cat > piped.tar").code == 0
    assert Path("piped.tar").read_bytes() == whole
    assert program("shuffle", *shards, "-o", "memory://shuffled/x-%d.tar", "--memory", "1kB").code == 0
    assert read("memory://shuffled/x-0.tar") == read("o.tar")
    assert program("sort", "memory://shuffled/x-0.tar", "-o", "back.tar.gz").code == 0
    assert read("back.tar.gz") == read(*shards)


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


def test_what_was_shuffled_can_be_sorted_back(program: Any, many: list[str]) -> None:
    assert program("shuffle", *many, "-o", "s.tar", "--rekey", "{number:06d}/{key}").code == 0
    assert program("sort", "s.tar", "-o", "back.tar").code == 0
    assert [(key.partition("/")[2], fields) for key, fields in read("back.tar")] == read(*many)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("-o a-%d.tar", 2, "'a-0.tar' is read, and 'a-%d.tar' may be written over it"),
        ("-o none/s-%d.tar", 1, "there is no folder 'none'"),
        ("-o none/s.tar", 1, "there is no folder 'none'"),
        ("--tmp none", 1, "Nothing can be written to 'none': No such file or directory"),
        ("--memory 0", 2, "--memory is a number of bytes above 0"),
        ("--maxsize much", 2, "--maxsize is a number of bytes"),
        ("--rekey {shard}", 2, "would be the same for all samples"),
        ("-o - --json", 2, "cannot both go to standard output"),
        ("-o pipe:false", 1, "The command 'false'"),
        ("-o - --index", 2, "has no folder for files next to it"),
        ("--compress rar", 2, "rar"),
        ("none.tar", 2, "There is no file 'none.tar'"),
        ("a-0.tar", 1, "The sample '00' comes twice, the second time from a-0.tar, and"),
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


def test_a_bad_shard_is_told_before_anything_is_written(program: Any, shards: list[str]) -> None:
    Path("a-1.tar").write_bytes(Path("a-1.tar").read_bytes()[:4000])
    done = program("shuffle", *shards, "--memory", "1kB", "--maxcount", "1")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("Error: a-1.tar ends at byte 4000")
    assert names() == shards
    done = program("shuffle", *shards, "a-0.tar", "none.tar", "--memory", "1kB", "-o", "o.tar", "--skip-bad")
    assert done.code == 0
    assert sorted(keys("o.tar")) == ["00", "01", "02", "03", "10", "20", "21", "22", "23"]
    told = sorted(line.split(": ")[1] for line in done.err.splitlines())
    assert told == ["ShardOpenError", "TruncatedShardError", *["UnwritableSampleError"] * 4]


def test_a_key_that_cannot_be_written_is_told_before_anything_is(program: Any, folder: Path) -> None:
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


def test_an_archive_is_shuffled_in_its_place(program: Any, shards: list[str]) -> None:
    before = read("a-0.tar")
    assert program("shuffle", "a-0.tar", "-o", "a-0.tar", "--seed", "1").code == 0
    assert sorted(read("a-0.tar")) == before != read("a-0.tar")


def test_room_is_asked_for_before_a_shard_is_read(
    program: Any, many: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is that of this machine, and what it says of its room is not."""
    sizes = sum(Path(name).stat().st_size for name in many)
    room = sizes * 3 // 2
    real = os.statvfs

    def said(path: Any) -> Any:
        facts = list(real(path))
        facts[1], facts[4] = 1, room  # bytes, of which so many are free
        return os.statvfs_result(facts)

    monkeypatch.setattr(os, "statvfs", said)
    here = str(Path.cwd())
    for tmp, told in ((".", f"'.' and '{here}'"), (here, f"'{here}'")):
        done = program("shuffle", *many, "--memory", "1MB", "--tmp", tmp)
        assert done.code == program("shuffle", *many, "-o", "x.tar", "--memory", "1MB", "--tmp", tmp).code == 1
        assert f"At least {2 * sizes} bytes will be written to {told}, and the disk has" in done.err
        assert done.err.endswith("Name a folder on another disk with --tmp, or with --output\n")
    assert names() == many
    assert program("shuffle", *many, "-o", "pipe:cat > piped.tar", "--memory", "1MB", "--tmp", ".").code == 0
    assert program("shuffle", *many, "-o", "x.tar.gz", "--memory", "1MB", "--tmp", ".").code == 0
    assert program("shuffle", *many, "-o", "x.tar", "--tmp", ".").code == 0  # with the memory for all


@pytest.mark.parametrize("limit", ["temporary", "output"])
def test_a_full_disk_leaves_nothing_half(program: Any, many: list[str], limit: str, nothing_left: None) -> None:
    sizes = sum(Path(name).stat().st_size for name in many)
    most = sizes // 2 if limit == "temporary" else sizes * 98 // 100  # a file of runs is smaller than an archive
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        done = program("shuffle", *many, "-o", "o.tar", "--memory", "200kB", "--tmp", ".")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (done.code, done.out) == (1, "")
    told = {
        "temporary": "Error: The temporary file in '.' cannot be written, after",
        "output": "Error: The shard 'o.tar'",
    }
    assert done.err.startswith(told[limit])
    assert "File too large" in done.err
    assert names() == many


def test_memory_is_bounded(folder: Path) -> None:
    """A process shuffles next to nothing, and then 40 MB with 4 MB; its peak is told after each."""
    data = random.Random(0).randbytes(1 << 20)
    for shard in range(4):
        build_shard(
            f"l-{shard}.tar",
            [{"__key__": f"{shard}-{n:03d}", "bin": data[n * 1000 : n * 1000 + 40_000 + n]} for n in range(250)],
        )
    build_shard("s.tar", [{"__key__": "x", "bin": b"x"}])
    script = str(Path(__file__).with_name("peak_memory.py"))
    little = ["shuffle", "s.tar", "-o", "s.out"]
    much = ["shuffle", "l-*.tar", "-o", "l.out", "--memory", "4MB"]
    done = subprocess.run([sys.executable, script, *little, "--", *much], capture_output=True, text=True, check=True)
    least, found = map(int, done.stderr.split())
    assert len(keys("l.out")) == 1000
    assert 2_000_000 < found - least < 20_000_000


@pytest.mark.parametrize("where", ["reading", "writing"])
def test_ctrl_c_leaves_nothing(program: Any, many: list[str], where: str, nothing_left: None) -> None:
    """The signal comes from a command, to this process, at a moment when a temporary file is there."""
    Path("tmp").mkdir()
    # Not $PPID, which is the process that ends the shell with this one.
    interrupting = f'ls -l /proc/{os.getpid()}/fd | grep -o "$PWD/tmp/.*" > seen; kill -INT {os.getpid()}; sleep 60'
    source, target = many[-1], "o.tar"
    if where == "reading":
        source = f"pipe:cat {source}; {interrupting}"
    else:
        target = f"pipe:head -c 100000 > /dev/null; {interrupting}"
    done = program("shuffle", *many[:-1], source, "-o", target, "--memory", "100kB", "--tmp", "tmp")
    assert (done.code, done.out, done.err) == (130, "", "Interrupted\n")
    assert Path("seen").read_text().endswith("(deleted)\n")
    assert names() == sorted([*many, "seen", "tmp"])
    assert os.listdir("tmp") == []


def test_a_terminal_tells_the_passes_apart(folder: Path) -> None:
    for number in range(3):
        build_shard(f"b-{number}.tar", [{"__key__": f"{number}-{n}", "bin": bytes(9000)} for n in range(200)])
    slow = "pipe:cat b-0.tar; sleep 0.2"
    target = "pipe:dd of=o.tar bs=1M count=1 iflag=fullblock status=none; sleep 0.2; cat >> o.tar"
    first, second = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    running = subprocess.Popen(
        [sys.executable, "-m", "wds_datapipes.cli", "shuffle", slow, "b-1.tar", "b-2.tar", "-o", target],
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
    assert running.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert re.search(r"Reading, 1 of 2 \S+ +\d/3 +shards +\d+ samples +[\d,]+ samples/s +[\d.]+ [kM]B/s", text)
    assert re.search(r"Writing, 2 of 2 \S+ +\d+/600 +samples +[\d,]+ samples/s +[\d.]+ [kM]B/s", text)
    assert text.endswith(f"{target}: 600 samples, 5.84 MB\r\n")
