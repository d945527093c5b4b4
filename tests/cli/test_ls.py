"""The command ``ls``."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

from wds_datapipes.testing import build_shard


def write_members(path: str, *members: tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))


def test_samples_with_their_fields_and_sizes(program: Any, shards: list[str]) -> None:
    done = program("ls", "a-1.tar")
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        "10    2  jpg 1  cls 1",
        "11  102  jpg 101  cls 1",
        "12  202  jpg 201  cls 1",
        "13  302  jpg 301  cls 1",
    ]


def test_several_shards_have_headings(program: Any, shards: list[str]) -> None:
    done = program("ls", "-n", "1", "a-{1..2}.tar")
    assert done.out == "a-1.tar:\n10  2  jpg 1  cls 1\n\na-2.tar:\n20  3  jpg 2  cls 1\n"


def test_a_line_for_each_shard(program: Any, shards: list[str]) -> None:
    build_shard("b.tar.gz", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two", "Seg.PNG": "3"}])
    size = Path("b.tar.gz").stat().st_size
    done = program("ls", "--shards", "a-0.tar", "b.tar.gz")
    assert done.lines == [
        "a-0.tar: 4 samples, 10,240 bytes: jpg, cls",
        f"b.tar.gz: 2 samples, {size} bytes: txt, seg.png (of 1)",
    ]
    facts = json.loads(program("ls", "-s", "--json", "b.tar.gz").out)
    assert facts == {
        "shard": "b.tar.gz",
        "samples": 2,
        "bytes": size,
        "compression": "gzip",
        "fields": {"txt": 2, "seg.png": 1},
        "strays": 0,
    }


def test_facts_of_samples_are_lines_of_json(program: Any, shards: list[str]) -> None:
    facts = [json.loads(line) for line in program("ls", "--json", "a-0.tar", "a-1.tar").lines]
    assert len(facts) == 8
    assert facts[5] == {"shard": "a-1.tar", "key": "11", "offset": 2048, "fields": {"jpg": 101, "cls": 1}}


def test_the_key_rule_can_be_chosen(program: Any, folder: Path) -> None:
    write_members("d.tar", ("v1.5.jpg", b"12"), ("v1.5.cls", b"1"))
    assert program("ls", "d.tar").lines == ["v1  3  5.jpg 2  5.cls 1"]
    assert program("ls", "d.tar", "--key-rule", "last-dot").lines == ["v1.5  3  jpg 2  cls 1"]


def test_names_cannot_write_to_the_terminal(program: Any, folder: Path) -> None:
    write_members("evil.tar", ("\x1b[31mred\n.jpg", b"1"), ("b.\x9bjpg", b"1"))
    done = program("ls", "evil.tar")
    assert "\x1b" not in done.out
    assert len(done.lines) == 2
    assert done.lines[0].startswith(r"\x1b[31mred\x0a  1  jpg 1")


def test_a_broken_shard_is_listed_up_to_the_fault(program: Any, shards: list[str]) -> None:
    Path("a-0.tar").write_bytes(Path("a-0.tar").read_bytes()[:2600])
    done = program("ls", "a-0.tar", "a-1.tar")
    assert done.code == 1
    assert done.out.startswith("a-0.tar:\n00  1  jpg 0  cls 1\n\na-1.tar:\n10 ")
    assert done.err.startswith("Error: a-0.tar ends inside a header, at byte 2600")
    assert done.err.count("\n") == 1


def test_a_missing_shard_is_a_usage_error(program: Any, folder: Path) -> None:
    for arguments, message in [
        (["none.tar"], "There is no file 'none.tar'"),
        (["none*.tar"], "No file matches 'none*.tar'"),
        (["gone://x/a.tar"], "gone"),
        (["a.tar", "--storage-options", "{"], "--storage-options is not JSON"),
    ]:
        done = program("ls", *arguments)
        assert done.code == 2, arguments
        assert done.err.startswith("Error: ")
        assert message in done.err
        assert done.out in ("", "none.tar:\n")


def test_standard_input_and_commands_are_shards(process: Any, program: Any, shards: list[str]) -> None:
    done = process("ls", "-", stdin=Path("a-2.tar").read_bytes())
    assert (done.code, done.out.count(b"\n"), done.err) == (0, 4, "")
    assert program("ls", "pipe:cat a-2.tar").out == done.out.decode()
    assert program("ls", f"file:{Path('a-2.tar').resolve()}").out == done.out.decode()


def test_a_closed_pipe_ends_it_quietly(folder: Path) -> None:
    build_shard("many.tar", [{"__key__": f"{number:06d}", "txt": "x"} for number in range(20_000)])
    command = f"{shlex.quote(sys.executable)} -m wds_datapipes ls many.tar | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("000000  1  txt 1\n", "", 141)
