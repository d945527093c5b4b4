"""Opening shards by URL: dispatches to the opener of the scheme."""

from __future__ import annotations

import io
import multiprocessing
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.errors import ShardOpenError
from wds_datapipes.hints import IN_PROCESS
from wds_datapipes.io.streams import ForwardStream, RawStream
from wds_datapipes.io.urls import (
    STORE_OPTIONS,
    OpeningURL,
    check_url,
    explain_path,
    find_opener,
    is_registered,
    is_remote,
    known_schemes,
    local_path,
    register_opener,
    split_scheme,
)
from wds_datapipes.redaction import redact

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from wds_datapipes.io.remote.remote_file import RemoteFile

__all__ = ["known_schemes", "local_path", "open_parts", "open_url", "redact", "register_opener", "split_scheme"]


def open_url(url: str, /, *, allow_local_files: bool = True, **options: Any) -> BinaryIO:
    """Open a shard for reading, by the scheme of its URL.

    Opens local paths, ``file:`` URLs, ``-`` (standard input), ``pipe:COMMAND``, schemes added by `register_opener`, and
    every ``scheme://`` that fsspec knows.

    Args:
        url: the shard. Percent signs, ``#`` and ``?`` in a local path are part of its name.
        allow_local_files: False opens only files on a network.
        options: passed to the opener, which ignores unknown ones: ``storage_options`` for web servers and fsspec's file
            systems, and ``timeout_s`` (seconds without a byte) and ``retries`` for all stores.

    Returns:
        An unbuffered stream that reads forward, and seeks if its source can. Closing it releases everything it opened.

    Raises:
        ShardOpenError: there is nothing to read at this URL, or access is denied.
        UnknownSchemeError: the scheme has no opener.
        MissingDependencyError: the scheme needs a package that is not installed.
        UnsafeInputError: the URL is a local file, a command, or has a scheme that may read one, and
            ``allow_local_files`` is False.
    """
    check_url(url, allow_local_files=allow_local_files)
    if isinstance(url, OpeningURL):
        return url.opened(allow_local_files=allow_local_files, **options)
    scheme, _ = split_scheme(url)
    stream = find_opener(scheme)(url, **(_users_options(options) if is_registered(scheme) else options))
    if isinstance(stream, io.RawIOBase | io.BufferedIOBase) or (isinstance(stream, io.IOBase) and stream.seekable()):
        return cast(BinaryIO, stream)
    # A registered opener may return any object with a read method, such as the body of an SDK's response. That of
    # botocore is an IOBase whose readinto fails at the end.
    return cast(BinaryIO, ForwardStream(stream, url))


def _users_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for a registered opener: timeouts and retries in the storage options become arguments."""
    options = {name: value for name, value in options.items() if name != "counters" and value is not None}
    given = options.get("storage_options")
    if not given or given.keys().isdisjoint(STORE_OPTIONS):
        return options
    ours = {name: given[name] for name in STORE_OPTIONS if name in given}
    others = {name: value for name, value in given.items() if name not in ours}
    return {**ours, **options, "storage_options": others}


def open_parts(url: str, /, *, allow_local_files: bool = True, **options: Any) -> RemoteFile | None:
    """Open a remote shard for range reads, or return None if it can only be read as a whole.

    Args:
        url: the shard.
        allow_local_files: False opens only files on a network.
        options: see `open_url`; and ``check``, with which no request is sent now (see `RemoteFile`).

    Raises:
        ShardOpenError: there is nothing to read at this URL, or access is denied.
        UnknownSchemeError: the scheme has no opener.
        MissingDependencyError: the scheme needs a package that is not installed.
        UnsafeInputError: the URL is a local file, a command, or has a scheme that may read one, and
            ``allow_local_files`` is False.
    """
    check_url(url, allow_local_files=allow_local_files)
    scheme, _ = split_scheme(url)
    if isinstance(url, OpeningURL) or not is_remote(scheme):
        return None
    from wds_datapipes.io.remote.remote_file import RemoteFile  # imports fsspec

    return RemoteFile.open(url, **options)


def open_path(url: str, /, **_options: object) -> BinaryIO:
    """Open the local file with exactly this name, or the file of a ``file:`` URL, whose escapes are decoded."""
    return open_local(cast(str, local_path(url)), name=url)


def open_local(path: str, *, name: str) -> BinaryIO:
    """Open a file without a buffer, because shard readers have their own; ``name`` is its name in errors."""
    try:
        return Path(path).open("rb", buffering=0)
    except FileNotFoundError as error:
        raise ShardOpenError(
            f"There is no file {name!r}.{explain_path(path)} Check the name, and that the file is on this host"
        ) from error
    except IsADirectoryError as error:
        raise ShardOpenError(
            f"{name!r} is a directory, not a shard. To let ShardList list the shards in it, end the name in a slash"
        ) from error
    except (OSError, ValueError) as error:
        raise ShardOpenError(
            f"The file {name!r} cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from error


#: The standard inputs opened so far: one per process, unless the program replaces ``sys.stdin``; each is read once.
_opened: weakref.WeakSet[io.BufferedIOBase] = weakref.WeakSet()


class _StandardInput(RawStream):
    """Reads standard input and leaves it open."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self._source = source

    def readinto(self, buffer: Buffer, /) -> int:
        return self._source.readinto1(buffer)


def open_standard_input(url: str, /, **_options: object) -> BinaryIO:
    """Open standard input, which can only be read once."""
    if multiprocessing.parent_process() is not None:
        raise ShardOpenError(
            f"The shard {url!r} is standard input, but worker processes have none. To read it, ", IN_PROCESS
        )
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        raise ShardOpenError(f"The shard {url!r} is standard input, but this process has none")
    if source in _opened:
        raise ShardOpenError(
            f"The shard {url!r} is standard input, which can only be read once and was already opened. "
            "Write it to a file to read it more than once"
        )
    _opened.add(source)
    return cast(BinaryIO, _StandardInput(source))
