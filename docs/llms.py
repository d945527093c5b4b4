"""`llms.txt`, the list of pages for coding agents, and the text of each page, with the programs that it includes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
TOCTREE = re.compile(r"^(?P<colons>:{3,})\{toctree\}\n(?P<lines>.*?)^(?P=colons)$", re.DOTALL | re.MULTILINE)
INCLUDED = re.compile(r"^```\{literalinclude\} /(\S+)\n:caption: (\S+)\n(?::.*\n)*```$", re.MULTILINE)
APPENDED = re.compile(r"^```\{include\} (\S+)\n(?::.*\n)*```$", re.MULTILINE)
LINK = re.compile(r"!?\[((?:[^][]|\[[^]]*\])*)\]\([^)]*\)")
#: The length up to which a first sentence says little.
SHORT = 60
#: Pages without a text of their own: the site has the docstrings that they show.
AUTODOC = "{eval-rst}"


class Page(NamedTuple):
    """A page: its name without an ending, its depth below the first page, its title, and its first sentence."""

    name: str
    depth: int
    title: str
    summary: str
    text: str

    @property
    def address(self) -> str:
        """Where its text is, relative to `llms.txt`."""
        has_text = (DOCS / f"{self.name}.md").exists() and AUTODOC not in self.text
        return f"{self.name}.md" if has_text else f"{self.name}.html"


def pages(name: str = "index", depth: int = 0) -> Iterator[Page]:
    """Yield a page, and then those of its tables of contents."""
    text = text_of(name)
    title = re.findall(r"^# (.+)$", text, re.MULTILINE)
    yield Page(name, depth, LINK.sub(r"\1", title[0]) if title else name, summary_of(text), text)
    for tree in TOCTREE.finditer(text):
        for line in tree["lines"].splitlines():
            if line and not line.startswith(":"):
                yield from pages((Path(name).parent / line).as_posix(), depth + 1)


def text_of(name: str) -> str:
    """Return the text of a page or of a notebook, with the programs that it includes."""
    page = DOCS / f"{name}.md"
    if page.exists():
        text = APPENDED.sub(
            lambda match: (DOCS / match[1]).read_text("utf-8").replace("](docs/", "]("), page.read_text("utf-8")
        )
        return INCLUDED.sub(_program, text)
    cells = json.loads((DOCS / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _program(match: re.Match[str]) -> str:
    return f"{match[2]}:\n\n```python\n{(DOCS / match[1]).read_text('utf-8')}```"


def summary_of(text: str) -> str:
    """Return the first sentence below the title, or two if it is short."""
    below = re.sub(r"^(:{3,}|`{3,}).*?^\1$|^#[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraph = " ".join(LINK.sub(r"\1", below.strip().partition("\n\n")[0]).split())
    first, *others = re.split(r"(?<=[.?:])\s+(?=[A-Z`(])", paragraph)
    summary = " ".join((first, *others[: len(first) < SHORT])).removesuffix(":")
    return "" if summary.startswith("|") else summary


def write_llms(site: Path, address: str) -> None:
    """Write `llms.txt`, and the text of each page next to its HTML.

    Args:
        site: the folder of the site.
        address: where the site is published, or an empty text for relative links.
    """
    first, *others = pages()
    lines = [f"# {first.title}\n\n> {first.summary}\n\n{HINT}"]
    for page in others:
        link = f"[{page.title}]({address}{page.address})"
        lines.append(
            f"\n## {link}\n\n{page.summary}\n" if page.depth == 1 else f"- {link}: {page.summary}".removesuffix(": ")
        )
        if page.address.endswith(".md"):
            (site / page.address).write_text(page.text, "utf-8")
    (site / "llms.txt").write_text("\n".join((*lines, "")), "utf-8")


#: What an agent should know before it opens a page.
HINT = """\
Each page is one job with complete programs, which are run as tests. Import `wds_datapipes` to register its stages as
methods of PyTorch's datapipes. On Linux, use `DataLoader2` with `ShardReadingService`; elsewhere, `DataLoader` over
`StatefulShards`. `IndexedSamples` reads single samples by index, and `ShardList` whole shards as a stream."""
