"""Prefilled caches: shards under their own names that a user or webdataset has put into the folder."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from urllib.parse import quote, unquote

from wds_datapipes.errors import MissingDependencyError, ShardError, TruncatedShardError
from wds_datapipes.io.compression.formats import SHARD_SUFFIXES
from wds_datapipes.io.file_lock import READ_ONLY
from wds_datapipes.io.file_systems import is_web
from wds_datapipes.io.openers import split_scheme
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.io.urls import OpeningURL, is_file, without_query
from wds_datapipes.shard_cache.download import DownloadRequest
from wds_datapipes.shard_cache.entry import DIGITS, UNKNOWN, CopyFacts, Entry, digest_of, is_copy
from wds_datapipes.tar.scanner import ShardScan

Ask: TypeAlias = "Callable[[DownloadRequest], FileFacts]"
"""Returns what the store of a shard says about it."""

LOGGER = logging.getLogger("wds_datapipes")

#: The characters that webdataset does not quote in the name of a command, and the length to which it cuts the name.
UNQUOTED, LONGEST = "_+{}*,-", 128


def own_names(url: str) -> Iterator[str]:
    """Yield the names that a shard may have in a prefilled folder: its path, without its first folders, and its name.

    >>> list(own_names("s3://bucket/train/000.tar")), list(own_names("pipe:cat a.tar"))
    (['train/000.tar', '000.tar'], ['pipe%3Acat%20a.tar'])
    """
    scheme, rest = split_scheme(without_query(url))
    if isinstance(url, OpeningURL) or scheme in ("", "-", "file"):
        return
    if scheme == "pipe":
        yield quote(url, safe=UNQUOTED)[-LONGEST:]
        return
    path = rest.lstrip("/").partition("#")[0]
    parts = PurePosixPath(unquote(path) if is_web(scheme) else path).parts[1:]  # without host or bucket
    if ".." not in parts and not is_copy(parts[-1] if parts else ""):  # the copy of another URL is none of this one
        yield from ("/".join(parts[first:]) for first in range(len(parts)))


class PrefilledShards:
    """The shards that have been put into the folder of a cache, each compared with its store once by each process."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int, int], CopyFacts] = {}

    def adopt(self, entry: Entry, request: DownloadRequest, ask: Ask) -> io.FileIO | None:
        """Return the open file that has been put into the folder for a shard, or None; make it the shard's copy.

        The file must be a complete archive, with the size that the store or the manifest has for the shard, and the
        SHA-256 of the manifest. A file of another kind must have a known size or digest. The copy is a link to the
        file. On a read-only disk, there is no link, and each process compares the file.

        Args:
            entry: the entry of the shard, whose lock the caller holds unless the disk is read-only.
            request: the shard.
            ask: returns what the store says about the shard.

        Raises:
            OSError: the file cannot be read.
        """
        for name in own_names(request.url):
            path = entry.folder / name
            if not is_file(path):
                continue
            found = "it is the copy of another URL" if _has_owner(entry, path) else self._compare(path, request, ask)
            if isinstance(found, CopyFacts):
                LOGGER.info("Reading %s from %s, which was put there", request.name, path)
                return _link(entry, path, name, found)
            LOGGER.warning("%s has the name of %s, but is not used: %s", path, request.name, found)
        return None

    def _compare(self, path: Path, request: DownloadRequest, ask: Ask) -> CopyFacts | str:
        """Compare a file with a shard; return its facts, or the reason why it is no copy of the shard."""
        status = path.stat()
        version = str(path), request.name, status.st_size, status.st_mtime_ns
        if version in self._known:
            return self._known[version]
        answer = ask(request) if request.known.bytes is None or request.asks else UNKNOWN
        size = answer.bytes if request.known.bytes is None else request.known.bytes
        if size not in (None, status.st_size):
            return f"it has {status.st_size} bytes, but the shard has {size}"
        if not path.name.endswith(SHARD_SUFFIXES) and size is None and request.sha256 is None:
            return "neither its store nor a manifest knows its size"
        try:
            sha256 = _digest_archive(path)
        except (ShardError, MissingDependencyError) as error:
            return f"it is not a complete archive ({type(error).__name__})"
        if request.sha256 not in (None, sha256):
            return f"its SHA-256 is {sha256}, not {request.sha256}"
        facts = CopyFacts(request.name, status.st_size, sha256, status.st_mtime_ns, answer)
        self._known[version] = facts
        return facts


def _digest_archive(path: Path) -> str:
    """Return the SHA-256 of a shard, all of whose headers are read unless it contains records."""
    if not path.name.endswith(SHARD_SUFFIXES):
        with io.FileIO(path, "r") as copy:
            return digest_of(copy)
    scan = ShardScan(str(path), digest=True)
    if not sum(1 for _ in scan):  # programs that reserve space first leave zeros, which are an empty archive
        raise TruncatedShardError
    return str(scan.facts["sha256"])


def _has_owner(entry: Entry, path: Path) -> bool:
    """Whether another URL, which ends in the same name, links to a file."""
    end = entry.path.name[DIGITS:]
    names = os.listdir(entry.folder)  # noqa: PTH208  only the names are needed
    others = (name for name in names if name.endswith(end) and is_copy(name) and name != entry.path.name)
    links = (link for name in others if (link := entry.folder / name).is_symlink())
    return any(link.resolve() == path.resolve() for link in links)


def _link(entry: Entry, path: Path, name: str, facts: CopyFacts) -> io.FileIO:
    """Open a file, and let the entry of a shard link to it."""
    copy = io.FileIO(path, "r")
    try:
        entry.remove()  # a link to a file that is gone
        entry.write_facts(facts)
        entry.path.symlink_to(name)
    except OSError as error:
        if error.errno not in READ_ONLY:
            copy.close()
            raise
    return copy
