"""The addresses that pages had, and where each leads now: a line of `redirects.txt` for each."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

REDIRECTS = Path(__file__).with_name("redirects.txt")
#: A page that leads elsewhere, with the section of the old address if it names one.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>This page has moved</title>
<meta http-equiv="refresh" content="1; url={target}">
<link rel="canonical" href="{page}">
<script>location.replace({address} + (location.hash || {section}))</script>
</head>
<body><p>This page has moved to <a href="{target}">{page}</a>.</p></body>
</html>
"""


class Target(NamedTuple):
    """Where an old address leads: a page without an ending, and the tab and the section of it, or empty texts."""

    page: str
    tab: str
    section: str


def read_redirects() -> Mapping[str, Target]:
    """Return the targets by the old addresses, which are relative to the documentation and have no ending."""
    found = {}
    for line in filter(None, REDIRECTS.read_text("utf-8").splitlines()):
        if not line.startswith("#"):
            old, target = line.split()
            address, _, section = target.partition("#")
            page, _, tab = address.partition("?")
            found[old] = Target(page, tab, section)
    return found


def write_redirects(site: Path) -> Iterator[str]:
    """Write a page for each old address, and yield what is wrong with it."""
    for old, (name, tab, section) in read_redirects().items():
        page = posixpath.relpath(f"{name}.html", posixpath.dirname(old))
        new, written = site / f"{name}.html", site / f"{old}.html"
        if written.exists() and f'href="{page}"' not in written.read_text("utf-8"):
            yield f"redirects.txt has the address {old}, where there is a page"
        elif not new.exists() or (section and f'id="{section}"' not in new.read_text("utf-8")):
            yield f"redirects.txt leads from {old} to {name}#{section}, which does not exist"
        else:
            address, hash_ = page + (tab and f"?{tab}"), section and f"#{section}"
            target = escape(address + hash_)
            code = {"address": json.dumps(address), "section": json.dumps(hash_)}
            written.write_text(PAGE.format(target=target, page=escape(page), **code), "utf-8")
