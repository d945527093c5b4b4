"""Opening shards by URL: dispatches to the opener of the scheme."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.io.local import local_path
from wds_datapipes.io.redaction import redact
from wds_datapipes.io.remote.resuming_stream import ForwardStream
from wds_datapipes.io.remote.timeouts import OURS
from wds_datapipes.io.url_safety import refuse_unsafe
from wds_datapipes.io.urls import (
    OpeningURL,
    find_opener,
    is_registered,
    is_remote,
    known_schemes,
    register_opener,
    split_scheme,
)

if TYPE_CHECKING:
    from wds_datapipes.io.remote.range_sources import RangeSource

__all__ = ["known_schemes", "local_path", "open_parts", "open_url", "redact", "register_opener", "split_scheme"]


def open_url(url: str, /, *, safe: bool = False, **options: Any) -> BinaryIO:
    """Open a shard for reading, by the scheme of its URL.

    A local path, ``file:`` URL, ``-`` (standard input), ``pipe:COMMAND``, a scheme of `register_opener`, or any
    ``scheme://`` that fsspec knows.

    Args:
        url: what to open. Percent signs, ``#`` and ``?`` in a local path are part of its name.
        safe: open nothing but files on a network.
        options: passed to the opener, which takes those that it knows: ``storage_options`` is for web servers and file
            systems of fsspec, ``timeout_s`` (seconds without a byte) and ``retries`` for all stores.

    Returns:
        An unbuffered stream that reads forward, and seeks where its source does. Close it; it closes all it opened.

    Raises:
        ShardOpenError: there is nothing to read at this URL, or it may not be read.
        UnknownSchemeError: nothing answers for the scheme.
        MissingDependencyError: the scheme needs a package that is not installed.
        RefusedURLError: with ``safe``, it is a local file, a command, or of a scheme that could become one.
    """
    if safe:
        refuse_unsafe(url)
        if isinstance(url, OpeningURL):
            return url.opened(safe=True, **options)
    if isinstance(url, OpeningURL):
        return url.opened(**options)
    scheme, _ = split_scheme(url)
    stream = find_opener(scheme)(url, **(_with_waiting(options) if is_registered(scheme) else options))
    if isinstance(stream, io.IOBase):
        return stream
    # An opener of a user may return anything that has a read method, such as the body of an SDK's response.
    return cast(BinaryIO, ForwardStream(stream, url))


def _with_waiting(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as an opener of the user takes them: what is ours of the storage options are arguments."""
    given = options.get("storage_options")
    if not given or given.keys().isdisjoint(OURS):
        return options
    ours = {name: given[name] for name in OURS if name in given}
    others = {name: value for name, value in given.items() if name not in ours}
    return {**ours, **options, "storage_options": others}


def open_parts(url: str, /, *, safe: bool = False, **options: Any) -> RangeSource | None:
    """Open a remote shard for reading ranges, or return None if it can only be read whole.

    Args:
        url: what to open.
        safe: open nothing but files on a network.
        options: see `open_url`.

    Raises:
        ShardOpenError: there is nothing to read at this URL, or it may not be read.
        UnknownSchemeError: nothing answers for the scheme.
        MissingDependencyError: the scheme needs a package that is not installed.
        RefusedURLError: with ``safe``, it is a local file, a command, or of a scheme that could become one.
    """
    if safe:
        refuse_unsafe(url)
    scheme, _ = split_scheme(url)
    if isinstance(url, OpeningURL) or not is_remote(scheme):
        return None
    from wds_datapipes.io.remote.range_sources import open_remote_parts  # which imports fsspec

    return open_remote_parts(url, **options)
