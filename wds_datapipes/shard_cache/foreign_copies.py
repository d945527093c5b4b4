"""Foreign copies: files under webdataset's names, put into the folder by its cache or by a user."""

from __future__ import annotations

import fcntl
import io
import logging
import os
from pathlib import Path
from stat import S_ISREG
from urllib.parse import quote, urlsplit

from wds_datapipes.errors import MissingDependencyError, ShardError, ShardOpenError
from wds_datapipes.io.file_lock import READ_ONLY
from wds_datapipes.io.openers import local_path
from wds_datapipes.shard_cache.download import DownloadRequest
from wds_datapipes.shard_cache.entry import CopyFacts, Entry, digest_of, entries
from wds_datapipes.tar.scanner import ShardScan

LOGGER = logging.getLogger("wds_datapipes")

#: The schemes for which webdataset uses the last part of the URL as a name; for others, the whole URL, quoted.
BY_LAST_PART = {"http", "https", "ftp", "ftps", "gs", "s3", "ais"}
#: The characters that it does not quote, and the length to which it truncates names.
UNQUOTED, LONGEST = "_+{}*,-", 128


def webdataset_name(url: str) -> str | None:
    """Return the name of a shard's copy in webdataset's cache; None if it would not cache the shard.

    >>> webdataset_name("https://host/train/000.tar?sig=1"), webdataset_name("pipe:cat a.tar")
    ('000.tar', 'pipe%3Acat%20a.tar')
    """
    if local_path(url) is not None:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    name = parts.path.rpartition("/")[2] if parts.scheme in BY_LAST_PART else quote(url, safe=UNQUOTED)[-LONGEST:]
    return None if name in ("", ".", "..") else name


def adopt(folder: Path, entry: Entry, request: DownloadRequest) -> io.FileIO | None:
    """Return the file under webdataset's name, open and pinned, if it is a copy of the shard.

    The name contains neither host nor folder, so the file must be a complete archive with the size of the shard, and
    the SHA-256 of the manifest if there is one. A link to the file becomes the copy; no other URL may link to it.

    Args:
        folder: the folder of the cache.
        entry: the entry of the shard; its lock is held, unless the disk is read-only.
        request: the shard.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        name = webdataset_name(request.url)
        if name is None:
            return None
        copy = io.FileIO(folder / name, "r")
    except (FileNotFoundError, IsADirectoryError, ValueError):  # or no file can have this name
        return None
    try:
        fcntl.flock(copy, fcntl.LOCK_SH)
        found = (
            "another URL has the same name" if _has_owner(folder, name, entry) else _compare_with_shard(copy, request)
        )
        if isinstance(found, str):
            LOGGER.warning("%s has webdataset's name for %s, but is not used: %s", folder / name, request.name, found)
            copy.close()
            return None
        try:
            entry.remove()  # an old link
            entry.write_facts(found)
            entry.path.symlink_to(name)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
        LOGGER.info("Reading %s from %s, which has webdataset's name for it", request.name, folder / name)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def _has_owner(folder: Path, name: str, entry: Entry) -> bool:
    """Whether a file is a copy of another shard."""
    others = (each.path for each in entries(folder) if each.digest != entry.digest)
    return any(path.is_symlink() and os.readlink(path) == name for path in others)  # noqa: PTH115  a string


def _compare_with_shard(copy: io.FileIO, request: DownloadRequest) -> str | CopyFacts:
    """Compare a file with a shard; return its facts, or the reason why it is not a copy of the shard."""
    status = os.fstat(copy.fileno())
    if not S_ISREG(status.st_mode):
        return "it is not a regular file"
    size = None
    try:
        size = request.find_size()
    except ShardOpenError as error:
        LOGGER.warning("The size of a copy cannot be compared with that of its shard: %s", error)
    if size not in (None, status.st_size):
        return f"it has {status.st_size} bytes, and the shard has {size}"
    found = digest_of(copy)
    if request.sha256 not in (None, found):
        return f"its SHA-256 is {found}, not {request.sha256}"
    try:
        ShardScan(f"/proc/self/fd/{copy.fileno()}", ignore_zeros=True).finish()
    except (ShardError, MissingDependencyError) as error:
        return f"it is not a complete archive ({type(error).__name__})"
    return CopyFacts(request.name, status.st_size, found, status.st_mtime_ns)
