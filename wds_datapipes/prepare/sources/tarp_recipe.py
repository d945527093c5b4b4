"""Recipes of tarp: lines with the name of a file in the archive and the source of its content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.io.openers import split_scheme
from wds_datapipes.prepare.sample_spec import Part, SampleSpec, UrlPart, make_spec
from wds_datapipes.prepare.sources.listing import FileLocations, is_local_url, open_listing
from wds_datapipes.redaction import redact, redact_command
from wds_datapipes.samples.keys import KeyRule, first_dot


class Recipe:
    """The samples of a recipe for ``tarp create``.

    Each line has the name of a file in the archive, whitespace, and a source: a path, ``file:PATH``, the URL of a file,
    ``text:STRING`` or ``pipe:COMMAND``, which bash runs. The files of a sample are on consecutive lines.

    Args:
        path: the recipe or its URL; ``-`` is standard input. A remote recipe cannot run commands.
        root: the folder or URL that relative paths start from, by default the working directory for a local recipe, and
            the folder of a remote one.
        key_rule: splits names into keys and fields.
        storage_options: passed to the file system of the recipe.

    Raises:
        SampleSourceError: the recipe cannot be read, or a line is invalid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] = "",
        key_rule: KeyRule = first_dot,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        recipe, folder = os.fspath(path), os.fspath(root)
        self._rule, self._path, self._storage_options = key_rule, recipe, storage_options
        self._shown = f"The recipe {redact(recipe)!r}"
        self._locations = FileLocations(recipe, folder if folder or is_local_url(recipe) else None)

    def __iter__(self) -> Iterator[SampleSpec | Exception]:
        """Yield the spec of each sample, or an error if a field is repeated, or a line has an unknown source."""
        with open_listing(self._path, self._storage_options) as stream:
            lines = (line for raw in stream if (line := raw.decode("utf-8", "surrogateescape")).strip())
            for key, parsed in groupby(map(self._parse_line, lines), itemgetter(0)):
                location = f"the sample {key!r} of {redact(self._path)!r}"
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
            problem = "no source after the name" if found is not None else "a name that is not of the form KEY.FIELD"
            shown = f"{name} {redact(source)}".strip()
            raise SampleSourceError(f"{self._shown} has the line {shown!r}, with {problem}. Fix it")
        return found[0], found[1].lower(), source

    def _part(self, source: str) -> Part:
        if source.startswith("text:"):
            return source.removeprefix("text:").encode("utf-8", "surrogateescape")
        scheme, rest = split_scheme(source)
        if scheme != "pipe":
            return self._locations.resolve(source, self._shown)
        if self._locations.is_local:
            return UrlPart(source)
        raise SampleSourceError(
            f"{self._shown} is remote and has the command {redact_command(rest)!r}. Copy it to this host, review it, "
            f"and use the copy to run its commands"
        )
