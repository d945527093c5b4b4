"""Samples from a recipe, which lists files, texts and commands."""

from __future__ import annotations

import os
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from operator import attrgetter
from typing import BinaryIO, NamedTuple

from wds_datapipes.errors import SampleSourceError, ShardOpenError
from wds_datapipes.io.openers import local_path, split_scheme
from wds_datapipes.io.urls import COMMANDS
from wds_datapipes.redaction import redact
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tools.prepare.sample_spec import FilePart, Part, SampleSpec, UrlPart, make_spec


@contextmanager
def open_listing(path: str) -> Iterator[BinaryIO]:
    """Open a recipe; ``-`` is standard input.

    Raises:
        SampleSourceError: the file cannot be read.
    """
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as stream:  # noqa: PTH123  a string
            yield stream
    except OSError as error:
        raise SampleSourceError(f"The file {redact(path)!r} cannot be read: {error.strerror or error}") from None


def resolve_file(name: str, root: str, location: str) -> FilePart | UrlPart:
    """Return the file for a name in a listing.

    Args:
        name: a path or URL.
        root: the folder or URL that the path is relative to.
        location: where the name comes from, for messages.

    Raises:
        SampleSourceError: the name is not the name of a file.
    """
    scheme, _ = split_scheme(name)
    if scheme in COMMANDS:
        raise SampleSourceError(
            f"{location} has {redact(name)!r}, which is a command, not a file. Recipes support pipe:COMMAND"
        )
    try:
        path = local_path(name)
    except ShardOpenError as error:
        raise SampleSourceError(f"{location}: {error}") from None
    if path is None:
        return UrlPart(name)
    if local_path(root) is not None:
        return FilePart(os.path.join(root, path))  # noqa: PTH118  faster than Path
    return FilePart(path) if scheme or path.startswith("/") else UrlPart(f"{root.rstrip('/')}/{path}")


class RecipeLine(NamedTuple):
    """A line of a recipe: its number, the key and the field of the file, and its source."""

    number: int
    key: str
    field: str
    source: str


class Recipe:
    """Reads the samples of a recipe for ``tarp create``.

    Each line consists of the name of a file in the archive, whitespace, and a source: a path, ``file:PATH``, the URL of
    a file, ``text:STRING``, or ``pipe:COMMAND``, which bash runs. The files of a sample must be on consecutive lines.

    Args:
        path: the recipe, a local file; ``-`` means standard input.
        root: the folder or URL that relative paths refer to, by default the working directory.
        key_rule: splits names into keys and fields.

    Raises:
        SampleSourceError: the recipe cannot be read, or a line is invalid.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, root: str | os.PathLike[str] = "", key_rule: KeyRule = first_dot
    ) -> None:
        self._path, self._root, self._rule = os.fspath(path), os.fspath(root), key_rule

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each sample, or an error if a field is repeated or a source is invalid."""
        with open_listing(self._path) as stream:
            for key, parsed in groupby(map(self._parse_line, _numbered_lines(stream)), attrgetter("key")):
                lines = list(parsed)
                first, last = lines[0].number, lines[-1].number
                where = f"line {first}" if first == last else f"lines {first} to {last}"
                location = f"the sample {key!r} of {self._path!r} ({where})"
                try:
                    fields = [(each.field, self._part(each)) for each in lines]
                    yield make_spec(key, fields, location, location)
                except SampleSourceError as error:
                    yield error

    def _parse_line(self, numbered: tuple[int, str]) -> RecipeLine:
        """Split a line into key, field and source."""
        number, line = numbered
        name, source = [*line.strip("\r\n").split(None, 1), "", ""][:2]
        found = self._rule(name)
        if found is None or not source:
            problem = "no source after the name" if found is not None else "a name that is not KEY.FIELD"
            shown = f"{name} {redact(source)}".strip()
            raise SampleSourceError(f"The recipe {self._path!r} has {shown!r} in line {number}, with {problem}. Fix it")
        return RecipeLine(number, found[0], found[1].lower(), source)

    def _part(self, line: RecipeLine) -> Part:
        source = line.source
        if source.startswith("text:"):
            return source.removeprefix("text:").encode("utf-8", "surrogateescape")
        if source.startswith("pipe:"):
            return UrlPart(source)
        return resolve_file(source, self._root, f"The recipe {self._path!r}, line {line.number},")


def _numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, and their numbers; a byte order mark is no part of the first one."""
    for number, raw in enumerate(stream, 1):
        line = raw.removeprefix(BOM_UTF8 if number == 1 else b"").decode("utf-8", "surrogateescape")
        if line.strip():
            yield number, line
