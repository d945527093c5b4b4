"""Samples from a recipe, which lists files, texts and commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter
from typing import BinaryIO

from wds_datapipes.errors import SampleSourceError, ShardOpenError
from wds_datapipes.io.openers import local_path, split_scheme
from wds_datapipes.io.urls import COMMANDS
from wds_datapipes.prepare.sample_spec import FilePart, Part, SampleSpec, UrlPart, make_spec
from wds_datapipes.redaction import redact
from wds_datapipes.samples.keys import KeyRule, first_dot


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
            lines = (line for raw in stream if (line := raw.decode("utf-8", "surrogateescape")).strip())
            for key, parsed in groupby(map(self._parse_line, lines), itemgetter(0)):
                location = f"the sample {key!r} of {self._path!r}"
                try:
                    fields = [(field, self._part(source)) for _, field, source in parsed]
                    yield make_spec(key, fields, location, location)
                except SampleSourceError as error:
                    yield error

    def _parse_line(self, line: str) -> tuple[str, str, str]:
        """Split a line into key, field and source."""
        name, source = [*line.strip("\r\n").split(None, 1), "", ""][:2]
        found = self._rule(name)
        if found is None or not source:
            problem = "no source after the name" if found is not None else "a name that is not KEY.FIELD"
            shown = f"{name} {redact(source)}".strip()
            raise SampleSourceError(f"The recipe {self._path!r} has the line {shown!r}, with {problem}. Fix it")
        return found[0], found[1].lower(), source

    def _part(self, source: str) -> Part:
        if source.startswith("text:"):
            return source.removeprefix("text:").encode("utf-8", "surrogateescape")
        if source.startswith("pipe:"):
            return UrlPart(source)
        return resolve_file(source, self._root, f"The recipe {self._path!r}")
