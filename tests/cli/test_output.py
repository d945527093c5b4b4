"""Standard output that is full, closed, of another encoding, or without a reader: one line, and no traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from wds_datapipes.cli import main
from wds_datapipes.testing import build_shard

FULL = "Error: Standard output cannot be written: No space left on device\n"
CLOSED = "Error: Standard output cannot be written: it is closed\n"


@pytest.fixture
def shard(folder: Path) -> str:
    return build_shard(folder / "b\u00e4r.tar", [{"__key__": "b\u00e4r", "txt": b"x"}])


def run(arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which WDS stands for the program."""
    command = arguments.replace("WDS", f"{sys.executable} -m wds_datapipes")
    return subprocess.run(
        ["bash", "-c", command], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("WDS ls *.tar > /dev/full", 1, FULL),
        ("WDS cat *.tar > /dev/full", 1, FULL),
        ("WDS ls *.tar >&-", 1, CLOSED),
        ("WDS ls *.tar >&- 2>&-", 1, ""),
    ],
)
def test_an_unwritable_output_is_an_error_of_one_line(command: str, code: int, error: str, shard: str) -> None:
    done = run(command)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


def test_a_terminal_of_another_encoding_shows_what_it_can(shard: str) -> None:
    done = run("WDS show *.tar", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sample 0, b\\xe4r, 1 B" in done.stdout


def test_an_archive_goes_to_standard_output_unchanged(shard: str, folder: Path) -> None:
    done = run("WDS cat *.tar | tar tf -")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(".txt") == 1


#: Prints a line; Ctrl-C comes as soon as it is in the file.
INTERRUPTED_PRINT = """
import os, sys
from wds_datapipes.cli._output import guarded_output

def interrupt(*_):
    if os.fstat(1).st_size:
        sys.setprofile(None)
        raise KeyboardInterrupt

try:
    with guarded_output():
        sys.stdout.write("once\\n")
        sys.setprofile(interrupt)
        sys.stdout.flush()
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_between_a_write_and_its_return_repeats_nothing(folder: Path) -> None:
    with open("out.txt", "wb") as file:
        done = subprocess.run([sys.executable, "-c", INTERRUPTED_PRINT], stdout=file, check=False)
    assert done.returncode == 130
    assert Path("out.txt").read_text() == "once\n"


def run_until_interrupt(command: list[str], step: int | None) -> None:
    """Run a command that prints to a file; Ctrl-C comes some steps after its first output is in the file."""
    os.dup2(os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115  as in a new process
    sys.argv = ["wds-datapipes", *command]
    passed = 0

    def interrupt(*_: object) -> None:
        nonlocal passed
        passed += os.fstat(1).st_size > 0
        if passed > step:  # type: ignore[operator]  # it is not None here
            sys.setprofile(None)
            raise KeyboardInterrupt

    if step is not None:
        sys.setprofile(interrupt)
    main()


@pytest.mark.parametrize("command", ["ls a.tar b.tar", "show a.tar b.tar --serve --port 0"])
def test_a_command_interrupted_after_a_print_has_printed_it_once(
    command: str, folder: Path, forked: Callable[[Callable[[], object]], int | None]
) -> None:
    for name in "ab":
        build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "txt": b"x" * n} for n in range(3)])
    whole = None
    if "--serve" not in command:  # which never ends by itself
        assert forked(partial(run_until_interrupt, command.split(), None)) == 0
        whole = Path("out.txt").read_text()
    for step in range(4):
        code = forked(partial(run_until_interrupt, command.split(), step))
        assert code in ((130, 0) if whole else (130,))
        printed = Path("out.txt").read_text()
        if whole is None:
            assert re.fullmatch(r"6 samples at http://127\.0\.0\.1:\d+/ \(Ctrl-C to stop\)\n", printed)
        else:
            assert whole.startswith(printed)


def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, time\nos.write(2, b'importing\\n')\nwhile True:\n    time.sleep(1)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with subprocess.Popen(
        [sys.executable, "-m", "wds_datapipes", "--version"],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT
