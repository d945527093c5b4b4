"""Sidecar files, such as the index of a shard: naming, reading and writing them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wds_datapipes.errors import MissingSidecarError, ShardError, ShardWriteError, SpecError, WdsError
from wds_datapipes.io.compression.formats import SHARD_SUFFIXES
from wds_datapipes.io.openers import known_schemes, local_path, open_url, redact, split_scheme
from wds_datapipes.io.output.sink import open_target
from wds_datapipes.io.urls import explain_path, without_query
from wds_datapipes.redaction.storage_options import raise_alone, redactor_of

#: The maximum size of a sidecar file, so that a server cannot fill the memory.
LARGEST_BYTES = 4 << 30


def sidecar_name(url: str, suffix: str, folder: str | os.PathLike[str] | None = None) -> str:
    """Return the name of a sidecar file: the name of the shard plus a suffix.

    >>> sidecar_name("data/a.tar", ".wdsidx"), sidecar_name("https://host/a.tar?part=1", ".wdsidx", "indexes")
    ('data/a.tar.wdsidx', 'indexes/a.tar.wdsidx')
    >>> sidecar_name("https://host/a.tar?part=1", ".wdsidx")
    'https://host/a.tar.wdsidx?part=1'

    Args:
        url: the shard.
        suffix: appended to the name.
        folder: the folder of the sidecar file; by default, that of the shard.

    Raises:
        ValueError: the shard is a command or standard input and ``folder`` is not given.
    """
    scheme, _ = split_scheme(url)
    if folder is not None:
        path = without_query(redact(url))
        return f"{os.fspath(folder).rstrip('/')}/{path.rstrip('/').rpartition('/')[2]}{suffix}"
    if scheme in ("-", "pipe"):
        raise ValueError(
            f"{redact(url)} has no folder for sidecar files. Pass their folder, or write the shard to a file first"
        )
    path = without_query(url)
    return f"{path}{suffix}{url[len(path) :]}"


def folder_of(url: str) -> str:
    """Return the folder of a file with a trailing slash; "" for a bare name."""
    path = without_query(url)
    return path[: path.rfind("/") + 1]


def within(folder: str, url: str) -> str:
    """Return the name of a file relative to a folder, or its absolute name if it is not in the folder."""
    if folder and url.startswith(folder):
        return url[len(folder) :]
    if split_scheme(url)[0]:
        return url
    path = Path(url).absolute()
    if not split_scheme(folder)[0] and path.is_relative_to(base := Path(folder).absolute()):
        return str(path.relative_to(base))
    return str(path)


def join_name(folder: str, url: str) -> str:
    """Join a folder and a file name, unless the name is absolute."""
    return url if split_scheme(url)[0] or url.startswith("/") else folder + url


def read_sidecar(url: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """Read a whole file.

    Raises:
        MissingSidecarError: the file cannot be read.
    """
    try:
        if (path := local_path(url)) is not None:
            return Path(path).read_bytes()
        options: dict[str, Any] = (
            {} if split_scheme(url)[0] in known_schemes() else {"storage_options": storage_options}
        )
        content = bytearray()
        with open_url(url, **options) as stream:
            while piece := stream.read(1 << 20):
                content += piece
                if len(content) > LARGEST_BYTES:
                    raise MissingSidecarError(
                        f"{redact(url)} has more than {LARGEST_BYTES} bytes. Check that it is the right file"
                    )
        return bytes(content)
    except ShardError as error:
        raise MissingSidecarError(str(error)) from None
    except WdsError:
        raise
    except (OSError, ValueError) as error:  # a ValueError if no file can have this name
        raise_alone(_sidecar_error(url, storage_options, "read", error))


def write_sidecar(url: str, content: bytes, storage_options: Mapping[str, Any] | None = None) -> None:
    """Write a file atomically, replacing an existing one.

    Raises:
        MissingSidecarError: the file cannot be written. An existing file is unchanged.
        SpecError: the file has the name of a shard, as after a glob that a shell has expanded.
    """
    if without_query(url).lower().endswith(SHARD_SUFFIXES):
        raise SpecError(
            f"{redact(url)} is the name of a shard, and would be replaced by another kind of file. Choose another "
            "name, and quote globs, so that the shell does not replace them by names of shards"
        )
    if local_path(url) is None and split_scheme(url)[0] in known_schemes():
        raise MissingSidecarError(f"{redact(url)} cannot be written: its opener only reads. Pass another folder for it")
    try:
        sink = open_target(url, storage_options)
        try:
            sink.write(content)
            sink.finish()
        except BaseException:
            sink.discard()
            raise
    except ShardWriteError as error:
        if isinstance(error.__cause__, OSError):  # of a local file
            raise_alone(_sidecar_error(url, storage_options, "written", error.__cause__))
        raise MissingSidecarError(str(error)) from None


def _sidecar_error(url: str, options: Mapping[str, Any] | None, what: str, error: Exception) -> WdsError:
    hide = redactor_of(options or {}, url)
    if isinstance(error, FileNotFoundError):
        missing = "file" if what == "read" else "folder"
        home = f".{explain_path(url)}" if url[:1] == "~" else ""
        return MissingSidecarError(f"{hide(url)} cannot be {what}: there is no such {missing}{home}")
    reason = hide((isinstance(error, OSError) and error.strerror) or str(error))
    return MissingSidecarError(f"{hide(url)} cannot be {what}: {type(error).__name__}: {reason}")
