"""The fenced blocks of code in the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: The kinds of blocks on a page: run in Python, run by bash, compared, and three that are only displayed.
KINDS = {"python", "console", "text", "shell", "", "{eval-rst}"}
FENCE = re.compile(r"^ *(`{3,})(.*)$")
#: The kinds of blocks that are files: written on the page itself, or included from below `docs/`.
FILE = re.compile(r"{code-block} (?:python|yaml)|{(?:literal)?include} (?P<included>[\w./-]+)")
#: The option with the name of the file, and the empty line after it.
CAPTION = re.compile(r":caption: ([\w.]+)\n\n?")


class Block(NamedTuple):
    """A block of code: its kind, the line where it begins, and its content."""

    kind: str
    line: int
    text: str


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = []
    kind, start, lines = "", 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if not start:
            if fence:
                assert line.startswith("```"), f"line {number}: the blocks of a page are not indented"
                kind, start, lines = fence[2], number, []
                assert kind in KINDS or FILE.fullmatch(kind), (
                    f"line {number}: a block is one of {sorted(KINDS)}, not {kind!r}"
                )
        elif line == "```":
            found.append(Block(kind, start, "".join(f"{line}\n" for line in lines)))
            start = 0
        else:
            lines.append(line)
    assert not start, f"line {start}: the block does not end"
    return found
