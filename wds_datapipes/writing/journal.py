"""Journal files, with a line for each finished shard of a conversion or a writer, so that it can resume."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from wds_datapipes.errors import ShardWriteError, StateError
from wds_datapipes.redaction import redact
from wds_datapipes.system import OPEN_FLAGS, lock_descriptor
from wds_datapipes.types import ShardInfo

#: The first value of a journal and the start of its first line.
KIND = {"wds-datapipes": "journal of shards"}
START = json.dumps(KIND).encode()[:-1]
#: A line: a JSON object. Its last value is the checksum of the preceding text and of the earlier lines.
LINE = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}\n', re.DOTALL)


class FinishedShard(NamedTuple):
    """A line of a journal."""

    number: int
    info: ShardInfo
    #: Further values of the line, which describe the samples of the shard.
    facts: Mapping[str, Any]


def compare_journals(paths: Iterable[str], settings: Mapping[str, Any]) -> None:
    """Compare settings with those in the journals of other writers that have already finished a shard.

    Raises:
        StateError: a journal has other settings, or is damaged.
        ShardWriteError: a journal cannot be read.
    """
    for path in paths:
        lines: list[bytes] = []
        with _reported(path, "read"), contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:
            lines = list(islice(file, 2))
        if len(lines) == 2 and lines[1].endswith(b"\n"):
            _compare_head(path, lines[0], settings)


class ShardJournal:
    """A file with a line of JSON for each finished shard, after a line with the settings of the conversion.

    Each line is synced to disk before the next shard is started and has a checksum of itself and the earlier lines. If
    the last line is incomplete because its process was killed, it is dropped. The file is locked against other
    conversions. Its URLs contain no credentials.

    Args:
        path: the path of the file, which is created if needed.
        settings: the settings that determine the content of the shards.
        facts: the kinds of the further values of each line.

    Raises:
        StateError: the file belongs to another conversion, is damaged or not a journal, or is in use by another
            process.
        ShardWriteError: the file cannot be opened, read or written.
    """

    _file = -1

    def __init__(self, path: str, settings: Mapping[str, Any], facts: Mapping[str, type] | None = None) -> None:
        self._path = path
        self._kinds = {"number": int, "url": str, "samples": int, "bytes": int, "sha256": str, **(facts or {})}
        #: The end of each line and the checksum up to it.
        self._lines: list[tuple[int, int]] = []
        self.finished: list[FinishedShard] = []
        with _reported(path, "opened"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o666)
        try:
            self._read({**KIND, "version": 4, **settings})
        except BaseException:
            self.close()
            raise

    def add(self, shard: FinishedShard) -> None:
        """Write a line and sync the file."""
        info = shard.info._replace(url=redact(shard.info.url))
        self._write({"number": shard.number, **info._asdict(), **shard.facts})
        self.finished.append(shard)

    def truncate(self, count: int) -> None:
        """Keep only the lines of the first ``count`` shards, because the following shards no longer exist."""
        del self.finished[count:], self._lines[count + 1 :]
        self._cut()

    def fileno(self) -> int:
        """Return the file descriptor; every process that inherits it holds the lock."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _read(self, head: dict[str, Any]) -> None:
        try:
            lock_descriptor(self._file, wait=False)
        except BlockingIOError:
            raise StateError(f"The journal {self._path!r} is in use: another process is writing these shards") from None
        except OSError:
            pass  # a file system without locks
        with _reported(self._path, "read"), open(self._file, "rb", closefd=False) as file:
            data = file.read()
        lines = BytesIO(data[: data.rfind(b"\n") + 1]).readlines()
        if not lines:
            if not data.startswith(START) and not START.startswith(data):
                raise _not_a_journal(self._path)
            self._cut()
            self._write(head)
            return
        self._lines.append((len(lines[0]), _compare_head(self._path, lines[0], head)))
        for number, line in enumerate(lines[1:], 2):
            end, checksum = self._lines[-1]
            row, checksum = _parse_line(self._path, number, line, checksum)
            for name, kind in self._kinds.items():
                if not isinstance(row.get(name), kind) or (kind is int and not 0 <= row[name] < 1 << 63):
                    raise _damage_error(self._path, number, f"has {row.get(name)!r:.100} as its {name}")
            self._lines.append((end + len(line), checksum))
            self.finished.append(FinishedShard(row.pop("number"), ShardInfo(*map(row.pop, ShardInfo._fields)), row))
        self._cut()

    def _write(self, row: Mapping[str, Any]) -> None:
        end, checksum = self._lines[-1] if self._lines else (0, 0)
        text = json.dumps(row).encode()[:-1]
        checksum = crc32(text, checksum)
        line = b'%b, "crc32": "%08x"}\n' % (text, checksum)
        try:
            with _reported(self._path, "written"):
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fsync(self._file)
        except ShardWriteError:
            with contextlib.suppress(ShardWriteError):
                self._cut()
            raise
        self._lines.append((end + len(line), checksum))

    def _cut(self) -> None:
        """Remove everything after the last complete line."""
        end = self._lines[-1][0] if self._lines else 0
        with _reported(self._path, "written"):
            os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)


@contextlib.contextmanager
def _reported(path: str, what: str) -> Iterator[None]:
    """Raise OS errors of a journal as `ShardWriteError`."""
    try:
        yield
    except OSError as error:
        raise ShardWriteError(f"The journal {path!r} cannot be {what}: {error.strerror}") from error
    except ValueError as error:
        if "null" not in str(error):  # no file can have this name
            raise
        raise ShardWriteError(f"The journal {path!r} cannot be {what}: {error}") from error


def _parse_line(path: str, number: int, line: bytes, checksum: int) -> tuple[dict[str, Any], int]:
    """Return the values of a line and the checksum up to its end.

    Args:
        path: the journal.
        number: the number of the line.
        line: its bytes.
        checksum: the checksum up to the previous line.

    Raises:
        StateError: it is damaged.
    """
    parts = LINE.fullmatch(line)
    if parts is None or crc32(parts[1], checksum) != int(parts[2], 16):
        raise _damage_error(path, number, "does not match its checksum: it is damaged, or earlier lines are missing")
    try:
        row: dict[str, Any] = json.loads(parts[1] + b"}")
    except (ValueError, RecursionError):
        raise _damage_error(path, number, "is not JSON") from None
    return row, int(parts[2], 16)


def _damage_error(path: str, number: int, problem: str) -> StateError:
    first = f"Keep its first {number - 1} lines (head -n {number - 1})" if number > 2 else "Delete it"
    return StateError(
        f"Line {number} of the journal {path!r} {problem}. {first}; the other shards will then be written again"
    )


def _compare_head(path: str, line: bytes, settings: Mapping[str, Any]) -> int:
    """Compare settings with the first line of a journal; return the checksum up to its end.

    Raises:
        StateError: the settings differ, the line is damaged, or the file is not a journal.
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
        f"The file {path!r} is not a journal of shards, or its first line is damaged. Choose another "
        f"file for the journal, or delete it"
    )
