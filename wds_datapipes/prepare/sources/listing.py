"""Listings of files, such as tables and recipes: opening them, and resolving the names in them to paths and URLs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO

from wds_datapipes.errors import SampleSourceError, ShardError, ShardOpenError, UnsafeInputError
from wds_datapipes.io.openers import local_path, open_url, split_scheme
from wds_datapipes.io.small_files import folder_of
from wds_datapipes.io.urls import COMMANDS, check_url
from wds_datapipes.prepare.sample_spec import FilePart, Part, SampleSpec, UrlPart, make_spec
from wds_datapipes.redaction import redact, redact_command
from wds_datapipes.samples.keys import KeyRule, first_dot

REMOTE = "a remote table or recipe"


def is_local_url(url: str) -> bool:
    """Whether a file is local, or the output of a local command."""
    return split_scheme(url)[0] in COMMANDS or local_path(url) is not None


def get_extension(path: str) -> str:
    """Return the extension of a path or URL in lower case, without the query of a URL.

    >>> get_extension("a.b/Rows.CSV"), get_extension("https://host/rows.csv?part=1.txt"), get_extension("rows.csv?part")
    ('.csv', '.csv', '.csv?part')
    """
    name = path.partition("?")[0] if split_scheme(path)[0] in ("http", "https") else path
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  of a string


@contextmanager
def open_listing(path: str, storage_options: Mapping[str, Any] | None) -> Iterator[BinaryIO]:
    """Open a table or another list of samples.

    Raises:
        SampleSourceError: the file cannot be read.
    """
    local = local_path(path)
    try:
        with open_url(path, storage_options=storage_options) if local is None else open(local, "rb") as stream:  # noqa: PTH123  a string
            yield stream
    except ShardError as error:
        raise SampleSourceError(str(error)) from None
    except OSError as error:
        raise SampleSourceError(f"The file {redact(path)!r} cannot be read: {error.strerror or error}") from None


class FileLocations:
    """Resolves the file names in a table or recipe.

    A local table may name any file, local or remote. A remote one may name only remote files, so that others cannot
    choose which local files are read.

    Args:
        listing: the path or URL of the table or recipe.
        root: the folder or URL that relative paths start from, by default that of the listing.

    Attributes:
        is_local: whether the listing is local.
    """

    def __init__(self, listing: str, root: str | None) -> None:
        self._scheme, _ = split_scheme(listing)
        self.is_local = is_local_url(listing)
        if root is None:
            root = "" if self._scheme in COMMANDS else folder_of(local_path(listing) or listing)
        self._has_url = local_path(root) is None
        self._root = root if not self._has_url or root.endswith("/") else f"{root}/"

    def resolve(self, name: str, location: str) -> FilePart | UrlPart:
        """Return the file of a name; ``location`` is the origin of the name for messages.

        Raises:
            SampleSourceError: the name is not a file, or not permitted in this listing.
        """
        scheme, _ = split_scheme(name)
        if scheme in COMMANDS:
            raise _location_error(name, location, "a command, not a file. A recipe may have pipe:COMMAND")
        try:
            path = local_path(name)
            if path is None:
                if not self.is_local and (scheme != self._scheme or "::" in name):
                    check_url(name, allow_local_files=False)
                return UrlPart(name)
        except UnsafeInputError:
            raise _location_error(name, location, f"neither in the store of {REMOTE} nor on a network") from None
        except ShardOpenError as error:
            raise SampleSourceError(f"{location}: {error}") from None
        if not self.is_local and "::" in path:  # a chain of file systems, once appended to a URL
            raise _location_error(name, location, f"a chain of file systems, which {REMOTE} cannot name")
        is_absolute = path.startswith("/")
        if self._has_url and not scheme and not is_absolute:
            return UrlPart(self._root + path)
        if not self.is_local and (self._has_url or scheme or is_absolute or ".." in path.split("/")):
            raise _location_error(name, location, f"a local file, which {REMOTE} cannot name")
        return FilePart(os.path.join("" if self._has_url else self._root, path))  # noqa: PTH118  faster than Path


def _location_error(name: str, location: str, problem: str) -> SampleSourceError:
    return SampleSourceError(f"{location} has {redact(name)!r}, which is {problem}")


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
