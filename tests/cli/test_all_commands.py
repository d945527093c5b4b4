"""Properties of all commands: a progress bar in a terminal, and shards in stores."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest

from wds_datapipes.cli import COMMANDS
from wds_datapipes.cli._app import build_program

SLOW = "pipe:cat a-0.tar; sleep 0.3"


def in_terminal(*arguments: str) -> tuple[int, str]:
    """Run the command line in a terminal, and return its exit code and what the terminal shows, without colours."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 70
        try:
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115  this process ends
            os.environ.update(TERM="xterm", COLUMNS="150")
            build_program(COMMANDS)(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    said = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            said += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["create", "recipe", "recipe", "-o", "%d.tar", "--maxcount", "1", "--workers", "1"], "Writing"),
        (["verify", SLOW, "a-1.tar", "--workers", "1"], "Verifying"),
        (["stats", SLOW, "a-1.tar", "--workers", "1"], "Counting"),
        (["map", "a-0.tar", "a-1.tar", "-c", "sleep 0.05", "-o", "out/", "--workers", "0"], "Mapping"),
        (["split", SLOW, "a-1.tar", "-o", "%d.tar", "--maxcount", "3"], "Splitting"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_long_job_has_a_bar_with_samples_and_bytes(shards: list[str], command: list[str], label: str) -> None:
    Path("recipe").write_text("a.txt text:a\nb.txt pipe:sleep 0.3; echo b\nc.txt text:c\n")
    code, shown = in_terminal(*command)
    assert code == 0, shown
    assert re.search(rf"{label} \S+ +\d/\d +shards +\d+ samples +[\d,]+ samples/s +[\d.]+ ([kM]B|B)/s", shown), shown


def test_every_command_reads_and_writes_stores(program: Any, shards: list[str]) -> None:
    store = fsspec.filesystem("memory")

    def run(*arguments: str) -> str:
        done = program(*arguments)
        assert (done.code, done.err) == (0, ""), arguments
        out: str = done.out
        return out

    def facts(*arguments: str) -> Any:
        return json.loads(run(*arguments, "--json"))

    run("split", *shards, "-o", "memory://all/b-%d.tar", "--maxcount", "5", "--index")
    there = "memory://all/b-*.tar"
    assert len(store.glob("/all/b-*.tar")) == len(store.glob("/all/b-*.tar.wdsidx")) == 3
    store.rm("/all/b-1.tar.wdsidx")
    run("index", there, "--manifest", "memory://all/m.json", "--digest", "--workers", "1")
    assert len(store.glob("/all/b-*.tar.wdsidx")) == 3
    assert run("verify", there, "--manifest", "memory://all/m.json", "--digest", "--field", "cls").endswith(
        "no faults\n"
    )
    run("sort", there, "--by", "key", "--reverse", "-o", "memory://all/sorted.tar")
    run("shuffle", "memory://all/sorted.tar", "--seed", "1", "-o", "memory://all/mixed.tar.gz")
    run("cat", "memory://all/mixed.tar.gz", "-o", "memory://all/c-%d.tar", "--maxcount", "7")
    run("map", "memory://all/c-0.tar", "-c", ":", "-o", "memory://all/out/", "--journal", "j", "--workers", "0")
    assert store.cat("/all/out/c-0.tar") == store.cat("/all/c-0.tar")
    run("sort", "memory://all/c-*.tar", "--by", "key", "-o", "back.tar")
    run("cat", *shards, "-o", "whole.tar")
    assert Path("back.tar").read_bytes() == Path("whole.tar").read_bytes()
    local, remote = facts("stats", "whole.tar"), facts("stats", "memory://all/c-*.tar")
    assert remote["samples"] == local["samples"]
    assert run("ls", "memory://all/sorted.tar").splitlines()[0].split()[0] == "23"
    assert "jpg" in run("show", "memory://all/sorted.tar")


@pytest.mark.parametrize(("word", "expected"), [("sh", ["show", "shuffle"]), ("ver", ["verify"])])
def test_the_shell_completes_commands(word: str, expected: list[str]) -> None:
    code = "import sys; sys.argv[0] = 'wds-datapipes'; from wds_datapipes.cli import main; main()"
    asked = {"_WDS_DATAPIPES_COMPLETE": "complete_bash", "COMP_WORDS": f"wds-datapipes {word}", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, expected)
