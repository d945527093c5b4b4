"""Every page of the documentation is a script: its blocks of code are run, and their output is compared.

CONTRIBUTING.md describes what a page may contain.
"""

from __future__ import annotations

import doctest
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import FILE, ROOT, Block, blocks_of
from PIL import Image

from wds_datapipes.cli.demo import demo, write_digits
from wds_datapipes.testing import build_shard

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: A line in the block of a file that is replaced by a file of the repository.
INCLUDED = re.compile(r'^--8<-- "([\w./]+)"\n', re.MULTILINE)
#: Runs programs in processes that need not import torch again, which takes seconds.
SERVER = Path(__file__).with_name("prepared_python.py")
#: Asks the script `SERVER` to run a command, and ends with its exit code. It imports next to nothing.
PROGRAM = """\
#!{python} -ISE
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    asked = {{"command": {command!r}, "argv": sys.argv, "folder": os.getcwd(), "environ": dict(os.environ)}}
    server.sendall(json.dumps(asked).encode())
    server.shutdown(socket.SHUT_WR)
    code = int(server.recv(10))
if code < 0:
    if -code in (signal.SIGINT, signal.SIGPIPE):  # of which Python makes exceptions
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
#: The page whose commands are started as users start them.
STARTED_ANEW = "docs/how-to/cache-shards.md"
#: Printed at the end of each block, to find out which block has printed what.
MARK = "\x1e"


def script_of(blocks: list[Block]) -> str:
    """A script that runs the blocks in their order. Its line numbers are those of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - len(lines))
        if block.kind == "python":
            lines += block.text.splitlines()
        elif block.kind == "console":
            commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
            arguments = ["bash", "-euo", "pipefail", "-c", "\n".join(commands)]
            lines.append(f"import subprocess; subprocess.run({arguments!r}, check=True)")
        else:
            continue
        lines += [""] * (block.line + block.text.count("\n") - len(lines))
        lines.append(f"print({MARK!r}, flush=True)")
    return "\n".join(lines) + "\n"


def expected_of(blocks: list[Block]) -> dict[int, str]:
    """The expected output, by the number of the block that prints it, counted among those that are run."""
    expected: dict[int, str] = {}
    number = -1
    for block in blocks:
        if block.kind in ("python", "console"):
            number += 1
        if block.kind == "console":
            expected[number] = re.sub(r"^\$ .*\n", "", block.text, flags=re.MULTILINE)
        elif block.kind == "text":
            assert number not in expected, f"line {block.line}: there is no block whose output this is"
            expected[number] = block.text
    return expected


def environment() -> dict[str, str]:
    """The commands of this environment are found, and torchrun does not mention the variable that it would set."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with ``page``, which runs a script, and ``wds-datapipes``; neither imports the package again."""
    folder = tmp_path_factory.mktemp("programs")
    address = str(tmp_path_factory.mktemp("server") / "socket")
    for command in ("page", "wds-datapipes"):
        program = folder / command
        program.write_text(PROGRAM.format(python=sys.executable, address=address, command=command))
        program.chmod(0o755)
    arguments: list[str | Path] = [sys.executable, SERVER, address]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield folder
        server.communicate()
    assert server.returncode == 0


def run_page(text: str, folder: Path, programs: Path | None = None) -> None:
    """Run a page in a folder, and compare its output."""
    blocks = blocks_of(text)
    for block in blocks:
        if file := FILE.fullmatch(block.kind):
            for name in INCLUDED.findall(block.text):
                assert (ROOT / name).is_file(), f"line {block.line}: there is no file {name}"
            whole = INCLUDED.sub(lambda included: (ROOT / included[1]).read_text(encoding="utf-8"), block.text)
            (folder / file[1]).write_text(whole, encoding="utf-8")
    script = folder / "page.py"
    script.write_text(script_of(blocks), encoding="utf-8")
    environ = environment()
    finished = subprocess.run(
        [programs / "page" if programs else sys.executable, script.name],
        cwd=folder,
        env={**environ, "PATH": f"{programs}:{environ['PATH']}"} if programs else environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    printed = finished.stdout.split(f"{MARK}\n")
    for number, want in expected_of(blocks).items():
        same = doctest.OutputChecker().check_output(want, printed[number], doctest.ELLIPSIS)
        assert same, f"The page says:\n{want}\nIt prints:\n{printed[number]}"


def write_training_shards(folder: Path) -> None:
    """Create the shards that most pages read."""
    (folder / "data").mkdir()
    for shard in range(4):
        samples: list[dict[str, bytes | str]] = []
        for index in range(8):
            file = io.BytesIO()
            Image.new("L", (8, 8), 8 * index).save(file, "png")
            samples.append({"__key__": f"{shard}-{index}", "png": file.getvalue(), "cls": str(index).encode()})
        build_shard(folder / f"data/train-{shard:03d}.tar", samples)


@pytest.mark.timeout(900)  # some pages start many processes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_runs(page: Path, programs: Path, tmp_path: Path) -> None:
    write_training_shards(tmp_path)
    if page == ROOT / "README.md":  # whose block reads the output of the command above it
        demo_folder = tmp_path / inspect.signature(demo).parameters["output"].default
        demo_folder.mkdir()
        write_digits(demo_folder)
    is_started_anew = page == ROOT / STARTED_ANEW
    run_page(page.read_text(encoding="utf-8"), tmp_path, None if is_started_anew else programs)


def test_the_readme_contains_the_tested_commands() -> None:
    commands = [block.text for block in blocks_of((ROOT / "README.md").read_text("utf-8")) if block.kind == "shell"]
    assert commands == [
        'python -m pip install ".[demo]" -c constraints.txt && wds-datapipes demo\n',
        "python -m pip install nox && nox -s tests\n",
    ]
    assert commands[1].strip() in (ROOT / ".ci/run").read_text("utf-8")


GOOD = """\
```python
name = "page"
print(name)
```
```text
page
```
```console
$ echo 'a  b'
a  b
```
```{ .python title="answer.py" }
answer = 42
```
```python
import answer
print(answer.answer)
```
```text
42
```
"""


def test_a_good_page_passes(tmp_path: Path) -> None:
    run_page(GOOD, tmp_path)


def test_a_prepared_program_behaves_like_a_started_one(programs: Path, tmp_path: Path) -> None:
    run_page(GOOD, tmp_path, programs)
    (tmp_path / "prints.py").write_text(
        "import os, sys\nprint(__name__, sys.argv, os.getcwd(), sys.path[0], os.environ['SET'], sys.stdin.read())\n"
        "print('said', file=sys.stderr)\nimport atexit\natexit.register(print, 'bye')\nexit(len(sys.argv))\n"
    )
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    outcomes = [
        [
            subprocess.run(
                [python, *arguments],
                cwd=tmp_path,
                env={**os.environ, "SET": "so", "PATH": f"{python.parent}:{os.environ['PATH']}"},
                input=b"asked",
                capture_output=True,
                check=False,
            )
            for arguments in (["prints.py", "a", "b c"], ["dies.py"])
        ]
        for python in (Path(sys.executable), programs / "page")
    ]
    printed = [[(each.returncode, each.stdout, each.stderr) for each in done] for done in outcomes]
    assert printed[0] == printed[1]
    assert printed[0][0][0] == 3
    assert printed[0][1] == (-9, b"", b"")


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ('name = "page"', "name = 1 / 0", 'page.py", line 2.*ZeroDivisionError'),
        ("\npage\n", "\npages\n", r"It prints:\s+page"),
        ("\na  b\n", "\nab\n", r"It prints:\s+a  b"),
        ("$ echo 'a  b'", "$ false | true", "CalledProcessError"),
        ("answer = 42", "answer = 41", r"It prints:\s+41"),
        ("answer = 42", '--8<-- "docs/examples/no.py"', "line 12: there is no file docs/examples/no.py"),
        ("```python", "``` python", "line 1: a block is one of"),
        ("```python", "  ```python", "line 1: the blocks of a page are not indented"),
        ("\n```\n```text", "\n```\n\n```text\n```\n```text", "there is no block whose output this is"),
    ],
)
def test_a_bad_page_fails(right: str, wrong: str, text: str, tmp_path: Path) -> None:
    assert right in GOOD
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        run_page(GOOD.replace(right, wrong), tmp_path)
