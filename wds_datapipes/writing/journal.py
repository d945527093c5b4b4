"""Journal of a conversion: the finished shards and their samples, so that it can be resumed."""

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


#: What the first line of a journal says.
KIND = "journal of shards"


class KeyLog:
    """The number of keys that a writer was given, and a digest of them in order."""

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
    #: How many samples were given from the end of the last shard to the end of this one, those that were refused too.
    given: int
    #: The digest of their keys.
    keys: str
    #: How many faults were skipped; only of conversions, and only where there were some.
    skipped: int = 0


def compare_journals(paths: Iterable[str], wanted: Mapping[str, Any]) -> None:
    """Compare settings with those in the journals of other writers that have finished a shard.

    Raises:
        StateError: a journal has others.
    """
    for path in paths:
        with Path(path).open("rb") as file:
            lines = list(islice(file, 2))
        if len(lines) == 2 and lines[1].endswith(b"\n"):
            _compare(path, lines[0], wanted)


class ShardJournal:
    """A file of JSON lines, one for each finished shard; the first has the settings of the conversion.

    A line is on the disk before the next shard is begun. It is locked, as two conversions cannot share it.

    Args:
        path: of the file; it is made if it is not there.
        settings: what has to be the same for the shards to be the same.

    Raises:
        StateError: the file is of another conversion, or no journal, or another process has it.
        ShardWriteError: it cannot be opened or written.
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
            self.finished = self._begin(head)
        except BaseException:
            self.close()
            raise

    def add(self, shard: FinishedShard) -> None:
        """Write a line, and sync the file."""
        row = {"number": shard.number, **shard.info._asdict(), "given": shard.given, "keys": shard.keys}
        if shard.skipped:
            row["skipped"] = shard.skipped
        self._write(row)
        self.finished.append(shard)

    def keep(self, count: int) -> None:
        """Keep the lines of the first shards, and drop those of shards that no longer exist."""
        if count < len(self.finished):
            kept = self.finished[:count]
            os.ftruncate(self._file, self._ends[count])
            os.lseek(self._file, 0, os.SEEK_END)
            self.finished = kept

    def fileno(self) -> int:
        """Return its descriptor, which holds the lock in every process that has it."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _begin(self, head: dict[str, Any]) -> list[FinishedShard]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(f"The journal {self._path!r} is in use: another process writes these shards now") from None
        except OSError:
            pass  # a file system without locks
        data = Path(self._path).read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a line that was broken off says nothing
        lines = whole.splitlines(keepends=True)
        os.ftruncate(self._file, len(whole))
        os.lseek(self._file, 0, os.SEEK_END)
        #: Where the head ends, and each line after it.
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
    """A lock file next to local shards while a writer makes them, which keeps a second writer out.

    Args:
        path: of the journal that the shards may have; the claim is called after it.
        pattern: of the shards.

    Raises:
        StateError: another writer has the claim.
    """

    def __init__(self, path: str, pattern: str) -> None:
        self._path = f"{path}.lock"
        self._owner = os.getpid()
        self._file = -1
        while self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return  # as the first shard will say, with more detail
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._release()
                raise StateError(
                    f"Another writer has the shards {pattern!r} now, and the shards of both would be mixed. Wait "
                    f"for it, or choose another pattern"
                ) from None
            except OSError:
                return  # a file system without locks
            if not self._is_there():  # its last owner has removed it between the two steps
                self._release()

    def close(self) -> None:
        """Remove the lock file, unless this is a forked copy."""
        if self._file >= 0 and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108  it is a text
            with contextlib.suppress(OSError):  # a forked process may still have the file
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._release()

    def __del__(self) -> None:
        self.close()

    def _release(self) -> None:
        os.close(self._file)
        self._file = -1

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))  # noqa: PTH116  the same
        except FileNotFoundError:
            return False


def _parse_line(line: bytes, where: str) -> FinishedShard:
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
            raise ValueError(f"it tells of {row!r:.200}")
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"{where} is damaged: {error}. Delete the journal and its shards, and convert them again"
        ) from error
    return found


def _compare(path: str, line: bytes, wanted: Mapping[str, Any]) -> None:
    """Raise if the first line of a journal has other settings."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("wds-datapipes") != KIND:
        raise StateError(f"The file {path!r} is no journal of shards. Name another with journal=")
    for name, value in json.loads(json.dumps(wanted)).items():
        if found.get(name) != value:
            raise StateError(
                f"The journal {path!r} is of a conversion with {name}={found.get(name)!r}, and this one has "
                f"{value!r}, so its shards would not fit. Use the same, or delete the journal and its shards"
            )
