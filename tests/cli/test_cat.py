"""The command ``cat``."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.index import build_index, check_index, read_index
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import last_dot
from wds_datapipes.shards.loading import read_shards
from wds_datapipes.testing import build_shard

Read = list[tuple[str, dict[str, bytes]]]


def read(*urls: str, **options: Any) -> Read:
    """The samples of shards, with their fields."""
    samples = group_samples(read_shards(urls), **options)
    return [(sample["__key__"], {f: v for f, v in sample.items() if f[:2] != "__"}) for sample in samples]


def keys(*urls: str) -> list[str]:
    return [key for key, _ in read(*urls)]


def test_shards_are_merged_as_they_are(program: Any, shards: list[str]) -> None:
    done = program("cat", "a-{2..0}.tar", "-o", "all.tar")
    assert (done.code, done.err) == (0, "")
    assert read("all.tar") == read(*reversed(shards))
    assert done.out == "all.tar: 12 samples, 25.1 kB\n"


@pytest.mark.parametrize("field", ["jpg", "json", "npy", "pyd", "jpg.gz"])
def test_bytes_stay_whatever_they_are(program: Any, folder: Path, field: str) -> None:
    data = random.Random(0).randbytes(70_000)
    build_shard("raw.tar", [{"__key__": "a", field: data}])
    assert program("cat", "raw.tar", "-o", "copy.tar.gz").code == 0
    assert read("copy.tar.gz") == [("a", {field: data})]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--slice 3:6", ["03", "10", "11"]),
        ("--slice ::5", ["00", "11", "22"]),
        ("--slice 10:", ["22", "23"]),
        ("--slice 8:100:3", ["20", "23"]),
        ("--rekey {number:03d} --slice 5:7", ["000", "001"]),
        ("--rekey {shard}/{name} --slice 4:5", ["a-1/10"]),
        ("--rekey x{key} --slice 4:5", ["x10"]),
        ("--sample 0", []),
        ("--sample 1", [f"{s}{n}" for s in range(3) for n in range(4)]),
    ],
)
def test_samples_are_selected_and_renamed(program: Any, shards: list[str], arguments: str, expected: list[str]) -> None:
    assert program("cat", "a-{0..2}.tar", "-o", "o.tar", *arguments.split()).code == 0
    assert keys("o.tar") == expected


def test_a_share_of_the_samples_is_drawn_by_a_seed(program: Any, folder: Path) -> None:
    build_shard("many.tar", [{"__key__": f"{n:04d}", "txt": "x"} for n in range(1000)])

    def drawn(seed: int) -> list[str]:
        program("cat", "many.tar", "-o", "o.tar", "--sample", "0.3", "--seed", str(seed))
        return keys("o.tar")

    assert 240 < len(drawn(1)) < 360
    assert drawn(1) == drawn(1) != drawn(2)


def test_fields_are_selected_and_renamed(program: Any, shards: list[str]) -> None:
    assert program("cat", "a-1.tar", "-o", "o.tar", "--select", "cls;label", "-r", "label=cls").code == 0
    assert read("o.tar") == [(f"1{n}", {"label": str(n).encode()}) for n in range(4)]


@pytest.mark.parametrize(("missing", "code", "count"), [("raise", 1, 0), ("skip", 0, 1), ("keep", 0, 2)])
def test_a_missing_field_is_handled_as_requested(
    program: Any, folder: Path, missing: str, code: int, count: int
) -> None:
    build_shard("m.tar", [{"__key__": "a", "txt": "x"}, {"__key__": "b", "txt": "x", "cls": "1"}])
    done = program("cat", "m.tar", "-o", "o.tar", "--select", "cls", "--select", "txt", "--missing", missing)
    assert done.code == code
    assert Path("o.tar").exists() is (code == 0)
    assert count == (len(keys("o.tar")) if code == 0 else 0)


def test_a_number_field_in_the_name_writes_several_shards(program: Any, shards: list[str]) -> None:
    done = program("cat", "a-{0..2}.tar", "-o", "o-%03d.tar", "--maxcount", "5", "--json")
    facts = json.loads(done.out)
    assert [(shard["url"], shard["samples"]) for shard in facts["shards"]] == [
        ("o-000.tar", 5),
        ("o-001.tar", 5),
        ("o-002.tar", 2),
    ]
    assert facts["skipped"] == []
    assert read("o-000.tar", "o-001.tar", "o-002.tar") == read(*shards)
    assert program("cat", "a-0.tar", "-o", "s-%d.tar", "--maxsize", "2.1kB").code == 0
    assert [keys(f"s-{n}.tar") for n in range(3)] == [["00", "01"][:1], ["01"], ["02"]]


def test_every_target_and_every_source(process: Any, program: Any, shards: list[str]) -> None:
    whole = read(*shards)
    data = Path("a-0.tar").read_bytes()
    done = process("cat", "-", "a-1.tar", "pipe:cat a-2.tar", stdin=data)
    assert (done.code, done.err) == (0, "")
    Path("out.tar").write_bytes(done.out)
    assert read("out.tar") == whole
    assert program("cat", *shards, "-o", "pipe:cat > piped.tar").code == 0
    assert read("piped.tar") == whole
    assert program("cat", *shards, "-o", "memory://out/x.tar.gz").code == 0
    assert read("memory://out/x.tar.gz") == whole
    assert program("cat", *shards, "-o", "small.bin", "--compress", "xz").code == 0
    assert Path("small.bin").read_bytes()[:4] == b"\xfd7zX"
    assert read("small.bin") == whole


def test_the_other_key_rule_keeps_dots_in_keys(program: Any, folder: Path) -> None:
    build_shard("d.tar", [{"__key__": "scan-1.25mm", "png": "x"}])
    assert program("cat", "d.tar", "-o", "o.tar", "--key-rule", "last-dot").code == 0
    assert read("o.tar", key_rule=last_dot) == [("scan-1.25mm", {"png": b"x"})]


def test_a_shard_is_repaired_in_place(program: Any, shards: list[str]) -> None:
    before = read("a-0.tar")
    Path("a-0.tar").write_bytes(Path("a-0.tar").read_bytes()[:4000])
    assert program("cat", "a-0.tar", "-o", "a-0.tar").code == 1
    assert Path("a-0.tar").stat().st_size == 4000
    done = program("cat", "a-0.tar", "-o", "a-0.tar", "--skip-bad")
    assert done.code == 0
    assert done.err.startswith("Skipped: TruncatedShardError: a-0.tar ends inside ")
    assert read("a-0.tar") == before[:1]  # the second sample may lack a field


def test_a_repeated_key_is_refused_or_replaced(program: Any, shards: list[str]) -> None:
    done = program("cat", "a-0.tar", "a-0.tar", "-o", "o.tar")
    assert done.code == 1
    assert "--rekey" in done.err
    assert not Path("o.tar").exists()
    done = program("cat", "a-0.tar", "a-0.tar", "-o", "o.tar", "--skip-bad", "--json")
    assert [skipped["kind"] for skipped in json.loads(done.out)["skipped"]] == ["EncodeError"] * 4
    assert keys("o.tar") == ["00", "01", "02", "03"]
    assert program("cat", "a-0.tar", "a-0.tar", "-o", "o.tar", "--rekey", "{number}").code == 0
    assert keys("o.tar") == [str(n) for n in range(8)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--slice 5", 2, "--slice must be START:STOP"),
        ("--slice a:b", 2, "--slice must be START:STOP"),
        ("--slice=-5:", 2, "--slice must be START:STOP"),
        ("--slice ::0", 2, "--slice must be START:STOP"),
        ("--rekey {nummer}", 2, "The key pattern '{nummer}' is invalid: KeyError"),
        ("--rekey {shard}", 2, "makes the same key for all samples"),
        ("--rename x", 2, "--rename must be NEW=OLD"),
        ("--rename X=cls", 2, "--rename must be NEW=OLD"),
        ("--rename y=nope", 1, "the field 'nope' was requested"),
        ("--maxsize much", 2, "--maxsize must be"),
        ("--select ;", 2, "select_fields got ';'"),
        ("-o none/o.tar", 1, "there is no folder 'none'"),
        ("-o pipe:false", 1, "The command 'false'"),
        ("--compress rar", 2, "rar"),
        ("none.tar", 2, "There is no file 'none.tar'"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(
    program: Any, shards: list[str], arguments: str, code: int, message: str
) -> None:
    done = program("cat", "a-0.tar", "-o", "o.tar", *arguments.split())
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("Error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == shards


def test_json_and_an_archive_do_not_mix(program: Any, shards: list[str]) -> None:
    assert program("cat", "a-0.tar", "--json").code == 2


# Processes ---------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "wds_datapipes", *arguments]


def test_ctrl_c_leaves_nothing(shards: list[str]) -> None:
    source = "pipe:cat a-0.tar; touch begun; sleep 600"
    running = subprocess.Popen(
        command("cat", "a-1.tar", source, "-o", "o.tar"), stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        while not Path("begun").exists():
            assert running.poll() is None
            time.sleep(0.02)
        assert list(Path().glob("o.tar.*"))
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=600)
    finally:
        running.kill()
    assert (running.returncode, said) == (130, b"Interrupted\n")
    assert sorted(path.name for path in Path().iterdir()) == [*shards, "begun"]


def test_a_closed_pipe_ends_it_quietly(folder: Path) -> None:
    build_shard("large.tar", [{"__key__": f"{n}", "bin": bytes(100_000)} for n in range(30)])
    line = f"{shlex.join(command('cat', 'large.tar'))} | head -c 100 | sha256sum"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    head = hashlib.sha256(Path("large.tar").read_bytes()[:100]).hexdigest()
    assert done.stdout.split()[0] == head
    assert (done.stderr, done.returncode) == ("", 141)


def in_terminal(*arguments: str) -> tuple[int, str]:
    """Run the program in a terminal, and return its exit code and all output to the terminal."""
    first, second = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    running = subprocess.Popen(
        command(*arguments), stdin=subprocess.DEVNULL, stdout=second, stderr=second, env=environment
    )
    os.close(second)
    told = b""
    try:
        while chunk := os.read(first, 1 << 16):
            told += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(first)
    return running.wait(timeout=600), told.decode()


def test_a_terminal_has_a_bar_and_no_archive(folder: Path) -> None:
    for number in range(3):
        build_shard(f"b-{number}.tar", [{"__key__": f"{number}-{n}", "bin": bytes(9000)} for n in range(200)])
    slow = "pipe:cat b-0.tar; sleep 0.2"
    code, told = in_terminal("cat", slow, "b-1.tar", "b-2.tar", "-o", "o.tar")
    assert code == 0
    assert "Copying" in told
    assert "samples/s" in told
    assert re.search(r"\d [kM]?B/s", told)
    assert told.endswith("o.tar: 600 samples, 5.84 MB\r\n")
    code, told = in_terminal("cat", "b-1.tar")
    assert code == 2
    assert (
        told == "Error: An archive cannot be written to a terminal. Name a file with --output, or write to a pipe\r\n"
    )


def test_the_bytes_are_reproducible_and_tar_reads_them(program: Any, shards: list[str]) -> None:
    for name in ("x.tar.gz", "y.tar.gz"):
        assert program("cat", *shards, "-o", name).code == 0
    assert Path("x.tar.gz").read_bytes() == Path("y.tar.gz").read_bytes()
    with tarfile.open("x.tar.gz") as archive:
        assert len(archive.getnames()) == 24


def test_each_shard_has_its_index(program: Any, shards: list[str]) -> None:
    assert program("cat", *shards, "-o", "o-%d.tar.gz", "--maxcount", "5", "--index").code == 0
    for number in range(3):
        check_index(read_index(f"o-{number}.tar.gz.wdsidx"), f"o-{number}.tar.gz", depth="headers")
    assert program("cat", *shards, "-o", "o.tar", "--index").code == 0
    assert read_index("o.tar.wdsidx").has_same_layout(build_index("o.tar"))
    for target in ("-", "pipe:cat > p.tar"):
        done = program("cat", *shards, "-o", target, "--index")
        assert (done.code, done.out) == (2, "")
        assert "has no folder for sidecar files" in done.err


@pytest.mark.parametrize("pattern", ["a-%d.tar", "./a-%01d.tar", "../{here}/a-%d.tar", "file:{whole}/a-%d.tar"])
def test_shards_being_read_are_not_overwritten(program: Any, shards: list[str], pattern: str) -> None:
    before = {name: Path(name).read_bytes() for name in shards}
    pattern = pattern.format(here=Path.cwd().name, whole=Path.cwd())
    done = program("cat", *shards, "-o", pattern, "--maxcount", "2")
    assert (done.code, done.out) == (2, "")
    assert "may overwrite 'a-0.tar', which is an input" in done.err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_link_to_a_shard_that_is_read_is_followed(program: Any, shards: list[str]) -> None:
    Path("to").mkdir()
    Path("to/link").symlink_to(Path.cwd())
    Path("b-0.tar").symlink_to("a-2.tar")
    assert program("cat", *shards, "-o", "to/link/a-%d.tar").code == 2
    assert program("cat", "b-0.tar", "-o", "a-%d.tar").code == 2
    assert program("cat", "b-0.tar", "-o", "b-%d.tar").code == 2
    assert program("cat", "b-0.tar", "-o", "to/a-%d.tar").code == 0
