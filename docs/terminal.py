"""Draw the terminal in the README: its script is killed, started again, and continues with the same samples.

    PYTHONPATH=.:tests/pages python docs/terminal.py

runs the script in an interactive bash, on the shards of `wds-datapipes demo`, and writes `docs/images/killed.svg`.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from page_blocks import ROOT, blocks_of
from rich.console import Console
from rich.text import Text

from wds_datapipes.tools.cli.demo import write_photographs

PICTURE = ROOT / "docs/images/killed.svg"
#: The script saves a checkpoint every `SAVES` steps, and is killed after printing step `KILLED_AT`.
SAVES, KILLED_AT = 20, 46
#: The file of the picture, whose text has the fonts of the reader.
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}" role="img">
<title>A run that is killed continues with the same samples</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
<rect width="{terminal_width}" height="{terminal_height}" rx="12" fill="#111827"/>
<g transform="translate(9, 9)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def script() -> str:
    """Return the script of the README."""
    return next(each.text for each in blocks_of((ROOT / "README.md").read_text("utf-8")) if each.kind == "python")


def steps(lines: list[str]) -> dict[int, str]:
    """Return what the script has printed, by step."""
    return {int(found[1]): line for line in lines if (found := re.match(r"step +(\d+) ", line))}


def record(folder: Path) -> tuple[list[str], list[str]]:
    """Return what a terminal shows while the script runs and is killed, and once it is started again."""
    (folder / "train.py").write_text(script(), "utf-8")
    program = Path(sys.executable).parent
    environ = {**os.environ, "PS1": "$ ", "PATH": f"{program}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    own, others = pty.openpty()
    command = ["/bin/bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(  # noqa: S603  bash, and the script of the README
        command, cwd=folder, env=environ, stdin=others, stdout=others, stderr=others, start_new_session=True
    ) as bash:
        os.close(others)
        read_until(own, "$ ")
        os.write(own, b"python train.py\n")
        first = read_until(own, f"step {KILLED_AT:3} ")
        [python] = psutil.Process(bash.pid).children()
        python.kill()
        first += read_until(own, "Killed")
        os.write(own, b"python train.py\n")
        second = read_until(own, f"step {SAVES * (KILLED_AT // SAVES) + 12:3} ")
        bash.kill()
    os.close(own)
    return first.splitlines(), second.splitlines()


def read_until(terminal: int, text: str) -> str:
    """Return what a terminal shows until a text appears."""
    found = ""
    while text not in found:
        found += os.read(terminal, 1 << 10).decode()
    return found


def draw(first: list[str], second: list[str]) -> str:
    """Return the picture."""
    before, after = steps(first), steps(second)
    start = min(after)
    console = Console(record=True, width=64, file=io.StringIO(), legacy_windows=False)

    def show(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    show("$ python train.py", "bold white")
    for step in (1, 2):
        show(before[step], "white")
    show("...", "bright_black")
    for step in range(start - 1, start + 3):
        show(before[step], "bold green" if step >= start else "white")
    show("...", "bright_black")
    show(before[max(before)], "white")
    show("Killed", "bold red")
    show("$ python train.py", "bold white")
    for step in range(start, start + 3):
        show(after[step], "bold green")
    show("...", "bright_black")
    show("")
    return console.export_svg(code_format=SVG, unique_id="killed")


def main() -> None:
    """Run the script, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        demo_folder = Path(folder, "wds-datapipes-demo")
        demo_folder.mkdir()
        write_photographs(demo_folder)
        first, second = record(Path(folder))
    PICTURE.write_text(draw(first, second), "utf-8")


if __name__ == "__main__":
    main()
