"""Every command on every kind of bad input: a code, one line that names the input, no traceback and no output."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from wds_datapipes.cli import COMMANDS
from wds_datapipes.cli._app import build_program
from wds_datapipes.testing import build_shard

#: The commands that read shards, with what makes them quick.
READERS = {
    "ls": "",
    "show": "",
    "cat": "-o out.tar",
    "verify": "--workers 1",
    "index": "--workers 1",
    "stats": "--workers 1",
    "split": "-o out-%d.tar --maxcount 1",
    "shuffle": "-o out.tar",
    "sort": "-o out.tar --by key",
    "map": "-o out/ -c : --workers 0 --shard-retries 0",
}


def write_shard(name: str) -> bytes:
    return Path(build_shard(name, [{"__key__": f"{n}", "txt": "text"} for n in range(3)])).read_bytes()


def make_cut(name: str) -> None:
    whole = write_shard(name)
    Path(name).write_bytes(whole[:700])


def make_damaged(name: str) -> None:
    whole = write_shard(name)
    Path(name).write_bytes(whole[:1030] + b"\xff" * 20 + whole[1050:])


#: Bad inputs: how each is made, and the name that is given to a command.
BAD: dict[str, Callable[[str], object]] = {
    "missing.tar": lambda name: None,
    "empty.tar": lambda name: Path(name).write_bytes(b""),
    "cut.tar": make_cut,
    "damaged.tar": make_damaged,
    "binary.tar": lambda name: Path(name).write_bytes(bytes(range(256)) * 8),
    "page.tar": lambda name: Path(name).write_text("<html>404 not found</html>" * 60),
    "cut.tar.gz": lambda name: Path(name).write_bytes(b"\x1f\x8b\x08\x00\x00"),
    "folder/": lambda name: Path(name).mkdir(),
    "folder.tar": lambda name: Path(name).mkdir(),
    "file/x.tar": lambda name: Path("file").write_text(""),
    "loop.tar": lambda name: Path(name).symlink_to(name),
    f"{'n' * 300}.tar": lambda name: None,
    "nothing-*.tar": lambda name: None,
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
    before = {path for path in folder.rglob("*") if not path.is_dir()}
    remote = ["--timeout", "1", "--retries", "0"] if name.startswith("http") else []
    check_said(program(command, name, *READERS[command].split(), *remote), name)
    left = {path.name for path in folder.rglob("*") if not path.is_dir()} - {path.name for path in before}
    assert not [each for each in left if each.startswith("out")], left


@pytest.mark.parametrize("name", ["missing", "empty", "text", "binary"])
@pytest.mark.parametrize("command", ["images", "imagenet", "table", "recipe"])
def test_a_bad_source_of_samples_is_one_line(program: Any, folder: Path, command: str, name: str) -> None:
    path = {"table": f"{name}.csv", "recipe": name, "images": name, "imagenet": name}[command]
    if name == "empty":
        Path(path).mkdir() if command in ("images", "imagenet") else Path(path).write_text("")
    elif name != "missing":
        Path(path).write_bytes(b"just text" if name == "text" else bytes(range(256)))
    done = program("create", command, path, "-o", "out.tar", "--workers", "1")
    if done.code == 0:  # a recipe or a table without lines
        assert not list(folder.glob("out*"))
        return
    check_said(done, path)
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nosuch"], "No such option: --nosuch"),
        (["--key-rule", "lastdot"], "'lastdot' is not one of"),
        (["--storage-options", "{"], "--storage-options is not JSON"),
        (["--storage-options", "@none.json"], "--storage-options cannot be read from none.json"),
        (["--timeout", "-3"], "--timeout must be a positive number of seconds"),
        (["--retries", "many"], "--retries"),
    ],
)
def test_a_wrong_option_is_named(program: Any, folder: Path, command: str, arguments: list[str], says: str) -> None:
    write_shard("a.tar")
    done = program(command, "a.tar", *READERS[command].split(), *arguments)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith("Error: ")
    assert says in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lss", "a.tar"], "No such command 'lss'. Did you mean 'ls'?"),
        (["ls"], "Missing argument 'SHARDS'. See wds-datapipes ls --help"),
        (["cat", "a.tar", "-o"], "requires an argument"),
        (["create", "table"], "Missing argument 'TABLE'. See wds-datapipes create table --help"),
        (["ls", "a.tar", "--count", "0"], "'--count'"),
    ],
)
def test_a_wrong_command_is_one_line(program: Any, arguments: list[str], says: str) -> None:
    done = program(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Error: ")
    assert says in done.err
    assert done.err.count("\n") == 1


def test_a_directory_needs_no_slash(program: Any, folder: Path) -> None:
    Path("shards").mkdir()
    write_shard("shards/a.tar")
    assert program("ls", "shards").lines == program("ls", "shards/").lines
    assert len(program("ls", "shards").lines) == 3


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """All commands below one, with their names."""
    below = getattr(command, "commands", {})
    found = [each for name, other in below.items() for each in commands(other, (*path, name))]
    return [(path, command), *found]


ALL = commands(typer.main.get_command(build_program(COMMANDS)))


@pytest.mark.parametrize("words", [words for words, _ in ALL], ids=" ".join)
def test_the_help_has_no_types_of_python(program: Any, words: tuple[str, ...]) -> None:
    for option in ("-h", "--help"):
        done = program(*words, option)
        assert done.code == 0
        for word in ("<bool>", "<str>", "<int", "<float", "<list", "list[", "<path>", "TEXT", "INTEGER", "{SHARDS}"):
            assert word not in done.out, (word, done.out)


def test_a_short_option_has_one_meaning() -> None:
    meanings: dict[str, set[str]] = {}
    for _, command in ALL:
        for each in command.params:
            for short in (name for name in each.opts if len(name) == 2 and name.startswith("-")):
                meanings.setdefault(short, set()).add(each.opts[0])
    assert {short: names for short, names in meanings.items() if len(names) > 1} == {}
    assert {"-f", "-o", "-n", "-V"} <= set(meanings)


def run(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which WDS stands for the program."""
    command = command.replace("WDS", f"{sys.executable} -W ignore -m wds_datapipes")
    return subprocess.run(["bash", "-c", command], env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "code", "out"),
    [
        ("WDS ls a.tar | head -n 1", 0, "0"),
        ("WDS --help > /dev/full", 1, ""),
        ("WDS --help | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("WDS ls a.tar | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("COLUMNS=40 WDS ls --help", 0, "--key-rule"),
        ("COLUMNS=40 WDS --version", 0, "wds-datapipes "),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii WDS ls bär.tar", 0, "b\\xe4r"),
        ("cat a.tar > fifo.tar & WDS ls fifo.tar", 0, "0"),
        (": > fifo.tar & WDS ls fifo.tar", 1, ""),
        ("WDS ls - < /dev/null", 1, ""),
    ],
)
def test_streams_and_terminals(folder: Path, command: str, code: int, out: str) -> None:
    write_shard("a.tar")
    build_shard("bär.tar", [{"__key__": "bär", "txt": b"x"}])
    os.mkfifo("fifo.tar")
    done = run(command)
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done
    assert out in done.stdout


def test_the_version_is_that_of_the_package(program: Any) -> None:
    import wds_datapipes

    assert program("-V").lines == program("--version").lines == [f"wds-datapipes {wds_datapipes.__version__}"]


def test_an_error_of_the_system_is_one_line(program: Any, folder: Path) -> None:
    write_shard("a.tar")
    Path("busy").write_text("")
    done = program("cat", "a.tar", "-o", "busy/out.tar")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert os.strerror(errno.ENOTDIR) in done.err or "busy" in done.err
    assert json.loads(program("stats", "a.tar", "--json").out)["samples"]["number"] == 3
