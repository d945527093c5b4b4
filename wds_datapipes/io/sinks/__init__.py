"""Sinks: targets that shards are written to. A shard gets its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from wds_datapipes.errors import ShardOpenError, ShardWriteError
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.redaction.storage_options import raise_alone

__all__ = ["Sink", "StreamSink", "open_target", "remove_file", "size_of", "standard_output"]


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
        """Finish the shard, and wait until it is visible under its name.

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
        TypeError: ``target`` has another type.
    """
    if not isinstance(target, str | os.PathLike):
        return target if isinstance(target, StreamSink) else StreamSink(target)
    url = os.fspath(target)
    scheme, _ = split_scheme(url)
    if scheme == "pipe":
        from wds_datapipes.io.sinks.command_sink import CommandSink

        return CommandSink(url)
    if scheme == "-":
        return standard_output(url)
    path = local_path(url)
    if path is not None:
        from wds_datapipes.io.sinks.local_sink import LocalSink

        return LocalSink(url, path)
    from wds_datapipes.io.sinks.remote_sink import RemoteSink

    return RemoteSink(url, storage_options or {})


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
    from wds_datapipes.io.remote.filesystem import RemotePath

    remote = RemotePath(url, storage_options)
    try:
        remote.filesystem.rm_file(remote.path)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        raise_alone(ShardWriteError(f"{remote.name} cannot be removed: {remote.reason(error)}"))


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
    from wds_datapipes.io.remote.filesystem import RemotePath

    remote = RemotePath(url, storage_options)
    try:
        size: int | None = remote.info().get("size")
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  every file system has errors of its own
        remote.raise_open_error(error)
    return size


class StreamSink:
    """Writes to an open stream. The bytes of a discarded archive remain in the stream, without an end marker.

    Args:
        stream: an object with a method ``write`` that accepts bytes.
        url: its name in errors.
        close: close the stream at the end; otherwise its owner closes it.
    """

    def __init__(self, stream: Any, url: str = "", *, close: bool = False) -> None:
        if not callable(getattr(stream, "write", None)):
            raise TypeError(f"a shard is written to a path, a URL or a binary stream, not to {stream!r}")
        self.url = url
        self._stream = stream
        self._close = close

    def write(self, *chunks: bytes) -> None:
        """Write all chunks; an unbuffered stream may need several writes for one."""
        for chunk in filter(None, chunks):
            written = self._stream.write(chunk)
            while isinstance(written, int) and written < len(chunk):
                chunk = chunk[written:]
                written = self._stream.write(chunk)

    def finish(self) -> None:
        """Flush the stream."""
        if callable(flush := getattr(self._stream, "flush", None)):
            flush()
        if self._close:
            self._stream.close()

    def discard(self) -> None:
        """Close the stream if the sink owns it; its content remains."""
        if self._close:
            with contextlib.suppress(Exception):
                self._stream.close()


def standard_output(url: str) -> StreamSink:
    """Return the sink of the URL ``-``."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise ShardWriteError(f"The shard {url!r} is standard output, which does not accept bytes in this process")
    return StreamSink(stream, url)
