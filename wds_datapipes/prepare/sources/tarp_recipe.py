"""Recipes of tarp: lines of a name in the archive, and where its content comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from wds_datapipes.errors import SampleSourceError
from wds_datapipes.io.openers import split_scheme
from wds_datapipes.prepare.sample_spec import CommandPart, Part, SampleSpec
from wds_datapipes.prepare.sources.file_locations import FileLocations, is_of_this_host
from wds_datapipes.prepare.sources.table_rows import Slices
from wds_datapipes.samples.keys import KeyRule, first_dot

__all__ = ["Recipe"]


class Recipe:
    """The samples of a recipe, as ``tarp create`` takes it.

    A line is the name of a file in the archive, blanks or a tab, and a source: a path, ``file:PATH``, the URL of a
    file, ``text:STRING`` or ``pipe:COMMAND``, which is run by bash. Files of one sample stand in neighbouring lines.

    Args:
        path: the recipe or its URL; ``-`` is standard input. One that is not of this host runs no commands.
        root: the folder, or the URL of one, that paths begin from. If it is not told, it is that of the process, or
            that of a recipe from elsewhere.
        key_rule: splits names into keys and fields.
        storage_options: passed to remote file systems.

    Raises:
        SampleSourceError: it cannot be read, or a line is none of these.
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
        self._rule = key_rule
        self._places = FileLocations(recipe, folder if folder or is_of_this_host(recipe) else None, storage_options)
        self._slices = Slices(recipe, storage_options)
        try:
            for begin, end in self._samples():
                self._slices.add(begin, end)
        except BaseException:
            self._slices.close()
            raise

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._slices)

    def draft(self, number: int) -> SampleSpec:
        """Return what a sample is to be made of.

        Raises:
            SampleSourceError: two of its lines are for one field, or a line has a source that is not known.
        """
        parts: dict[str, Part] = {}
        key = ""
        for line in filter(str.strip, self._slices.text(number).split("\n")):
            key, field, source = self._parsed(line)
            if field in parts:
                raise SampleSourceError(f"The recipe {self._slices.path!r} has {key}.{field} twice. Remove a line")
            parts[field] = self._part(source)
        return SampleSpec(key, parts, f"the sample {key!r} of {self._slices.path!r}")

    def close(self) -> None:
        """Close the recipe."""
        self._slices.close()

    def _samples(self) -> Iterator[tuple[int, int]]:
        """Yield where the lines of each sample begin and end."""
        latest = ""
        begin = at = 0
        for end, raw in self._slices.lines():
            line = raw.decode("utf-8", "surrogateescape")
            if line.strip():
                key, _, _ = self._parsed(line)
                if latest and key != latest:
                    yield begin, at
                if key != latest:
                    latest, begin = key, at
            at = end
        if latest:
            yield begin, at

    def _parsed(self, line: str) -> tuple[str, str, str]:
        """Return the key, the field and the source of a line."""
        name, source = [*line.strip("\r\n").split(None, 1), "", ""][:2]
        found = self._rule(name)
        if found is None or not source:
            what = "no source behind the name" if found is not None else "a name that is not of the form KEY.FIELD"
            raise SampleSourceError(
                f"The recipe {self._slices.path!r} has the line {line.strip()!r}, with {what}. Mend it"
            )
        return found[0], found[1].lower(), source

    def _part(self, source: str) -> Part:
        if source.startswith("text:"):
            return source.removeprefix("text:").encode("utf-8", "surrogateescape")
        scheme, rest = split_scheme(source)
        if scheme == "pipe" and self._places.is_ours:
            return CommandPart(rest)
        if scheme == "pipe":
            raise SampleSourceError(
                f"The recipe {self._slices.path!r} is not of this host, and has the command {rest!r}. Copy it here, "
                f"read it, and use the copy if it may run commands"
            )
        return self._places.part(source, f"The recipe {self._slices.path!r}")
