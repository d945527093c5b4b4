"""Shard patterns: every step of the expansion, which never yields an empty list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import pytest
from error_facts import naming

from wds_datapipes.errors import SpecError
from wds_datapipes.io.compression.formats import SHARD_SUFFIXES
from wds_datapipes.io.openers import open_url, register_opener
from wds_datapipes.shards.listing import url_of
from wds_datapipes.shards.patterns import expand_urls


def expand(urls: Any, **variables: str) -> list[str]:
    return expand_urls(urls, variables=variables)


# Lists and separators ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("a.tar", ["a.tar"]),
        (Path("d/a.tar"), ["d/a.tar"]),
        (["b.tar", Path("a.tar"), "c{0,1}.tar"], ["b.tar", "a.tar", "c0.tar", "c1.tar"]),
        ((url for url in ("a", "a")), ["a", "a"]),
        ("a.tar::b{0..1}.tar::pipe:cat c.tar", ["a.tar", "b0.tar", "b1.tar", "pipe:cat c.tar"]),
        ("http://[::1]:80/a.tar::http://[fe80::1]/b.tar", ["http://[::1]:80/a.tar", "http://[fe80::1]/b.tar"]),
        (r"back\slash b#%41.tar", [r"back\slash b#%41.tar"]),
        ("http://h/a.tar?x=*&y=[1]", ["http://h/a.tar?x=*&y=[1]"]),  # no glob
    ],
)
def test_lists(urls: Any, expected: list[str]) -> None:
    assert expand(urls) == expected


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["a", ""], r"The shard pattern '' is empty"),
        ([], r"There are no shards in \[\]. Name at least one"),
        ("a::", r"The shard pattern 'a::' has an empty part"),
        ("http://me:a::b@host/0.tar", r"The shard pattern 'http://\*\*\*@host/0\.tar' has :: in the user or password"),
        ("{a,}", r"One of the shards of the pattern '\{a,\}' has an empty name"),
        (["a", 3], r"A shard pattern must be a string or a path, but 3 at position 1 is int"),
        (b"a.tar", r"a string, a path or a list of these, not as bytes"),
        ({"a": 1}, r"not as dict"),
        ({"a", "b"}, r"cannot be given as a set: its order differs between processes. Use sorted"),
    ],
)
def test_invalid_lists_of_shards(urls: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        expand(urls)


# Variables --------------------------------------------------------------------------------------------------------


def test_variables() -> None:
    variables = {"WDS_A": "x{0,1}", "WDS_B": "${A}-${C}", "WDS_C": "c", "WDS_LIST": "a,b", "A": "wrong"}
    assert expand("${A}.tar", **variables) == ["x0.tar", "x1.tar"]
    assert expand("${B}/${C}::{${LIST}}", **variables) == ["x0-c/c", "x1-c/c", "a", "b"]
    assert expand("pipe:cat ${C} $A", **variables) == ["pipe:cat c $A"]
    assert expand("pipe:echo ${HOME:-no}", **variables) == ["pipe:echo ${HOME:-no}"]


def test_variables_nest_ten_deep() -> None:
    deep = {f"WDS_V{level}": f"${{V{level + 1}}}" for level in range(1, 12)} | {"WDS_V11": "end"}
    assert expand("${V2}", **deep) == ["end"]
    with pytest.raises(SpecError, match=r"'\$\{V1\}' are nested more than 10 deep"):
        expand("${V1}", **deep)
    with pytest.raises(SpecError, match="One of them may refer to itself"):
        expand("${A}", WDS_A="${A}")


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(SpecError, match=naming("'${NO}/a.tar'", "${NO}", "WDS_NO")):
        expand("${NO}/a.tar", NO="wrong")


# Braces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a{08..11}", ["a08", "a09", "a10", "a11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{a,b{0..1},}x", ["ax", "b0x", "b1x", "x"]),
        ("{a}", ["{a}"]),
        (r"a\{b{0,1}", ["a{b0", "a{b1"]),
        ("pipe:cat {a,b}.tar | awk '{print $1}'", [f"pipe:cat {name}.tar | awk '{{print $1}}'" for name in "ab"]),
    ],
)
def test_braces(pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected


@pytest.mark.parametrize("pattern", ["a{0..3", "a}", "{a,{b}", "{0..1}}"])
def test_braces_that_do_not_pair(pattern: str) -> None:
    with pytest.raises(SpecError, match=r"The braces in the shard pattern '.*' are unbalanced. Write"):
        expand(pattern)


# Local files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(folder: Path) -> Path:
    shards = ("b.tar", "a.tar", "c.tgz", "x[1].tar", "x1.tar", "sub/d.tar", "e y#.tar.gz")
    for name in (*shards, "note.txt", ".hidden.tar", "._a.tar"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "dir.tar").mkdir()
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[bc].t*", ["b.tar", "c.tgz"]),
        ("x*.tar", ["x1.tar", "x[1].tar"]),
        ("x[1].tar", ["x[1].tar"]),
        ("{b,a}.t?r::**/d.tar", ["b.tar", "a.tar", "sub/d.tar"]),
        ("./", ["./a.tar", "./b.tar", "./c.tgz", "./e y#.tar.gz", "./x1.tar", "./x[1].tar"]),
        ("{sub/,a.tar}", ["sub/d.tar", "a.tar"]),
        (Path("sub"), ["sub/d.tar"]),
        ("file:e%20*", ["file:e%20y%23.tar.gz"]),
    ],
)
def test_local_globs_and_directories(files: Path, pattern: str | Path, expected: list[str]) -> None:
    assert expand(pattern) == expected
    for url in expected:
        open_url(url).close()


def test_all_kinds_of_shards_are_found_in_a_directory(tmp_path: Path) -> None:
    expected = sorted(f"{tmp_path}/x{suffix}" for suffix in SHARD_SUFFIXES)
    for path in (*expected, "x.tar.idx", "x.tar.part", "tar", "x.zip"):
        (tmp_path / path).touch()
    assert expand(f"{tmp_path}/") == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (["a.tar", "no*.tar"], r"No file matches 'no\*.tar' \(from /"),
        ("s*", r"No file matches 's\*'"),
        ("none/no*.tar", r"No file matches .*: the directory 'none' cannot be listed: No such file or directory$"),
        (f"{'x' * 300}*.tar", r"No file matches 'x+\*\.tar'"),
        ("empty/", r"The directory 'empty/' \(from .* has no file that ends in .tar, .*, .txz or .tzst"),
        ("missing/", r"The directory 'missing/' .*cannot be listed: No such file or directory"),
    ],
)
def test_a_local_pattern_without_a_match(files: Path, pattern: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        expand(pattern)


# Remote files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    for name in ("/d/b.tar", "/d/a.tar", "/d/c.idx", "/d/.x.tar", "/d/e?.tar", "/d/sub/f.tar"):
        filesystem.pipe(name, name.encode())
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("memory://d/*.tar", ["memory://d/.x.tar", "memory://d/a.tar", "memory://d/b.tar", "memory://d/e?.tar"]),
        ("memory://d/", ["memory://d/a.tar", "memory://d/b.tar", "memory://d/e?.tar"]),
        ("memory://d/**/f.tar", ["memory://d/sub/f.tar"]),
        ("memory://d/e?.tar", ["memory://d/e?.tar"]),
        ("memory://d/no.tar", ["memory://d/no.tar"]),
    ],
)
def test_remote_globs_and_directories(memory: Any, pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected


def test_a_host_missing_from_the_found_names_stays_in_the_url(memory: Any) -> None:
    class Host(type(memory)):  # type: ignore[misc]  # fsspec carries no types
        protocol = "hostmemory"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(re.sub(r"^hostmemory://[^/]*", "", path)))

    fsspec.register_implementation("hostmemory", Host, clobber=True)
    expected = ["hostmemory://me@host/d/a.tar", "hostmemory://me@host/d/b.tar"]
    assert expand("hostmemory://me@host/d/[ab]*") == expand("hostmemory://me@host/d/")[:2] == expected
    # The file system lists the path under a different name than the URL.
    assert url_of("/d/a.tar", "memory://alias", "/d", memory) == "memory:///d/a.tar"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("memory://d/no*", r"No file matches memory://d/no\*"),
        ("memory://d/sub/g/", r"memory://d/sub/g/ cannot be listed: there is no such file"),
        ("https://me:hunter2@127.0.0.1:1/*.tar?sig=hunter2", r"https://\*{3}@127.*1/\*.tar\?sig=\*{3} cannot be lis"),
    ],
)
def test_a_remote_pattern_without_a_match(memory: Any, pattern: str, message: str) -> None:
    options = {"retries": 0} if pattern.startswith("https") else None  # or it retries for most of a minute
    with pytest.raises(SpecError, match=message):
        expand_urls(pattern, variables={}, storage_options=options)


@pytest.mark.usefixtures("openers")
def test_commands_and_registered_schemes_are_not_globbed() -> None:
    register_opener("mine", open_url)
    urls = ["pipe:cat *.tar", "pipe:ls /", "mine:*", "mine://d/"]
    assert expand(urls) == urls
