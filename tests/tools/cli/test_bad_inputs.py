"""Every command on every kind of bad input: an exit code and one line that names the input; no traceback or output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes.testing import build_shard

#: The commands that read shards, with what makes them quick.
READERS = {
    "ls": "",
    "show": "",
    "cat": "-o out.tar",
    "verify": "--num-workers 0",
    "index": "--num-workers 0",
    "stats": "--num-workers 0",
    "split": "-o out-%d.tar --maxcount 1",
    "shuffle": "-o out.tar",
    "sort": "-o out.tar --by key",
    "map": "-o out/ -c : --num-workers 0 --shard-retries 0",
}


def write_damaged(name: str, data: bytes, at: int, length: int | None = None) -> None:
    """Write a shard, replace bytes of it, and cut it."""
    whole = Path(build_shard(name, [{"__key__": f"{n}", "txt": "text"} for n in range(3)])).read_bytes()
    Path(name).write_bytes((whole[:at] + data + whole[at + len(data) :])[:length])


#: Bad inputs: how each is made, and the name that is given to a command.
BAD: dict[str, Callable[[str], object]] = {
    "missing.tar": lambda name: None,
    "empty.tar": lambda name: Path(name).write_bytes(b""),
    "cut.tar": lambda name: write_damaged(name, b"", 0, 700),
    "damaged.tar": lambda name: write_damaged(name, b"\xff" * 20, 1030),
    "binary.tar": lambda name: Path(name).write_bytes(bytes(range(256)) * 8),
    "cut.tar.gz": lambda name: Path(name).write_bytes(b"\x1f\x8b\x08\x00\x00"),
    "folder/": lambda name: Path(name).mkdir(),
    "loop.tar": lambda name: Path(name).symlink_to(name),
    f"{'n' * 300}.tar": lambda name: None,
    "nosuch://host/a.tar": lambda name: None,
    "http://127.0.0.1:9/a.tar": lambda name: None,
}


def check_said(done: Any, name: str) -> None:
    """Check the code and the messages of a command that failed."""
    assert done.code in (1, 2), done
    said = done.err.splitlines()
    assert all(line.startswith(("Error: ", "Warning: ", "Note: ")) for line in said), said
    assert len([line for line in said if line.startswith("Error: ")]) <= 2, said  # map also counts failed shards
    assert any(each in done.err + done.out for each in (name, *name.split("/"), "out.tar") if each), done


@pytest.mark.parametrize("name", BAD, ids=lambda name: name[-20:])
@pytest.mark.parametrize("command", READERS)
def test_a_bad_shard_is_one_line_and_leaves_no_output(program: Any, folder: Path, command: str, name: str) -> None:
    BAD[name](name)
    remote = ["--timeout", "1", "--retries", "0"] if name.startswith("http") else []
    check_said(program(command, name, *READERS[command].split(), *remote), name)
    assert [path for path in folder.rglob("out*") if not path.is_dir()] == []


@pytest.mark.parametrize("name", ["missing", "empty", "text", "binary"])
@pytest.mark.parametrize("command", ["images", "recipe"])
def test_a_bad_source_of_samples_is_one_line(program: Any, folder: Path, command: str, name: str) -> None:
    if name == "empty":
        Path(name).write_text("") if command == "recipe" else Path(name).mkdir()
    elif name != "missing":
        Path(name).write_bytes(b"just text" if name == "text" else bytes(range(256)))
    done = program("create", command, name, "-o", "out.tar", "--num-workers", "0")
    if done.code:  # a recipe without lines is none
        check_said(done, name)
    assert not list(folder.glob("out*"))
