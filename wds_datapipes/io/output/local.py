"""Local sink: writes a file under a temporary name and renames it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

from wds_datapipes.errors import ShardWriteError
from wds_datapipes.io.file_lock import AtomicFile
from wds_datapipes.io.urls import explain_path
from wds_datapipes.system import write_chunks

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
