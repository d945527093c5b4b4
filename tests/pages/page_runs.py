"""Runs the blocks of code in a page of the documentation, and compares their output.

The tabs of a page are alternatives: each runs as a script of its own, with the blocks that are in no tab.
"""

from __future__ import annotations

import atexit
import doctest
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from page_blocks import CAPTION, FILE, ROOT, Block, blocks_of, tabs_of

#: Pages and tabs with packages that only some sessions of `peers` install, or that take longer than the others.
PAGES_OF_PEERS = {
    "dali": ["docs/how-to/feed-dali.md"],
    "nodes": ["docs/how-to/checkpoint-in-the-middle-of-an-epoch.md: torchdata.nodes"],
    "ray": ["docs/how-to/preprocess-on-other-hosts.md"],
    "trainers": [
        "docs/how-to/find-the-bottleneck.md: Weights & Biases",
        "docs/how-to/find-the-bottleneck.md: TensorBoard",
        "docs/how-to/find-the-bottleneck.md: Prometheus",
        "docs/how-to/train-with-a-trainer.md: Lightning",
        "docs/how-to/train-with-a-trainer.md: Accelerate",
        "docs/how-to/train-with-a-trainer.md: Trainer of Hugging Face",
        "docs/how-to/train-with-a-trainer.md: Ray Train",
    ],
}
#: The page that shows how to write the shards that many pages read.
EXAMPLE = "examples.md"
#: Printed at the end of each block, to assign output to blocks.
MARK = "\x1e"


def scripts_of(page: Path) -> list[str]:
    """Return the names of the scripts of a page: its path, and one for each of its tabs: `README.md: A tab`."""
    name = page.relative_to(ROOT).as_posix()
    return [f"{name}: {tab}" if tab else name for tab in tabs_of(page.read_text("utf-8"))]


def run_script(name: str, folder: Path, programs: Path | None = None) -> None:
    """Run a script of a page in a folder, as `run_page` does."""
    page, _, tab = name.partition(": ")
    run_page((ROOT / page).read_text("utf-8"), folder, programs, tab)


def script_of(blocks: list[Block]) -> str:
    """Return a script that runs the blocks in order, with the line numbers of the page."""
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
    """Return the expected output by the number of the block that prints it, counting only blocks that run."""
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
    """Return variables with which commands of this environment are found, and torchrun prints no notice."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run_page(text: str, folder: Path, programs: Path | None = None, tab: str = "") -> None:
    """Run a page with one of its tabs in a folder, and compare its output.

    If the page asks its readers to write the shards that many pages read, the folder contains them.
    """
    if f"{EXAMPLE}#example-shards" in text:
        shutil.copytree(_example_shards(), folder / "data")
    blocks = [block for block in blocks_of(text) if block.tab in ("", tab)]
    for block in blocks:
        if (file := FILE.fullmatch(block.kind)) and (caption := CAPTION.match(block.text)):
            text = block.text[caption.end() :]
            if included := file["included"]:
                source = ROOT / "docs" / included.lstrip("/")
                assert source.is_file(), f"line {block.line}: there is no file {included} in docs/"
                text = source.read_text(encoding="utf-8")
            (folder / caption[1]).write_text(text, encoding="utf-8")
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


@functools.cache
def _example_shards() -> Path:
    """Return a folder with the shards, which exists until this process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([sys.executable, ROOT / "docs/examples/example_shards.py"], cwd=folder, check=True)
    return folder / "data"
