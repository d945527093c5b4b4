"""List shards: the files that match a glob, and the shards in a directory."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from wds_datapipes.errors import SpecError
from wds_datapipes.io.compression.formats import SHARD_SUFFIXES
from wds_datapipes.io.once_per_host import share_on_host
from wds_datapipes.io.openers import known_schemes, local_path, redact, split_scheme
from wds_datapipes.io.urls import explain_home, is_file, without_query

#: The end of a message about a directory without shards.
NO_SHARDS = f"no file that ends in {', '.join(SHARD_SUFFIXES[:-1])} or {SHARD_SUFFIXES[-1]}"

#: The characters that make a local path a glob.
GLOB_MARKS = frozenset("*?[")


def list_urls(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    """Return the sorted shards of a glob or a directory, or else the URL itself.

    Raises:
        SpecError: no file matches the glob, or the directory has no shards or cannot be listed.
    """
    scheme, _ = split_scheme(url)
    path = local_path(url)
    if path is not None:
        found = local_directory(path) if url.endswith("/") else local_glob(path)
        return [f"file:{quote(name)}" for name in found] if scheme == "file" else found
    # The * is not a wildcard in the query of an HTTP URL.
    is_listed = url.endswith("/") or "*" in without_query(url)
    if not is_listed or scheme in known_schemes():
        return [url]
    return share_on_host(f"lists {redact(url)}", lambda _: list_remote(url, storage_options), url, storage_options)


def local_glob(path: str) -> list[str]:
    """Return the files that match a path, or the file with exactly this name."""
    if GLOB_MARKS.isdisjoint(path) or is_file(path):
        return [path]
    names = glob.glob(path, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
    # Only files without a shard suffix are checked, because stat calls are slow on shared disks.
    found = sorted(name for name in names if name.endswith(SHARD_SUFFIXES) or not Path(name).is_dir())
    if not found:
        folder = re.split(r"[*?[]", path, maxsplit=1)[0].rpartition("/")[0]
        reason = ""
        if folder:
            try:
                os.scandir(folder).close()
            except OSError as error:
                reason = f": the directory {folder!r} cannot be listed: {error.strerror}"
        raise SpecError(f"No file matches {path!r}{relative_to(path)}{reason}")
    return found


def local_directory(path: str) -> list[str]:
    """Return the shards in a local directory."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entry.name for entry in entries if is_shard(entry.name) and entry.is_file())
    except OSError as error:
        raise SpecError(f"The directory {path!r}{relative_to(path)} cannot be listed: {error.strerror}") from error
    if not found:
        raise SpecError(f"The directory {path!r}{relative_to(path)} has {NO_SHARDS}")
    return [path + name for name in found]


def list_remote(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    """Return the remote files that match a glob, or the shards in a remote directory.

    Raises:
        SpecError: there are none, or the URL cannot be listed; the message has no credentials.
    """
    # Imported here because importing fsspec is slow, and local shards do not need it.
    from wds_datapipes.io.remote.filesystem import RemotePath

    remote = RemotePath(url, storage_options)
    is_directory = url.endswith("/")

    def names() -> list[str]:
        if not is_directory:
            return list(remote.filesystem.glob(remote.path))
        files = [each["name"] for each in remote.filesystem.ls(remote.path, detail=True) if each["type"] != "directory"]
        return [name for name in files if is_shard(name.rpartition("/")[2])]

    def list_error(error: Exception) -> SpecError:
        return SpecError(f"{remote.name} cannot be listed: ", remote.reason(error), remote.retry.attempts_text())

    with remote.replace_errors(list_error):
        found = remote.call(names)
    if not found:
        raise SpecError(
            f"The directory {redact(url)} has {NO_SHARDS}" if is_directory else f"No file matches {redact(url)}"
        )
    return sorted(url_of(name, url, remote.path, remote.filesystem) for name in found)


def url_of(name: str, url: str, path: str, filesystem: Any) -> str:
    """Return the URL of a listed file, with the prefix of the requested URL.

    Names listed by an SFTP server, for example, lack the host.
    """
    start = url.rstrip("/").removesuffix(path.rstrip("/"))
    return start + name if start != url.rstrip("/") else str(filesystem.unstrip_protocol(name))


def is_shard(name: str) -> bool:
    """Whether a file is a shard, by its name, and not hidden."""
    return name.endswith(SHARD_SUFFIXES) and not name.startswith(".")


def relative_to(path: str) -> str:
    """Return a note with the working directory, for messages about a path that is relative to it."""
    if home := explain_home(path):
        return f" ({home})"
    return "" if Path(path).is_absolute() else f" (from {Path.cwd()})"
