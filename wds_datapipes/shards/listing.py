"""Listing shards: the files that match a glob, and the shards in a directory; and drawing shards at random."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count as count_from
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from wds_datapipes.errors import EmptySourceError, PatternError
from wds_datapipes.io.openers import known_schemes, local_path, redact, split_scheme

__all__ = ["GLOB_MARKS", "SHARD_SUFFIXES", "list_urls", "resample_wds_shards"]

#: The names of shards in a directory.
SHARD_SUFFIXES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tar.zst", ".tbz2", ".tgz", ".txz", ".tzst")

#: What makes a local path a glob.
GLOB_MARKS = frozenset("*?[")


def list_urls(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    """The shards that a URL stands for, sorted: itself, unless it is a glob or a directory.

    Raises:
        PatternError: nothing matches the glob, or the directory has no shards or cannot be listed.
    """
    scheme, _ = split_scheme(url)
    path = local_path(url)
    if path is not None:
        found = local_directory(path) if url.endswith("/") else local_glob(path)
        return [f"file:{quote(name)}" for name in found] if scheme == "file" else found
    if scheme not in known_schemes():
        if url.endswith("/"):
            return remote_directory(url, storage_options)
        # In the query of a web address a star is a star.
        if "*" in (url.partition("?")[0] if scheme in ("http", "https") else url):
            return remote_glob(url, storage_options)
    return [url]


def local_glob(path: str) -> list[str]:
    """The files that match, or the one file that has this very name."""
    if GLOB_MARKS.isdisjoint(path) or Path(path).is_file():
        return [path]
    names = glob.glob(path, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
    # A directory is no shard. What is named like a shard is not looked at: on a shared disk that takes its time.
    found = sorted(name for name in names if name.endswith(SHARD_SUFFIXES) or not Path(name).is_dir())
    if not found:
        raise PatternError(f"No file matches {path!r}{seen_from(path)}")
    return found


def local_directory(path: str) -> list[str]:
    """The shards in a directory."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entry.name for entry in entries if is_shard(entry.name) and entry.is_file())
    except OSError as error:
        raise PatternError(f"The directory {path!r}{seen_from(path)} cannot be listed: {error.strerror}") from error
    if not found:
        raise PatternError(f"In the directory {path!r}{seen_from(path)} {nothing_ends_so()}")
    return [path + name for name in found]


def remote_glob(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    """The remote files that match."""
    filesystem, path, names = ask_store(url, storage_options, lambda filesystem, path: filesystem.glob(path))
    if not names:
        raise PatternError(f"No file matches {redact(url)}")
    return sorted(address(name, url, path, filesystem) for name in names)


def remote_directory(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    """The shards in a remote directory."""
    filesystem, path, entries = ask_store(
        url, storage_options, lambda filesystem, path: filesystem.ls(path, detail=True)
    )
    names = [entry["name"] for entry in entries if entry["type"] != "directory"]
    found = sorted(name for name in names if is_shard(name.rpartition("/")[2]))
    if not found:
        raise PatternError(f"In the directory {redact(url)} {nothing_ends_so()}")
    return [address(name, url, path, filesystem) for name in found]


def ask_store(
    url: str, storage_options: Mapping[str, Any], ask: Callable[[Any, str], list[Any]]
) -> tuple[Any, str, list[Any]]:
    """Return the file system of a URL, the path in it, and what it lists there.

    Raises:
        PatternError: it cannot be listed; the message has no credentials.
    """
    # Imported here, because fsspec takes time that a list of local shards need not spend.
    from wds_datapipes.io.redaction import raise_alone
    from wds_datapipes.io.remote.filesystem import reason, redactor_of, remote_filesystem
    from wds_datapipes.io.remote.timeouts import StoreTimeouts

    options, waiting = StoreTimeouts.split(storage_options)
    hide, retry = redactor_of(options), waiting.retry_policy()
    filesystem, path = remote_filesystem(url, options, waiting.timeout_s, retry)
    try:
        found = retry.call(lambda: ask(filesystem, path), f"{hide(url)} cannot be listed")
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        told = f"{reason(error, split_scheme(url)[0], hide)}{retry.attempts_text()}"
        raise_alone(PatternError(f"{hide(url)} cannot be listed: {told}"))
    return filesystem, path, found


def address(name: str, url: str, path: str, filesystem: Any) -> str:
    """Return the URL of a file that a file system has listed, with the prefix of the URL that was asked for.

    The host of an sftp: URL is there, and not in the names.
    """
    start = url.rstrip("/").removesuffix(path.rstrip("/"))
    if start != url.rstrip("/"):
        return start + name
    return str(filesystem.unstrip_protocol(name))


def is_shard(name: str) -> bool:
    """Whether a file in a directory is a shard by its name; a hidden file is not."""
    return name.endswith(SHARD_SUFFIXES) and not name.startswith(".")


def nothing_ends_so() -> str:
    """Return the message for a directory without shards."""
    return f"no file ends in {', '.join(SHARD_SUFFIXES[:-1])} or {SHARD_SUFFIXES[-1]}"


def seen_from(path: str) -> str:
    """Where a relative path begins."""
    return "" if Path(path).is_absolute() else f" (from {Path.cwd()})"


def resample_wds_shards(
    source: Iterable[str], *, rng: Random, count: int | None, on_round: Callable[[], None]
) -> Iterator[str]:
    """Yield ``count`` URLs, or URLs forever, each drawn by ``rng`` from all URLs of ``source``.

    Args:
        source: yields URLs.
        rng: draws.
        count: how many to draw; None is without limit.
        on_round: called whenever as many were drawn as there are.

    Raises:
        EmptySourceError: there is none to draw.
    """
    urls = list(source)
    if not urls:
        raise EmptySourceError("resample_wds_shards was given no shard to draw: its source is empty")
    for number in count_from() if count is None else range(count):
        if number % len(urls) == 0:
            on_round()
        yield urls[int(rng.random() * len(urls))]
