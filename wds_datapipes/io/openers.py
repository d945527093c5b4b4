"""Opening shards by URL: dispatches to the opener of the scheme."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.io.local import local_path
from wds_datapipes.io.remote.resuming_stream import ForwardStream
from wds_datapipes.io.remote.timeouts import STORE_OPTIONS
from wds_datapipes.io.url_safety import check_url
from wds_datapipes.io.urls import (
    OpeningURL,
    find_opener,
    is_registered,
    is_remote,
    known_schemes,
    register_opener,
    split_scheme,
)
from wds_datapipes.redaction import redact

if TYPE_CHECKING:
    from wds_datapipes.io.remote.remote_file import RemoteFile

__all__ = ["known_schemes", "local_path", "open_parts", "open_url", "redact", "register_opener", "split_scheme"]


def open_url(url: str, /, *, allow_local_files: bool = True, **options: Any) -> BinaryIO:
    """Open a shard for reading, by the scheme of its URL.

    Opens local paths, ``file:`` URLs, ``-`` (standard input), ``pipe:COMMAND``, schemes added by `register_opener`, and
    every ``scheme://`` that fsspec knows.

    Args:
        url: the shard. Percent signs, ``#`` and ``?`` in a local path are part of its name.
        allow_local_files: False opens only files on a network.
        options: passed to the opener, which ignores those that it does not know: ``storage_options`` for web servers
            and fsspec's file systems, ``timeout_s`` (seconds without a byte) and ``retries`` for all stores.

    Returns:
        An unbuffered stream that reads forward, and seeks if its source does. Closing it releases everything it opened.

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
    # botocore is an IOBase, and its readinto fails at the end.
    return cast(BinaryIO, ForwardStream(stream, url))


def _users_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for a registered opener: time-outs and retries in the storage options become arguments."""
    options.pop("counters", None)
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
        options: see `open_url`.

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
