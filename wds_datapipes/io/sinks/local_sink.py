"""Sink that writes to a local file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import cast

from wds_datapipes.errors import ShardWriteError
from wds_datapipes.io.atomic_file import AtomicFile

#: The number of chunks that the system writes at once (IOV_MAX, at least 16 by POSIX, and 1024 on Linux and macOS).
MAX_CHUNKS = 1024


class LocalSink:
    """Writes to a temporary file in the same folder, and renames it.

    An existing path that is not a regular file, such as a named pipe, is written directly.
    """

    def __init__(self, url: str, path: str) -> None:
        self.url = url
        self._written = 0
        self._file: AtomicFile | None = None
        try:
            target = Path(path).resolve()  # a symbolic link stays, and its target is replaced
            if target.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            if target.exists() and not target.is_file():
                self._stream = cast(io.RawIOBase, target.open("wb", buffering=0))
            else:
                self._file = AtomicFile(str(target), buffer_bytes=0)
                self._stream = cast(io.RawIOBase, self._file.stream)
        except FileNotFoundError as error:
            missing = [str(folder) for folder in (Path(path).parent, target.parent) if not folder.is_dir()]
            reason = (
                f"there is no folder {missing[0]!r}. Create it first"
                if missing  # otherwise of a file system without ordinary files, such as /proc
                else f"the system cannot create files in the folder {str(Path(path).parent)!r}. Choose another one"
            )
            raise ShardWriteError(f"The shard {url!r} cannot be written: {reason}") from error
        except (OSError, ValueError) as error:
            raise self._failure(error) from error

    def write(self, *chunks: bytes) -> None:
        """Write all chunks by one call of the system, or by several if it writes only a part."""
        rest = [memoryview(chunk) for chunk in chunks if chunk]
        try:
            while rest:
                count = os.writev(self._stream.fileno(), rest[:MAX_CHUNKS])
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
