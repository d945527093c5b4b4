"""The addresses that pages had, and where each leads now: a line of `redirects.txt` for each."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

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


def read_redirects() -> Mapping[str, str]:
    """Return the page and section for each old address, all relative to the documentation and without an ending."""
    lines = filter(None, REDIRECTS.read_text("utf-8").splitlines())
    return dict(line.split() for line in lines if not line.startswith("#"))


def write_redirects(site: Path) -> Iterator[str]:
    """Write a page for each old address, and yield what is wrong with it."""
    for old, target in read_redirects().items():
        name, _, section = target.partition("#")
        address = posixpath.relpath(f"{name}.html", posixpath.dirname(old))
        new, page = site / f"{name}.html", site / f"{old}.html"
        if page.exists() and f'href="{address}"' not in page.read_text("utf-8"):
            yield f"redirects.txt has the address {old}, where there is a page"
        elif not new.exists() or (section and f'id="{section}"' not in new.read_text("utf-8")):
            yield f"redirects.txt leads from {old} to {target}, which does not exist"
        else:
            section = section and f"#{section}"
            page.write_text(
                PAGE.format(
                    target=escape(address + section),
                    page=escape(address),
                    address=json.dumps(address),
                    section=json.dumps(section),
                ),
                "utf-8",
            )
