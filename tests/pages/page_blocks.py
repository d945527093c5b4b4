"""The fenced blocks of code in the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: The kinds of blocks on a page: run in Python, run by bash, compared, and three that are only displayed.
KINDS = {"python", "console", "text", "shell", "", "{eval-rst}"}
FENCE = re.compile(r"^ *(`{3,})(.*)$")
#: The beginning of a tab, which ends at a line with as many colons.
TAB = re.compile(r"^(:{3,}){tab-item} (.+)$")
#: The kinds of blocks that are files: written on the page itself, or included from below `docs/`.
FILE = re.compile(r"{code-block} (?:python|yaml)|{(?:literal)?include} (?P<included>[\w./-]+)")
#: The option with the name of the file, and the empty line after it.
CAPTION = re.compile(r":caption: ([\w.]+)\n\n?")


class Block(NamedTuple):
    """A block of code: its kind, the line where it begins, its content, and the name of the tab that it is in."""

    kind: str
    line: int
    text: str
    tab: str = ""


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = []
    kind, start, lines = "", 0, list[str]()
    tab = colons = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if not start:
            if begun := TAB.match(line):
                colons, tab = begun.groups()
            elif line == colons:
                tab = colons = ""
            elif fence:
                assert line.startswith("```"), f"line {number}: the blocks of a page are not indented"
                kind, start, lines = fence[2], number, []
                assert kind in KINDS or FILE.fullmatch(kind), (
                    f"line {number}: a block is one of {sorted(KINDS)}, not {kind!r}"
                )
        elif line == "```":
            found.append(Block(kind, start, "".join(f"{line}\n" for line in lines), tab))
            start = 0
        else:
            lines.append(line)
    assert not start, f"line {start}: the block does not end"
    return found


def tabs_of(text: str) -> list[str]:
    """The names of the tabs with code that runs, each once; an empty name for a page without tabs."""
    tabs = [block.tab for block in blocks_of(text) if block.tab and block.kind in ("python", "console")]
    return list(dict.fromkeys(tabs)) or [""]
