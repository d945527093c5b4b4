"""Journal of a conversion: records the finished shards, so that it can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from wds_datapipes.errors import ShardWriteError, StateError
from wds_datapipes.types import ShardInfo

__all__ = ["FinishedShard", "KeyLog", "ShardJournal", "compare_journals"]


#: The kind of file in the first line of a journal.
KIND = "journal of shards"


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
        StateError: a journal has other settings.
    """
    for path in paths:
        with Path(path).open("rb") as file:
            lines = list(islice(file, 2))
        if len(lines) == 2 and lines[1].endswith(b"\n"):
            _compare(path, lines[0], settings)


class ShardJournal:
    """A file with a JSON line for each finished shard, after a line with the settings of the conversion.

    Each line is synced to disk before the next shard is started. The file is locked against other conversions.

    Args:
        path: the path of the file, which is created if needed.
        settings: the settings that determine the content of the shards.

    Raises:
        StateError: the file belongs to another conversion, is not a journal, or is in use by another process.
        ShardWriteError: the file cannot be opened or written.
    """

    _file = -1

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self._path = path
        head = {"wds-datapipes": KIND, "version": 1, **settings}
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
        row = {"number": shard.number, **shard.info._asdict(), "given": shard.given, "keys": shard.keys}
        if shard.skipped:
            row["skipped"] = shard.skipped
        self._write(row)
        self.finished.append(shard)

    def truncate(self, count: int) -> None:
        """Keep the lines of the first ``count`` shards only, if the following ones no longer exist."""
        if count < len(self.finished):
            remaining = self.finished[:count]
            os.ftruncate(self._file, self._ends[count])
            os.lseek(self._file, 0, os.SEEK_END)
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
        data = Path(self._path).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # without an incomplete line
        lines = whole.splitlines(keepends=True)
        os.ftruncate(self._file, len(whole))
        os.lseek(self._file, 0, os.SEEK_END)
        #: The offset of the end of the head and of each line after it.
        self._ends = [len(lines[0])] if lines else []
        if not lines:
            self._write(head)
            self._ends = [os.lseek(self._file, 0, os.SEEK_CUR)]
            return []
        _compare(self._path, lines[0], head)
        finished = []
        for number, line in enumerate(lines[1:], 2):
            finished.append(_parse_line(line, f"Line {number} of the journal {self._path!r}"))
            self._ends.append(self._ends[-1] + len(line))
        return finished

    def _write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
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
            if not self._is_current():  # its last owner removed it before it was locked
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

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))  # noqa: PTH116  a string
        except FileNotFoundError:
            return False


def _parse_line(line: bytes, name: str) -> FinishedShard:
    """Parse a line.

    Raises:
        StateError: it is damaged.
    """
    try:
        row = json.loads(line)
        info = ShardInfo(*(row[name] for name in ShardInfo._fields))
        found = FinishedShard(row["number"], info, row["given"], row["keys"], row.get("skipped", 0))
        kinds = [*map(type, info), type(found.number), type(found.given), type(found.keys), type(found.skipped)]
        if kinds != [str, int, int, str, int, int, str, int]:
            raise ValueError(f"its values are {row!r:.200}")
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"{name} is damaged: {error}. Delete the journal and its shards, and convert them again"
        ) from error
    return found


def _compare(path: str, line: bytes, settings: Mapping[str, Any]) -> None:
    """Raise if the first line of a journal has other settings."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("wds-datapipes") != KIND:
        raise StateError(f"The file {path!r} is not a journal of shards. Choose another one with journal=")
    for name, value in json.loads(json.dumps(settings)).items():
        if found.get(name) != value:
            raise StateError(
                f"The journal {path!r} belongs to a conversion with {name}={found.get(name)!r}, not {value!r}, so the "
                f"shards would not match. Use the same value, or delete the journal and its shards"
            )
