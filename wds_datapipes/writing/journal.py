"""Journal of a conversion: records the finished shards, so that it can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from wds_datapipes.errors import ShardWriteError, StateError
from wds_datapipes.io.file_lock import is_same_file
from wds_datapipes.redaction import redact
from wds_datapipes.types import ShardInfo

__all__ = ["FinishedShard", "KeyLog", "ShardJournal", "compare_journals"]


#: The first value of a journal, and how its first line starts.
KIND = {"wds-datapipes": "journal of shards"}
START = json.dumps(KIND).encode()[:-1]
#: A line: an object of JSON. Its last value is the checksum of the text before it and of the earlier lines.
LINE = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}\n', re.DOTALL)


class KeyLog:
    """The number of samples passed to a writer, and a digest of their keys in order."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.sha256()

    def add(self, sample: Any) -> None:
        """Add a sample, with or without a key."""
        key = sample.get("__key__") if isinstance(sample, Mapping) else None
        self._hash.update(repr(key).encode("utf-8", "surrogatepass") + b"\0")
        self.count += 1

    def digest(self) -> str:
        """Return the digest so far, in hexadecimal digits."""
        return self._hash.hexdigest()


class FinishedShard(NamedTuple):
    """A line of a journal."""

    number: int
    info: ShardInfo
    #: The number of samples passed since the previous shard, including refused ones.
    given: int
    #: A digest of their keys.
    keys: str
    #: The number of skipped errors, recorded for conversions only.
    skipped: int = 0


def compare_journals(paths: Iterable[str], settings: Mapping[str, Any]) -> None:
    """Compare settings with those in the journals of other writers that have finished a shard.

    Raises:
        StateError: a journal has other settings, or is damaged.
        ShardWriteError: a journal cannot be read.
    """
    for path in paths:
        try:
            with Path(path).open("rb") as file:
                lines = list(islice(file, 2))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            raise ShardWriteError(f"The journal {path!r} cannot be read: {error.strerror}") from error
        if len(lines) == 2 and lines[1].endswith(b"\n"):
            _compare_head(path, lines[0], settings)


class ShardJournal:
    """A file with a JSON line for each finished shard, after a line with the settings of the conversion.

    Each line is synced to disk before the next shard is started, and has a checksum of itself and of the earlier lines.
    A last line without its end belongs to a process that was killed, and is dropped. The file is locked against other
    conversions. The URLs in it are without credentials.

    Args:
        path: the path of the file, which is created if needed.
        settings: the settings that determine the content of the shards.

    Raises:
        StateError: the file belongs to another conversion, is damaged or not a journal, or is in use by another
            process.
        ShardWriteError: the file cannot be opened, read or written.
    """

    _file = -1

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self._path = path
        head = {**KIND, "version": 2, **settings}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ShardWriteError(f"The journal {path!r} cannot be opened: {error.strerror}") from error
        try:
            self.finished = self._read(head)
        except BaseException:
            self.close()
            raise

    def add(self, shard: FinishedShard) -> None:
        """Write a line and sync the file."""
        row = {
            "number": shard.number,
            **shard.info._asdict(),
            "url": redact(shard.info.url),
            "given": shard.given,
            "keys": shard.keys,
        }
        if shard.skipped:
            row["skipped"] = shard.skipped
        self._write(row)
        self.finished.append(shard)

    def truncate(self, count: int) -> None:
        """Keep the lines of the first ``count`` shards only, if the following ones no longer exist."""
        if count < len(self.finished):
            remaining = self.finished[:count]
            del self._lines[count + 1 :]
            self._cut()
            self.finished = remaining

    def fileno(self) -> int:
        """Return the file descriptor, which holds the lock in every process that inherits it."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _read(self, head: dict[str, Any]) -> list[FinishedShard]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(f"The journal {self._path!r} is in use: another process is writing these shards") from None
        except OSError:
            pass  # a file system without locks
        try:
            with open(self._file, "rb", closefd=False) as file:
                data = file.read()
        except OSError as error:
            raise ShardWriteError(f"The journal {self._path!r} cannot be read: {error.strerror}") from error
        lines = BytesIO(data[: data.rfind(b"\n") + 1]).readlines()
        #: The offset of the end of each line, and the checksum up to it.
        self._lines: list[tuple[int, int]] = []
        if not lines:
            if not data.startswith(START) and not START.startswith(data):
                raise _not_a_journal(self._path)
            self._cut()
            self._write(head)
            return []
        checksum = _compare_head(self._path, lines[0], head)
        self._lines = [(len(lines[0]), checksum)]
        finished = []
        for number, line in enumerate(lines[1:], 2):
            row, checksum = _parse_line(self._path, number, line, checksum)
            info = ShardInfo(*(row[name] for name in ShardInfo._fields))
            finished.append(FinishedShard(row["number"], info, row["given"], row["keys"], row.get("skipped", 0)))
            self._lines.append((self._lines[-1][0] + len(line), checksum))
        self._cut()
        return finished

    def _write(self, row: Mapping[str, Any]) -> None:
        end, checksum = self._lines[-1] if self._lines else (0, 0)
        text = json.dumps(row).encode()[:-1]
        checksum = crc32(text, checksum)
        line = b'%b, "crc32": "%08x"}\n' % (text, checksum)
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(ShardWriteError):
                self._cut()
            raise ShardWriteError(f"The journal {self._path!r} cannot be written: {error.strerror}") from error
        self._lines.append((end + len(line), checksum))

    def _cut(self) -> None:
        """Remove what follows the last whole line."""
        end = self._lines[-1][0] if self._lines else 0
        try:
            os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)
        except OSError as error:
            raise ShardWriteError(f"The journal {self._path!r} cannot be written: {error.strerror}") from error


class WriterClaim:
    """A lock file next to local shards that excludes other writers while a writer is active.

    Args:
        path: the path of the shards' journal, whether or not it exists; the name of the lock file derives from it.
        pattern: the pattern of the shards.

    Raises:
        StateError: another writer holds the lock.
    """

    def __init__(self, path: str, pattern: str) -> None:
        self._path = f"{path}.lock"
        self._owner = os.getpid()
        self._file = -1
        while self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return  # opening the first shard raises a more specific error
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._release()
                raise StateError(
                    f"Another writer is writing the shards {pattern!r}, and the shards of both would be mixed. Wait "
                    f"for it, or choose another pattern"
                ) from None
            except OSError:
                return  # a file system without locks
            if not is_same_file(Path(self._path), self._file):  # its last owner removed it before it was locked
                self._release()

    def close(self) -> None:
        """Remove the lock file, unless this is a forked process."""
        if self._file >= 0 and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108  a string
            with contextlib.suppress(OSError):  # a forked process may still have the file
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._release()

    def __del__(self) -> None:
        self.close()

    def _release(self) -> None:
        os.close(self._file)
        self._file = -1


def _parse_line(path: str, number: int, line: bytes, checksum: int) -> tuple[dict[str, Any], int]:
    """Return the values of a line, and the checksum up to its end.

    Args:
        path: the journal.
        number: the number of the line.
        line: its bytes.
        checksum: the checksum up to the line before it.

    Raises:
        StateError: it is damaged.
    """
    parts = LINE.fullmatch(line)
    if parts is None or crc32(parts[1], checksum) != int(parts[2], 16):
        first = f"Keep its first {number - 1} lines (head -n {number - 1})" if number > 2 else "Delete it"
        raise StateError(
            f"Line {number} of the journal {path!r} does not match its checksum: it is damaged, or lines before it are "
            f"missing. {first}, and the other shards are written again"
        )
    row: dict[str, Any] = json.loads(parts[1] + b"}")
    return row, int(parts[2], 16)


def _compare_head(path: str, line: bytes, settings: Mapping[str, Any]) -> int:
    """Compare settings with the first line of a journal, and return the checksum up to its end.

    Raises:
        StateError: it has other settings, is damaged, or the file is not a journal.
    """
    if not line.startswith(START):
        raise _not_a_journal(path)
    found, checksum = _parse_line(path, 1, line, 0)
    for name, value in json.loads(json.dumps(settings)).items():
        if found.get(name) != value:
            raise StateError(
                f"The journal {path!r} belongs to a conversion with {name}={found.get(name)!r}, not {value!r}, so the "
                f"shards would not match. Use the same value, or delete the journal and its shards"
            )
    return checksum


def _not_a_journal(path: str) -> StateError:
    return StateError(
        f"The file {path!r} is not a journal of shards, or its first line is damaged. Choose another one with "
        f"journal=, or delete it"
    )
