"""Cache file of pickled samples, which is complete or does not exist."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from wds_datapipes.errors import CacheError
from wds_datapipes.io.atomic_file import AtomicFile

#: The first bytes of a file. Frames follow: one for the facts about the source, and one for each sample.
MAGIC = b"wds-datapipes samples 1\n"
#: The head of a frame: the length and the checksum of its payload.
FRAME = struct.Struct("<QI")
#: The trailer: magic bytes, the number of samples, the size of all frames, the checksums of their heads and of itself.
TRAILER = struct.Struct("<8sQQII")
END = b"complete"


class DamagedFile(Exception):
    """A cache file is truncated or damaged."""


class SampleFileWriter:
    """Writes a cache file, which appears under its name once it is complete.

    Args:
        path: the final path of the file.
        facts: a description of the source of the samples.

    Raises:
        CacheError: the file cannot be written. The partial file is removed.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._count = self._bytes = self._sum = 0
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = AtomicFile(path, buffer_bytes=1 << 20)
        except OSError as error:
            raise self._failure(error) from error
        try:
            self._file.stream.write(MAGIC)
            self._frame(json.dumps(facts).encode())
        except OSError as error:
            self.discard()
            raise self._failure(error) from error

    @property
    def size(self) -> int:
        """The size of all frames in bytes."""
        return self._bytes

    def write(self, payload: bytes) -> None:
        """Write a sample."""
        try:
            self._frame(payload)
        except OSError as error:
            self.discard()
            raise self._failure(error) from error
        self._count += 1

    def finish(self) -> None:
        """Sync the file and rename it."""
        try:
            self._file.stream.write(_trailer(self._count, self._bytes, self._sum))
            self._file.finish()
        except OSError as error:
            self.discard()
            raise self._failure(error) from error

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        self._file.discard()

    def _frame(self, payload: bytes) -> None:
        head = FRAME.pack(len(payload), crc32(payload))
        self._file.stream.write(head)
        self._file.stream.write(payload)
        self._sum = crc32(head, self._sum)
        self._bytes += len(head) + len(payload)

    def _failure(self, error: OSError) -> CacheError:
        return CacheError(
            f"The cache {self._path} cannot be written: {error.strerror}, after {self._count} samples "
            f"({self._bytes} bytes). The partial file was removed. Free disk space, or choose another folder"
        )


def open_samples(path: str, facts: Mapping[str, Any]) -> BinaryIO | None:
    """Open a cache file for `payloads`; the caller closes it.

    Returns:
        The file, positioned after its facts, or ``None`` if there is none.

    Raises:
        DamagedFile: the file is truncated, or is not a cache file.
        CacheError: the file was created from another source.
    """
    try:
        stream = open(path, "rb")  # noqa: PTH123, SIM115  the caller closes it
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        _check(stream, path, facts)
    except BaseException:
        stream.close()
        raise
    return stream


def payloads(stream: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the samples of an open cache file.

    Raises:
        CacheError: the file is damaged.
    """
    offset = len(MAGIC)
    stream.seek(-TRAILER.size, os.SEEK_END)
    _, count, frames_bytes, heads_sum, _ = TRAILER.unpack(stream.read())
    stream.seek(offset)
    limit = offset + frames_bytes
    total = 0
    for number in range(-1, count):
        head = stream.read(FRAME.size)
        length, checksum = FRAME.unpack(head) if len(head) == FRAME.size else (limit, 0)
        if offset + FRAME.size + length > limit:
            raise CacheError(_damage_message(path, number, offset, "an impossible length"))
        payload = stream.read(length)
        if len(payload) < length or crc32(payload) != checksum:
            raise CacheError(_damage_message(path, number, offset, "a wrong checksum"))
        total = crc32(head, total)
        offset += len(head) + length
        if number >= 0:
            yield payload
    if offset != limit or total != heads_sum:
        raise CacheError(_damage_message(path, count, offset, "a wrong total checksum"))


def _check(stream: BinaryIO, path: str, facts: Mapping[str, Any]) -> None:
    """Check everything except the samples."""
    size = stream.seek(0, os.SEEK_END)
    if size < len(MAGIC) + FRAME.size + TRAILER.size:
        raise DamagedFile(f"it has only {size} bytes")
    stream.seek(-TRAILER.size, os.SEEK_END)
    end = stream.read()
    _, count, frames_bytes, heads_sum, _ = TRAILER.unpack(end)
    if end != _trailer(count, frames_bytes, heads_sum) or size != len(MAGIC) + frames_bytes + TRAILER.size:
        raise DamagedFile(f"its {size} bytes have no valid trailer")
    stream.seek(0)
    if stream.read(len(MAGIC)) != MAGIC:
        raise DamagedFile("it does not begin with the magic bytes of a cache file")
    length, checksum = FRAME.unpack(stream.read(FRAME.size))
    text = stream.read(min(length, frames_bytes))
    if crc32(text) != checksum:
        raise DamagedFile("its facts have a wrong checksum")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"its facts are not valid JSON: {error}") from error
    if found != json.loads(json.dumps(facts)):
        raise CacheError(
            f"The cache {path} belongs to another pipeline: {_difference(found, facts)}. Delete it, or pass another "
            f"path"
        )


def _trailer(count: int, frames_bytes: int, heads_sum: int) -> bytes:
    facts = (END, count, frames_bytes, heads_sum)
    return TRAILER.pack(*facts, crc32(repr(facts).encode()))


def _difference(found: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Describe the first difference between two pipelines."""
    before, now = found.get("stages", []), facts.get("stages", [])
    for old, new in zip(before, now, strict=False):
        if old != new:
            return f"it was created with {old}, but this pipeline has {new}"
    if len(before) != len(now):
        return f"it was created with {len(before)} stages before the cache, but this pipeline has {len(now)}"
    return f"it was created with { ({key: found[key] for key in found if found[key] != facts.get(key)})!r}"


def _damage_message(path: str, number: int, offset: int, what: str) -> str:
    return (
        f"The cache {path} is damaged: at byte {offset}, where sample {number} begins, it has {what}. The samples "
        f"before it were already yielded, so it cannot be rebuilt now: delete it, and restart the epoch"
    )
