"""Where the files are that a table or a recipe names: by paths from a folder or a URL, or by URLs of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from wds_datapipes.errors import RefusedURLError, SampleSourceError, ShardOpenError
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.small_files import folder_of
from wds_datapipes.io.url_safety import COMMANDS, refuse_unsafe
from wds_datapipes.prepare.sample_spec import FilePart, UrlPart

__all__ = ["FileLocations", "is_of_this_host"]


#: What may not name everything.
ELSEWHERE = "a table or recipe from elsewhere"


def is_of_this_host(url: str) -> bool:
    """Tell whether somebody of this host has made a file, or makes it by a command."""
    return split_scheme(url)[0] in COMMANDS or local_path(url) is not None


class FileLocations:
    """Finds the files that a table or a recipe names.

    One of this host may name any file, here or in a store. One from elsewhere names files that are there, or on a
    network: which files of this host are read is not for others to say.

    Args:
        origin: the table or the recipe.
        root: the folder, or the URL of one, that paths begin from; that of the origin, if it is not told.
        storage_options: passed to remote file systems.

    Attributes:
        is_ours: whether the origin is of this host.
    """

    def __init__(self, origin: str, root: str | None, storage_options: Mapping[str, Any] | None) -> None:
        self._scheme, _ = split_scheme(origin)
        self.is_ours = is_of_this_host(origin)
        if root is None:
            root = "" if self._scheme in COMMANDS else folder_of(local_path(origin) or origin)
        self._has_url = local_path(root) is None
        self._root = root if not self._has_url or root.endswith("/") else f"{root}/"
        self._storage_options = storage_options

    def part(self, name: str, where: str) -> FilePart | UrlPart:
        """Return the file of a name; ``where`` it stands is for messages.

        Raises:
            SampleSourceError: it is no file, or none that may be named there.
        """
        scheme, _ = split_scheme(name)
        if scheme in COMMANDS:
            raise _location_error(name, where, "a command, and not a file. A recipe may have pipe:COMMAND")
        try:
            path = local_path(name)
            if path is None:
                if not self.is_ours and (scheme != self._scheme or "::" in name):
                    refuse_unsafe(name)
                return UrlPart(name, self._storage_options)
        except RefusedURLError:
            raise _location_error(name, where, f"neither in the store of {ELSEWHERE} nor a file on a network") from None
        except ShardOpenError as error:
            raise SampleSourceError(f"{where}: {error}") from None
        if not self.is_ours and "::" in path:  # which would make a chain of file systems of a URL
            raise _location_error(name, where, f"a chain of file systems, and {ELSEWHERE} cannot name it")
        is_absolute = path.startswith("/")
        if self._has_url and not scheme and not is_absolute:
            return UrlPart(self._root + path, self._storage_options)
        if not self.is_ours and (self._has_url or scheme or is_absolute or ".." in path.split("/")):
            raise _location_error(name, where, f"a file of this host, and {ELSEWHERE} cannot name it")
        return FilePart(os.path.join("" if self._has_url else self._root, path))  # noqa: PTH118  many of them


def _location_error(name: str, where: str, what: str) -> SampleSourceError:
    return SampleSourceError(f"{where} has {redact(name)!r}, which is {what}")
