"""Sinks: targets to which shards are written. A shard receives its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from wds_datapipes.errors import ShardOpenError, ShardWriteError
from wds_datapipes.io.daemon_threads import start_call, wait_for
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.output.command import CommandSink
from wds_datapipes.io.output.local import LocalSink
from wds_datapipes.io.output.stream import StreamSink
from wds_datapipes.io.output.upload import RemoteSink
from wds_datapipes.io.remote.filesystem import RemotePath


class Sink(Protocol):
    """A shard that is being written; the last call is either `finish` or `discard`."""

    #: The requested URL; empty for a stream.
    url: str

    def write(self, *chunks: bytes) -> None:
        """Write all chunks, one after the other.

        Raises:
            ShardWriteError: the bytes cannot be written, or the command that reads them has exited.
        """

    def finish(self) -> None:
        """Finish the shard and wait until it is visible under its name.

        Raises:
            ShardWriteError: finishing failed, or the command has failed.
        """

    def discard(self) -> None:
        """Remove the shard as far as possible; never raises."""


def open_target(
    target: str | os.PathLike[str] | BinaryIO | Sink, storage_options: Mapping[str, Any] | None = None
) -> Sink:
    """Open a sink for a path, a URL, ``pipe:COMMAND``, ``-`` (standard output) or an open binary stream.

    Args:
        target: the path, URL, command or stream.
        storage_options: passed to the file system of a URL.

    Raises:
        ShardWriteError: the target cannot be written.
        UnknownSchemeError: no file system supports the scheme.
        MissingDependencyError: the scheme needs a package that is not installed.
        TypeError: ``target`` has a different type.
    """
    if not isinstance(target, str | os.PathLike):
        return target if isinstance(target, StreamSink) else StreamSink(target)
    url = os.fspath(target)
    scheme, _ = split_scheme(url)
    if scheme == "pipe":
        return CommandSink(url)
    if scheme == "-":
        if (stream := getattr(sys.stdout, "buffer", None)) is None:
            raise ShardWriteError(f"The shard {url!r} is standard output, which does not accept bytes in this process")
        return StreamSink(stream, url)
    path = local_path(url)
    return RemoteSink(url, storage_options or {}) if path is None else LocalSink(url, path)


def remove_file(url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove a shard or one of its sidecar files, if it exists.

    Raises:
        ShardWriteError: it cannot be removed.
    """
    if (path := local_path(url)) is not None:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise ShardWriteError(f"{redact(url)} cannot be removed: {error.strerror}") from error
        return
    remote = RemotePath(url, storage_options)

    def remove_error(error: Exception) -> ShardWriteError:
        return ShardWriteError(f"{remote.name} cannot be removed: ", remote.reason(error))

    with remote.replace_errors(remove_error), contextlib.suppress(FileNotFoundError):
        wait_for(start_call(lambda: remote.filesystem.rm_file(remote.path)), remote.timeouts.block_s)


def size_of(url: str, storage_options: Mapping[str, Any] | None = None) -> int | None:
    """Return the size of a shard in bytes, or ``None`` if it does not exist or has no size.

    Raises:
        ShardOpenError: its store cannot be queried.
    """
    path = local_path(url)
    if path is not None:
        try:
            return os.stat(path).st_size  # noqa: PTH116  a string
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ShardOpenError(f"The file {path!r} cannot be opened: {error.strerror}") from error
    if split_scheme(url)[0] in ("pipe", "-"):
        return None
    remote = RemotePath(url, storage_options)
    with remote.replace_errors(remote.open_error), contextlib.suppress(FileNotFoundError):
        return remote.info().get("size")
    return None
