"""HTTP directory listings: the links of a page, and those that match a glob pattern."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit


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
    """Return the files that match a URL with wildcards, in the order of their directory's page.

    Args:
        url: the pattern; ``*`` matches within the last part of the path.
        list_folder: returns the entries of a directory.

    Raises:
        ValueError: a directory has wildcards.
    """
    path, mark, query = url.partition("?")
    folder, slash, pattern = path.rpartition("/")
    if "*" in folder:
        raise ValueError("on web servers, * may only stand for files of one directory. List the directories yourself")
    wanted = re.compile(".*".join(re.escape(part) for part in re.split(r"\*+", pattern)), re.DOTALL)
    found = []
    for entry in list_folder(folder + slash):
        last = entry["name"].rpartition("/")[2]
        if entry["type"] == "file" and (wanted.fullmatch(last) or wanted.fullmatch(unquote(last))):
            found.append(f"{entry['name']}{mark}{query}")
    return found
