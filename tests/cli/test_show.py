"""The command ``show``."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from wds_datapipes import TarWriter
from wds_datapipes.cli.show import half_blocks
from wds_datapipes.cli.show_sheet import make_sheet, size_bars
from wds_datapipes.cli.show_sheet_html import sheet_as_html
from wds_datapipes.prepare.dataset_contents import RandomSamples
from wds_datapipes.testing import build_shard


@pytest.fixture
def photos(folder: Path) -> list[str]:
    """Write two shards of five images with a class and a text."""
    for shard in range(2):
        with TarWriter(f"p-{shard}.tar", encoder={"jpg": {"quality": 60}}) as writer:
            for n in range(5):
                colour = np.full((30, 40, 3), (50 * n, 100, 200), np.uint8)
                writer.write({"__key__": f"{shard}{n}", "jpg": colour, "cls": n % 2, "txt": f"number {n}\nof {shard}"})
    return ["p-0.tar", "p-1.tar"]


def test_a_sample_as_lines(program: Any, photos: list[str]) -> None:
    done = program("show", "p-0.tar")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"p-0\.tar: sample 0, 00, \d+ B", done.lines[0])
    assert re.fullmatch(r"jpg  \d+ B  JPEG image, 40 x 30, RGB", done.lines[1])
    assert done.lines[2:] == [
        "cls    1 B  int: 0",
        "txt   13 B  text, 13 characters, 2 lines",
        "    number 0",
        "    of 0",
    ]


@pytest.mark.parametrize(
    ("arguments", "key", "number"),
    [("", "00", 0), ("--number 4", "04", 4), ("--number 7", "12", 7), ("-k 13", "13", 8), ("--key 00", "00", 0)],
)
def test_a_sample_by_its_position_or_its_key(
    program: Any, photos: list[str], arguments: str, key: str, number: int
) -> None:
    facts = json.loads(program("show", *photos, *arguments.split(), "--json").out)
    assert (facts["key"], facts["number"], facts["shard"]) == (key, number, f"p-{key[0]}.tar")
    assert [field["field"] for field in facts["fields"]] == ["jpg", "cls", "txt"]
    assert facts["fields"][2] == {
        "field": "txt",
        "bytes": 13,
        "kind": "text, 13 characters, 2 lines",
        "text": f"number {key[1]}\nof {key[0]}",
        "error": "",
    }


def test_a_sample_before_the_end_of_a_broken_shard_is_shown(program: Any, photos: list[str]) -> None:
    Path("p-0.tar").write_bytes(Path("p-0.tar").read_bytes()[:7000])
    assert program("show", "p-0.tar", "--number", "0").code == 0
    done = program("show", "p-0.tar", "--number", "4")
    assert done.code == 1
    assert done.err.startswith("Error: p-0.tar ends ")


def test_compressed_shards_and_commands(program: Any, photos: list[str]) -> None:
    program("cat", *photos, "-o", "all.tar.xz")
    assert "all.tar.xz: sample 9, 14, " in program("show", "all.tar.xz", "--number", "9").out
    assert "pipe:cat p-1.tar: sample 2, 12, " in program("show", "pipe:cat p-1.tar", "-k", "12").out


def test_nothing_in_a_sample_reaches_the_terminal_or_runs(program: Any, folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (folder / "evil").touch, ()

    evil = "\x1b]0;title\x07\x1b[2J\u202etxt.exe\r\x9b31m"
    with TarWriter("evil.tar", key_rule=None, encoder=False) as writer:
        sample = {"__key__": f"k{evil}", "pkl": pickle.dumps(Evil()), "txt": evil.encode(), f"f{evil}": b"1"}
        writer.write({**sample, "json": json.dumps({evil: evil}).encode(), "jpg": b"\x1b[2J", "rich": b"[red]a[/red]"})
    done = program("show", "evil.tar")
    assert done.code == 0
    assert not set("\x1b\x07\r\x9b\u202e") & set(done.out)
    assert r"k\x1b]0;title\x07\x1b[2J\u202etxt" in done.lines[0]
    assert "not decoded, as decoding can run code" in done.out
    assert "[red]a[/red]" in done.out
    assert not (folder / "evil").exists()


def in_terminal(*arguments: str) -> str:
    """Run the program in a terminal with colours, and return all its output."""
    first, second = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "60"}
    command = [sys.executable, "-m", "wds_datapipes", *arguments]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=second, stderr=second, env=environment)
    os.close(second)
    told = b""
    try:
        while chunk := os.read(first, 1 << 16):
            told += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(first)
    assert running.wait(timeout=600) == 0
    return told.decode()


def test_a_terminal_with_colours_shows_pictures(photos: list[str]) -> None:
    told = in_terminal("show", "p-0.tar", "--number", "2")
    rows = [line for line in told.splitlines() if "\N{UPPER HALF BLOCK}" in line]
    assert len(rows) == 21  # 56 columns wide, the available space, in the shape of the picture
    assert {line.count("\N{UPPER HALF BLOCK}") for line in rows} == {56}
    red, green, blue = map(int, re.findall(r"38;2;(\d+);(\d+);(\d+)", rows[9])[20])
    assert abs(red - 100) + abs(green - 100) + abs(blue - 200) < 30


@pytest.mark.parametrize(
    ("size", "lines", "columns"), [((40, 20), 5, 20), ((2, 2), 6, 12), ((100, 1), 1, 20), ((1, 90), 6, 1)]
)
def test_half_blocks_have_the_shape_of_the_picture(size: tuple[int, int], lines: int, columns: int) -> None:
    drawn = half_blocks(Image.new("RGBA", size, (255, 0, 0, 0)), 20, 6)
    assert (len(drawn), {len(line) for line in drawn}) == (lines, {columns})
    style: Any = drawn[0].spans[0].style
    assert style.color.triplet == style.bgcolor.triplet == (128, 128, 128)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("-k nope", 2, "There is no sample with the key 'nope': there are 5 samples in p-0.tar"),
        ("--number 5", 2, "There is no sample at position 5: there are 5 samples"),
        ("-k 00 --html x.html", 2, "select a single sample for the terminal"),
        ("--number 3 --html x.html", 2, "select a single sample for the terminal"),
        ("--html none/x.html", 1, "none/x.html cannot be written"),
        ("none.tar", 1, "There is no file 'none.tar'"),
    ],
)
def test_wrong_use(program: Any, photos: list[str], arguments: str, code: int, message: str) -> None:
    shards = [] if arguments == "none.tar" else ["p-0.tar"]
    done = program("show", *shards, *arguments.split())
    assert message in done.err
    assert done.code == (code if arguments != "none.tar" else 2)
    assert done.err.count("\n") == 1
    assert not list(Path().glob("x.*"))


def test_an_empty_shard(program: Any, folder: Path) -> None:
    build_shard("e.tar", [])
    done = program("show", "e.tar")
    assert (done.code, done.err) == (2, "Error: There is no sample at position 0: there are no samples in e.tar\n")
    assert program("show", "e.tar", "--html", "e.html").code == 0
    assert "There are no samples." in Path("e.html").read_text()


# Contact sheets ----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags with their attributes, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.keys: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.tags and self.tags[-1][1].get("class") == "key" and data.strip():
            self.keys.append(data)


#: All tags and attributes of a page.
TAGS = {
    "b", "body", "br", "dd", "details", "div", "dl", "dt", "h1", "h2", "head", "html", "img", "line", "meta", "p",
    "pre", "rect", "section", "span", "style", "summary", "svg", "text", "title",
}  # fmt: skip
ATTRIBUTES = {
    "alt", "aria-label", "charset", "class", "content", "height", "http-equiv", "lang", "name", "role", "src",
    "style", "text-anchor", "title", "viewbox", "width", "x", "x1", "x2", "y", "y1", "y2",
}  # fmt: skip


def safe_page(text: str) -> Page:
    """Return a page, checked to contain nothing active."""
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= TAGS
    for tag, attributes in page.tags:
        assert set(attributes) <= ATTRIBUTES
        if "src" in attributes:
            assert re.fullmatch(r"data:image/(png|jpeg);base64,[\w+/=]+", attributes["src"] or "")
        if "style" in attributes:
            assert re.fullmatch(r"width: [\d.]+%", attributes["style"] or ""), tag
    assert "url(" not in text
    assert "@import" not in text
    return page


def pictures(page: Page) -> list[Image.Image]:
    urls = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_a_sheet_has_pictures_classes_and_sizes(program: Any, photos: list[str]) -> None:
    done = program("show", "p-{0..1}.tar", "--html", "s.html", "--workers", "1")
    assert done.code == 0
    assert re.fullmatch(r"s\.html: 10 of 10 samples, [\d.]+ kB\n", done.out)
    page = safe_page(Path("s.html").read_text())
    assert "p-{0..1}.tar" in page.texts
    assert [picture.size for picture in pictures(page)] == [(40, 30)] * 10
    assert page.keys == [f"{s}{n}" for s in "01" for n in range(5)]
    assert page.texts.count("number 3\nof 1") == 1
    assert page.texts[page.texts.index("Classes of these samples") + 1 :][:4] == ["0", "6", "1", "4"]
    counts = [int(found) for text in page.texts for found in re.findall(r": (\d+) samples?$", text)]
    assert sum(counts) == 10


def test_a_seed_draws_samples_of_all_shards(program: Any, photos: list[str]) -> None:
    def keys(*arguments: str) -> list[str]:
        assert program("show", *photos, "--html", "s.html", "--limit", "4", *arguments).code == 0
        return safe_page(Path("s.html").read_text()).keys

    assert len(keys()) == 4
    assert keys("--seed", "5") == keys("--seed", "5", "--workers", "1") != keys("--seed", "6")
    facts = json.loads(program("show", *photos, "--html", "memory://sheets/s.html", "--limit", "4", "--json").out)
    assert (facts["shown"], facts["samples"], facts["faults"]) == (4, 10, [])
    assert facts["file"] == "memory://sheets/s.html"


def test_another_field_may_be_the_class(program: Any, photos: list[str]) -> None:
    program("show", *photos, "--workers", "1", "--html", "s.html", "--label", "nope", "--label", "TXT")
    page = safe_page(Path("s.html").read_text())
    assert page.texts[page.texts.index("Classes of these samples") + 1] == "number 0 of 0"


def test_broken_shards_are_shown_up_to_the_fault_which_is_reported(program: Any, photos: list[str]) -> None:
    Path("p-1.tar").write_bytes(Path("p-1.tar").read_bytes()[:7000])
    done = program("show", *photos, "--workers", "1", "--html", "s.html")
    assert done.code == 1
    assert done.out.startswith("s.html: 6 of 6 samples")
    assert done.err.startswith("Error: p-1.tar ends ")
    done = program("show", "p-0.tar", "none.tar", "--html", "s.html")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "not possible with standard input" in program("show", "-", "--html", "s.html").err


EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></textarea><svg onload=alert(1)>",
    "&lt;b&gt; &#60;i&#62; ${title} $cards",
    "javascript:alert(1)//\x00\x1b[31m\u202e\ud800",
]


@pytest.mark.parametrize("evil", EVIL)
def test_a_hostile_sample_is_only_text(evil: str, tmp_path: Path) -> None:
    samples = [
        {"__key__": evil, "__url__": evil, "txt": evil.encode("utf-8", "replace"), "cls": b"1"},
        {
            "__key__": "b",
            "__url__": "u",
            "cls": evil.encode("utf-8", "replace"),
            evil: b"x",
            "jpg": evil.encode("utf-8", "replace"),
        },
        {
            "__key__": "c",
            "__url__": "u",
            "class": json.dumps({evil: evil}).encode(),
            "json": json.dumps([evil]).encode(),
        },
    ]
    sheet = make_sheet(
        RandomSamples(samples, np.array([3, 4, 5]), 1, 10, []), evil, label_fields=["cls", "txt", "json"]
    )
    page = safe_page(sheet_as_html(sheet))
    shown = evil.replace("\x00", r"\x00").replace("\x1b", r"\x1b")
    shown = shown.replace("\u202e", r"\x202e").replace("\ud800", r"\xd800")
    assert shown in page.texts


def test_samples_without_pictures_show_their_texts() -> None:
    samples = [
        {"__key__": "a", "__url__": "u", "json": b'{"k": [1, 2]}', "txt": b"a long text about it"},
        {"__key__": "b", "__url__": "u", "jpg": b"broken"},
        {"__key__": "c", "__url__": "u", "pkl": b""},
        {"__key__": "d", "__url__": "u", "npy": b""},
    ]
    cards = make_sheet(RandomSamples(samples, np.array([1, 1, 1, 1]), 1, 10, []), "t").cards
    assert [card.text for card in cards][:3] == [
        "a long text about it",
        "jpg: ValueError: the data are not in an image format that Pillow reads",
        "pkl: not decoded, as decoding can run code",
    ]
    assert [card.failed for card in cards] == [False, True, True, True]


@given(st.lists(st.integers(0, 10**12), max_size=60))
def test_each_size_is_in_one_bar(sizes: list[int]) -> None:
    bars, _ = size_bars(np.array(sizes, np.int64))
    assert sum(bar.samples for bar in bars) == len(sizes)
    assert len(bars) <= 32
    for before, after in pairwise(bars):
        assert before.high == after.low
        assert before.low < before.high
    if bars:
        assert bars[0].low == min(sizes)
        assert bars[-1].high == pytest.approx(max(sizes))
    for bar in bars[:-1]:
        assert bar.samples == sum(bar.low <= size < bar.high for size in sizes)
