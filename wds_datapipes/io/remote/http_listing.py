"""HTTP directory listings: the links of a page, and those that match a glob pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

__all__ = ["entries_of", "matches"]

#: The maximum depth of ``**``.
DEEPEST = 32


class Links(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a link."""
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def entries_of(page: bytes, url: str) -> list[dict[str, Any]]:
    """Return the links of a directory's page to its entries, each once, in order.

    Args:
        page: the page, in HTML.
        url: the directory, with or without a slash at the end.

    Returns:
        The ``name`` of each entry, which is its URL, and its ``type``: ``"directory"`` if it ends with a slash.
    """
    folder = f"{url.partition('?')[0].rstrip('/')}/"
    links = Links()
    links.feed(page.decode("utf-8", "replace"))
    links.close()
    host = urlsplit(folder).netloc.rpartition("@")[2]
    names: dict[str, None] = {}
    for link in links.found:
        try:
            there = urlsplit(urljoin(folder, link.strip()))
        except ValueError:  # an invalid URL
            continue
        below = there.path.removeprefix(urlsplit(folder).path)
        is_below = there.netloc.rpartition("@")[2] == host and below != there.path and not there.query
        if is_below and below.rstrip("/") and "/" not in below.rstrip("/"):
            names[folder + below] = None
    return [{"name": name, "type": "directory" if name.endswith("/") else "file", "size": None} for name in names]


def matches(url: str, list_folder: Callable[[str], list[dict[str, Any]]]) -> list[str]:
    """Return the files that match a URL with wildcards.

    Args:
        url: the pattern; ``*`` matches within a name, and the name ``**`` matches any number of directories.
        list_folder: returns the entries of a directory.
    """
    path, mark, query = url.partition("?")
    begin = path.index("*")
    begin = path.rindex("/", 0, begin) + 1
    *between, last = path[begin:].split("/")
    folders = [path[:begin]]
    for name in between:
        folders = [found for folder in folders for found in _folders(folder, name, list_folder)]
    found = [entry for folder in folders for entry in _entries(folder, len(folders) > 1, list_folder)]
    files = (entry["name"] for entry in found if entry["type"] == "file")
    return [f"{file}{mark}{query}" for file in _matching_urls(files, last)]


def _folders(folder: str, name: str, list_folder: Callable[[str], list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the subdirectories of a directory that match a name."""
    if "*" not in name:
        yield f"{folder}{name}/"
        return
    below = [folder]
    if name == "**":
        yield folder
    for _ in range(DEEPEST):
        entries = [entry for each in below for entry in _entries(each, each != folder, list_folder)]
        below = [entry["name"] for entry in entries if entry["type"] == "directory"]
        if name != "**":
            yield from _matching_urls(below, name)
            return
        if not below:
            return
        yield from below


def _entries(
    folder: str, may_be_missing: bool, list_folder: Callable[[str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the entries of a directory; none if it was derived from a pattern and does not exist."""
    with suppress(*([FileNotFoundError] if may_be_missing else [])):
        return list_folder(folder)
    return []


def _matching_urls(names: Iterable[str], pattern: str) -> Iterator[str]:
    """Yield the URLs whose last name matches, quoted or unquoted."""
    wanted = re.compile(".*".join(re.escape(part) for part in re.split(r"\*+", pattern)), re.DOTALL)
    for name in names:
        last = name.rstrip("/").rpartition("/")[2]
        if wanted.fullmatch(last) or wanted.fullmatch(unquote(last)):
            yield name
