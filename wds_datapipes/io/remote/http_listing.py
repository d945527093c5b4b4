"""HTTP directory listings: the links of a page, and those that match a glob."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

__all__ = ["entries_of", "matches"]

#: How deep ``**`` looks for folders.
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
    """Return the links of a folder's page directly below it, each once, in order.

    Args:
        page: the page, in HTML.
        url: the folder; a slash at its end may be missing.

    Returns:
        The ``name`` of each, which is its URL, and its ``type``: ``"directory"`` if it ends with a slash.
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
        except ValueError:  # an address that is none
            continue
        below = there.path.removeprefix(urlsplit(folder).path)
        is_below = there.netloc.rpartition("@")[2] == host and below != there.path and not there.query
        if is_below and below.rstrip("/") and "/" not in below.rstrip("/"):
            names[folder + below] = None
    return [{"name": name, "type": "directory" if name.endswith("/") else "file", "size": None} for name in names]


def matches(url: str, list_folder: Callable[[str], list[dict[str, Any]]]) -> list[str]:
    """Return the files that match a URL with wildcards.

    Args:
        url: stars match within a name; a name that is two stars matches any number of folders.
        list_folder: returns the entries of a folder.
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
    """Yield the folders in one that match a name."""
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
    """Return the entries of a folder; of one that a pattern has made up, none if it is not there."""
    with suppress(*([FileNotFoundError] if may_be_missing else [])):
        return list_folder(folder)
    return []


def _matching_urls(names: Iterable[str], pattern: str) -> Iterator[str]:
    """Yield the URLs whose last names match, as they are or unquoted."""
    wanted = re.compile(".*".join(re.escape(part) for part in re.split(r"\*+", pattern)), re.DOTALL)
    for name in names:
        last = name.rstrip("/").rpartition("/")[2]
        if wanted.fullmatch(last) or wanted.fullmatch(unquote(last)):
            yield name
