"""The command ``show``: contents of shards that attack a terminal or a browser, and the pages that it writes."""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wds_datapipes import TarWriter, WriteOptions
from wds_datapipes.tools.cli.show import draw_samples, sheet_as_html


@pytest.fixture
def photos(folder: Path) -> list[str]:
    """Write two shards of five images with a class and a text."""
    for shard in range(2):
        with TarWriter(f"p-{shard}.tar", options=WriteOptions(encoder={"jpg": {"quality": 60}})) as writer:
            for n in range(5):
                colour = np.full((30, 40, 3), (50 * n, 100, 200), np.uint8)
                writer.write({"__key__": f"{shard}{n}", "jpg": colour, "cls": n % 2, "txt": f"number {n}\nof {shard}"})
    return ["p-0.tar", "p-1.tar"]


class Page(HTMLParser):
    """Collects tags with their attributes, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


#: All tags and attributes of a page.
TAGS = {
    "b", "body", "br", "dd", "div", "dl", "dt", "h1", "head", "html", "img", "meta", "p", "pre", "span", "style",
    "title",
}  # fmt: skip
ATTRIBUTES = {"alt", "charset", "class", "content", "http-equiv", "lang", "name", "src", "style"}


def safe_page(text: str) -> Page:
    """Return a page, checked to contain nothing active."""
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= TAGS
    for _, attributes in page.tags:
        assert set(attributes) <= ATTRIBUTES
        if "src" in attributes:
            assert re.fullmatch(r"data:image/(png|jpeg);base64,[\w+/=]+", attributes["src"] or "")
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    return page


def test_a_sheet_has_pictures_classes_and_texts(program: Any, photos: list[str]) -> None:
    done = program("show", "p-{0..1}.tar", "--html", "s.html")
    assert done.code == 0
    assert re.fullmatch(r"s\.html: 10 of 10 samples, [\d.]+ kB\n", done.out)
    page = safe_page(Path("s.html").read_text())
    keys = [f"{shard}{number}" for shard in range(2) for number in range(5)]
    assert "p-{0..1}.tar" in page.texts
    urls = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    pictures = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert [picture.size for picture in pictures] == [(40, 30)] * 10
    assert [text for text in page.texts if re.fullmatch(r"[01][0-4]", text)] == ["10", *keys]
    assert page.texts.count("number 3\nof 1") == 1


def test_each_sample_has_the_same_chance() -> None:
    found = Counter(
        sample["__key__"]
        for seed in range(60)
        for sample in draw_samples(({"__key__": str(number)} for number in range(36)), 6, seed)[0]
    )
    assert found.total() == 360
    assert len(found) == 36
    assert max(found.values()) < 25


EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></textarea><svg onload=alert(1)>",
    "&lt;b&gt; &#60;i&#62; ${title} $cards",
    "javascript:alert(1)//\x00\x1b[31m\u202e\ud800",
]


@pytest.mark.parametrize("evil", EVIL)
def test_a_hostile_sample_is_only_text(evil: str) -> None:
    data = evil.encode("utf-8", "replace")
    samples = [
        {"__key__": evil, "__url__": evil, "txt": data, "cls": b"1"},
        {"__key__": "b", "__url__": "u", "cls": data, evil: b"x", "jpg": data},
        {"__key__": "c", "__url__": "u", "class": json.dumps({evil: evil}).encode(), "pkl": data},
    ]
    page = safe_page(sheet_as_html(samples, evil, {evil: evil}))
    shown = evil.replace("\x00", r"\x00").replace("\x1b", r"\x1b")
    shown = shown.replace("\u202e", r"\x202e").replace("\ud800", r"\xd800")
    assert shown in page.texts
