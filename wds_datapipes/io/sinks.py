"""Sinks: targets to which shards are written. A shard receives its name only when it is complete."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]  # it carries no types

from wds_datapipes.errors import ShardOpenError, ShardWriteError
from wds_datapipes.io.call_threads import TooSlowError, start_call, wait_for
from wds_datapipes.io.file_lock import AtomicFile
from wds_datapipes.io.openers import local_path, redact, split_scheme
from wds_datapipes.io.remote.filesystem import RemotePath, silent_after
from wds_datapipes.io.remote.fsspec_file import BLOCK_TIMEOUTS
from wds_datapipes.io.remote.http import is_web
from wds_datapipes.io.shell_process import STDERR_TAIL_BYTES, ShellProcess, describe_exit, describe_failure
from wds_datapipes.io.urls import explain_path
from wds_datapipes.redaction import redact_command
from wds_datapipes.system import write_chunks

T = TypeVar("T")

LOGGER = logging.getLogger("wds_datapipes")


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
        return ShardWriteError(f"{remote.name} cannot be removed: {remote.reason(error)}")

    with remote.replace_errors(remove_error), contextlib.suppress(FileNotFoundError):
        wait_for(start_call(lambda: remote.filesystem.rm_file(remote.path)), BLOCK_TIMEOUTS * remote.timeout_s)


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


class StreamSink:
    """Writes to an open stream. The bytes of a discarded archive remain in the stream, without an end marker.

    Args:
        stream: an object with a method ``write`` that accepts bytes.
        url: its name in errors.
        close: close the stream at the end; otherwise, its owner closes it.
    """

    def __init__(self, stream: Any, url: str = "", *, close: bool = False) -> None:
        if not callable(getattr(stream, "write", None)):
            raise TypeError(f"a shard is written to a path, a URL or a binary stream, not to {stream!r}")
        self.url = url
        self._stream = stream
        self._close = close
        self._written = 0

    def write(self, *chunks: bytes) -> None:
        """Write all chunks; an unbuffered stream may need several writes for one."""
        for chunk in filter(None, chunks):
            written = self._stream.write(chunk)
            while isinstance(written, int) and written < len(chunk):
                self._written += written
                chunk = chunk[written:]
                written = self._stream.write(chunk)
            self._written += len(chunk)

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


#: The number of chunks that the system writes at once (IOV_MAX, at least 16 by POSIX, and 1024 on Linux and macOS).
MAX_CHUNKS = 1024


class LocalSink:
    """Writes to a temporary file in the same folder and renames it.

    An existing path that is not a regular file, such as a named pipe, is written directly.
    """

    def __init__(self, url: str, path: str) -> None:
        self.url = url
        self._written = 0
        self._file: AtomicFile | None = None
        target = Path(path)
        try:
            target = target.resolve()  # a symbolic link stays; its target is replaced
            if target.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            if target.exists() and not target.is_file():
                self._stream = cast(io.RawIOBase, target.open("wb", buffering=0))
            else:
                self._file = AtomicFile(str(target), buffer_bytes=0)
                self._stream = cast(io.RawIOBase, self._file.stream)
        except (OSError, ValueError) as error:
            missing = [str(folder) for folder in (Path(path).parent, target.parent) if not folder.is_dir()]
            if isinstance(error, FileNotFoundError) and missing:
                what = explain_path(missing[0]) if missing[0][:1] == "~" else " Create it first"
                error.strerror = f"there is no folder {missing[0]!r}.{what}"
            raise self._failure(error) from error

    def write(self, *chunks: bytes) -> None:
        """Write all chunks with as few system calls as possible."""
        rest = [memoryview(chunk) for chunk in chunks if chunk]
        try:
            while rest:
                count = write_chunks(self._stream.fileno(), rest[:MAX_CHUNKS])
                self._written += count
                while rest and count >= len(rest[0]):
                    count -= len(rest.pop(0))
                if count:
                    rest[0] = rest[0][count:]
        except OSError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        """Sync the file and rename it."""
        try:
            if self._file is None:
                self._stream.close()
            else:
                self._file.finish()
        except OSError as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        if self._file is not None:
            self._file.discard()
        else:
            self._stream.close()

    def _failure(self, error: OSError | ValueError) -> ShardWriteError:
        reason = getattr(error, "strerror", None) or str(error)
        state = "The partial file was removed" if self._file is not None else "The output is incomplete"
        after = f", after {self._written} bytes. {state}" if self._written else ""
        return ShardWriteError(f"The shard {self.url!r} cannot be written: {reason}{after}")


class CommandSink(StreamSink):
    """Runs a shell command with ``pipefail`` and writes to its standard input.

    The shard is complete if the command exits with status 0 after the end of its input. If the shard is discarded, or
    this process is killed, the process group of the command is killed before it sees the end of its input, so that it
    never mistakes a part for the whole. The files that the command has written remain; let it write to a temporary
    name, as in ``pipe:cat > x.part && mv x.part x``.
    """

    def __init__(self, url: str) -> None:
        _, self._command = split_scheme(url)
        if not self._command.strip():
            raise ShardWriteError(f"{url!r} contains no command. Write it after the colon, as in pipe:cat > 000.tar")
        # A file, unlike a pipe, needs no reader. The error of a failed command quotes its end.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the command
        try:
            self._process = ShellProcess(self._command, feeds=True, stderr=self._stderr)
        except (OSError, ValueError) as error:
            self._stderr.close()
            raise ShardWriteError(
                f"The command {redact_command(self._command)!r} cannot be started: {error}"
            ) from error
        super().__init__(self._process.stdin, url)

    def write(self, *chunks: bytes) -> None:
        """Write all chunks; raise an error if the command stops reading."""
        try:
            super().write(*chunks)
        except BrokenPipeError:
            self._end()
            raise ShardWriteError(self._failure_text("stopped reading and ")) from None

    def finish(self) -> None:
        """Close the input of the command and wait for it to exit."""
        self._end()
        if self._process.returncode != 0:
            raise ShardWriteError(self._failure_text())
        self._stderr.close()

    def discard(self) -> None:
        """Kill the command and its child processes."""
        if self._process.returncode is None:
            self._process.kill()
        self._stderr.close()

    def _end(self) -> None:
        self._process.finish_input()
        self._process.wait()

    def _failure_text(self, before: str = "") -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        stderr = self._stderr.read()
        self._stderr.close()
        what = f"{before}{describe_exit(self._process.wait())} after it was sent {self._written} bytes"
        return describe_failure(self._command, what, stderr)


#: Part size of multipart uploads, in bytes. S3 allows 10,000 parts: 160 GB.
PART_BYTES = 16 << 20


class RemoteSink:
    """Uploads to an object store; on other file systems, writes under a temporary name and renames.

    Stores such as S3 and Google Cloud Storage make an upload visible only when it is finished and can abort it. On
    other file systems, the file has a temporary name in the same folder.

    Args:
        url: ``scheme://...``.
        storage_options: passed to the file system, such as credentials and an endpoint. Never printed.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._written = 0
        if is_web(split_scheme(url)[0]):
            raise ShardWriteError(
                f"{redact(url)} cannot be written: web servers differ in how they accept uploads. Use a command "
                f"for your server, such as pipe:curl -fsS -T - URL"
            )
        self._remote = remote = RemotePath(url, storage_options)
        self._part = ""
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        with remote.replace_errors(self._failure):
            self._file = self._call(self._open)

    def write(self, *chunks: bytes) -> None:
        """Write all chunks, a part at a time."""
        with self._remote.replace_errors(self._failure):
            for chunk in chunks:
                self._waiting.append(chunk)
                self._waiting_bytes += len(chunk)
                self._written += len(chunk)
                if self._waiting_bytes >= PART_BYTES:
                    self._call(self._send, 1 + self._waiting_bytes // PART_BYTES)

    def finish(self) -> None:
        """Finish the upload, or rename the file."""
        with self._remote.replace_errors(self._failure):
            self._call(self._close, 2)

    def discard(self) -> None:
        """Abort the upload, or remove the file."""
        with contextlib.suppress(Exception):
            self._call(self._remove)

    def _call(self, call: Callable[[], T], parts: int = 1) -> T:
        """Call a function of the store's library, which may block, or retry, for any length of time.

        Raises:
            TooSlowError: it takes longer than ten times the timeout for each part.
        """
        future, most_s = start_call(call), parts * BLOCK_TIMEOUTS * self._remote.timeout_s
        warned_s = min(silent_after(self._remote.timeout_s), most_s)
        try:
            return wait_for(future, warned_s)
        except TooSlowError:
            if warned_s >= most_s:
                raise
            LOGGER.warning(
                "Writing %s takes long: no success for %.0f s, given up after %.0f s",
                self._remote.name,
                warned_s,
                most_s,
            )
        return wait_for(future, most_s - warned_s)

    def _open(self) -> Any:
        filesystem, path = self._remote.filesystem, self._remote.path
        self._part = f"{path}.{secrets.token_hex(8)}.part"
        file = filesystem.open(self._part, "wb", block_size=PART_BYTES)
        if not _can_discard(file):
            return file
        _abandon(file)  # nothing was sent yet
        self._part = ""
        return filesystem.open(path, "wb", block_size=PART_BYTES)

    def _send(self) -> None:
        chunks, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for chunk in chunks:
            self._file.write(chunk)

    def _close(self) -> None:
        self._send()
        try:
            self._file.close()
        except Exception as error:
            if not self._was_completed(error):
                raise
            with contextlib.suppress(Exception):  # the upload does not exist any more
                _abandon(self._file)
        if self._part:
            self._remote.filesystem.mv(self._part, self._remote.path)

    def _was_completed(self, error: Exception) -> bool:
        """Whether S3 has finished the upload, but its answer was lost, and it does not know the upload any more."""
        if not (isinstance(error, FileNotFoundError) and getattr(self._file, "parts", None)):
            return False
        self._remote.forget_listing()
        with contextlib.suppress(FileNotFoundError):
            return bool(self._remote.filesystem.info(self._remote.path).get("size") == self._written)
        return False

    def _remove(self) -> None:
        with contextlib.suppress(Exception):
            if not self._part:
                _abandon(self._file)
                return
            self._file.close()
        self._remote.filesystem.rm(self._part)

    def _failure(self, error: Exception) -> ShardWriteError:
        message = self._remote.reason(error)
        return ShardWriteError(f"{self._remote.name} cannot be written: {message}, after {self._written} bytes")


def _can_discard(file: Any) -> bool:
    """Whether a file is invisible until it is closed and its upload can be aborted."""
    kind = type(file)
    return isinstance(file, AbstractBufferedFile) and kind.discard is not AbstractBufferedFile.discard


def _abandon(file: Any) -> None:
    """Abort an upload and mark the file as closed, so that its garbage collection sends nothing more."""
    try:
        file.discard()
    finally:
        file.closed = True
