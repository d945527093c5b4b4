"""Shards listed from index pages of web servers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from nginx_server import Nginx
from web_server import QuietHandler, web_server

from wds_datapipes import ShardList
from wds_datapipes.errors import SpecError
from wds_datapipes.io.remote.http_listing import entries_of

FILES = ["a-0.tar", "a-1.tar", "b 0.tar", "ü.tar.gz", "notes.txt", "d/0/x.tar", "d/1/x.tar", "d/1/y.tar"]


@pytest.fixture(params=["nginx", "python"])
def site(request: pytest.FixtureRequest, nginx: Nginx) -> Iterator[str]:
    if not nginx.is_running:
        nginx.start()
    root = nginx.files / "listing"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if request.param == "nginx":
        yield f"http://127.0.0.1:{nginx.http}/listed/listing"
        return
    with web_server(functools.partial(QuietHandler, directory=str(root))) as url:
        yield url


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/", ["a-0.tar", "a-1.tar", "b%200.tar", "%C3%BC.tar.gz"]),
        ("/*.tar", ["a-0.tar", "a-1.tar", "b%200.tar"]),
        ("/a-*.tar", ["a-0.tar", "a-1.tar"]),
        ("/b 0*", ["b%200.tar"]),
        ("/*.tar?sign=1", ["a-0.tar?sign=1", "a-1.tar?sign=1", "b%200.tar?sign=1"]),
        ("/d/1/*", ["d/1/x.tar", "d/1/y.tar"]),
    ],
)
def test_linked_files_are_shards(site: str, pattern: str, expected: list[str]) -> None:
    assert list(ShardList(site + pattern)) == sorted(f"{site}/{name}" for name in expected)


def test_an_unlistable_page_is_an_error(site: str) -> None:
    with pytest.raises(SpecError, match=r"missing/ cannot be listed: HTTP status 404, not found"):
        list(ShardList(f"{site}/missing/"))
    with pytest.raises(SpecError, match="No file matches"):
        list(ShardList(f"{site}/c*.tar"))
    with pytest.raises(SpecError, match=r"d/0/.* no file ends in|No file matches"):
        list(ShardList(f"{site}/d/0/*.zip"))
    with pytest.raises(SpecError, match=r"cannot be listed: .* may only stand for files of one directory"):
        list(ShardList(f"{site}/d/*/*.tar"))


def test_only_links_directly_below_the_folder_on_its_host_count() -> None:
    page = b"""<a href="x.tar">1</a><A HREF='/d/y.tar'>2</A><a class="z" href="http://h/d/z.tar">3</a><a href="e/">4</a>
    <a href="../up.tar"><a href="/other/a.tar"><a href="http://else/d/b.tar"><a href="?C=N;O=D"><a href="e/deep.tar">
    <a href="#top"><a href="x.tar"><a href="http://[broken/"><a><a href="javascript:a()"><a href="file:///d/q.tar">"""
    found = entries_of(page, "http://me:secret@h/d/?sort=1")
    names = [(entry["name"].removeprefix("http://me:secret@h/d/"), entry["type"]) for entry in found]
    assert names == [("x.tar", "file"), ("y.tar", "file"), ("z.tar", "file"), ("e/", "directory")]


def test_bytes_that_are_not_a_page_contain_no_links() -> None:
    assert entries_of(Path(__file__).read_bytes()[:0] + bytes(range(256)) * 10, "http://h/d/") == []
