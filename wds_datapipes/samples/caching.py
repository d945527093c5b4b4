"""Caching of samples for later passes, in memory or on disk."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from wds_datapipes.errors import CacheError, plural, text_of
from wds_datapipes.io.file_lock import AtomicFile
from wds_datapipes.io.urls import create_folder
from wds_datapipes.on_error.policy import note

#: The first bytes of a cache file. One frame for the stages before the cache, and one for each sample follow.
MAGIC = b"wds-datapipes samples 3\n"
#: The head of a frame: the length of its payload, and the checksum of all payloads up to and including this one.
FRAME = struct.Struct("<qI")
#: The length in the head of the last frame, which has no payload.
END = -1

Begin = Callable[[], Iterable[Any]]
"""Returns a new iterator over the source."""

Describe = Callable[[], list[str]]
"""Describes the stages of the source."""


class CachedPart(NamedTuple):
    """The part of the data that a pipeline instance reads."""

    instances: int = 1
    instance: int = 0


class MemoryCache:
    """Caches samples in memory, as pickled bytes that no stage can change. Copies of the cache are empty."""

    def __init__(self) -> None:
        self._pickled: list[bytes] | None = None
        self._part = CachedPart()

    def __reduce__(self) -> tuple[type[MemoryCache], tuple[()]]:
        return MemoryCache, ()

    def cached(self, begin: Begin, part: CachedPart, _: Describe) -> Iterator[Any]:
        """Yield the samples of a pass, as `cached_on_disk` does."""
        if self._pickled is not None and self._part == part:  # a forked process may inherit another part's cache
            yield from map(_unpickle_sample, self._pickled)
            return
        pickled = []
        for sample in begin():
            pickled.append(_pickle_sample(sample))
            yield sample
        self._pickled, self._part = pickled, part


def cached_on_disk(folder: str, begin: Begin, part: CachedPart, stages: Describe) -> Iterator[Any]:
    """Yield the samples of a pass from the file of a part, or from the source while writing them to that file.

    Args:
        folder: the directory of the cache.
        begin: returns a new iterator over the source.
        part: the part of the data that the source yields.
        stages: describes the stages of the source.
    """
    path = f"{folder}/part-{part.instance:05d}-of-{part.instances:05d}.samples"
    described = stages()
    if (payloads := open_samples(path, described)) is not None:
        with closing(payloads):
            yield from map(_unpickle_sample, payloads)
        return
    samples = begin()
    writer = SampleFileWriter(path, described)
    try:
        for sample in samples:
            writer.write(_pickle_sample(sample))
            yield sample
        writer.finish()
    finally:
        writer.discard()


class SampleFileWriter:
    """Writes a cache file of pickled samples, which appears under its name once it is complete.

    Args:
        path: the final path of the file.
        stages: the descriptions of the stages before the cache.

    Raises:
        CacheError: the file cannot be written. The partial file is removed.
    """

    def __init__(self, path: str, stages: Sequence[str]) -> None:
        self._path = path
        self._file: AtomicFile | None = None
        self._size, self._sum = 0, crc32(MAGIC)
        with self._explain_errors():
            create_folder(Path(path).parent)
            self._file = AtomicFile(path, buffer_bytes=1 << 20)
            self._file.stream.write(MAGIC)
        self.write(json.dumps(stages).encode())

    def write(self, payload: bytes) -> None:
        """Write a sample."""
        self._sum = crc32(payload, self._sum)
        with self._explain_errors() as file:
            file.stream.write(FRAME.pack(len(payload), self._sum) + payload)
        self._size += FRAME.size + len(payload)

    def finish(self) -> None:
        """Sync the file and rename it."""
        with self._explain_errors() as file:
            file.stream.write(FRAME.pack(END, self._sum))
            file.finish()

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        if self._file is not None:
            self._file.discard()

    @contextmanager
    def _explain_errors(self) -> Iterator[Any]:
        try:
            yield self._file
        except OSError as error:
            self.discard()
            raise CacheError(
                f"The cache {self._path} cannot be written: {error.strerror}, after {self._size} bytes. The partial "
                "file was removed. Free disk space, or choose another folder"
            ) from error


def open_samples(path: str, stages: Sequence[str]) -> Generator[bytes, None, None] | None:
    """Return an iterator over the samples of a cache file, or None if there is none.

    Raises:
        CacheError: the file belongs to other stages, or is not a cache file; or, also during iteration, it cannot be
            read, or is found to be truncated or damaged.
    """
    payloads = _read_payloads(path)
    try:
        found = json.loads(next(payloads))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (StopIteration, ValueError, RecursionError):
        payloads.close()
        raise _damage_error(path, len(MAGIC)) from None
    if found == [*stages]:
        return payloads
    payloads.close()
    before = found if isinstance(found, list) else []
    new = f"{plural(len(before), 'stage')} before the cache, but this pipeline has {len(stages)}"
    new = next(
        (f"{old}, but this pipeline has {now}" for old, now in zip(before, stages, strict=False) if old != now), new
    )
    raise CacheError(
        f"The cache {path} belongs to another pipeline: it was created with {new}. Delete it, or pass another path"
    )


def _read_payloads(path: str) -> Generator[bytes, None, None]:
    """Yield the stages, as JSON, and the samples of a cache file."""
    with _explain_reading(path), open(path, "rb") as stream:  # noqa: PTH123  open() is faster
        size = os.fstat(stream.fileno()).st_size
        if stream.read(len(MAGIC)) != MAGIC:
            raise _damage_error(path, 0)
        offset, total = len(MAGIC), crc32(MAGIC)
        while True:
            head = stream.read(FRAME.size)
            length, checksum = FRAME.unpack(head) if len(head) == FRAME.size else (size, 0)
            payload = stream.read(length) if 0 <= length <= size else b""
            total = crc32(payload, total)
            is_last = length == END and not stream.read(1)
            if total != checksum or not (is_last or len(payload) == length):
                raise _damage_error(path, offset)
            if is_last:
                return
            yield payload
            offset += FRAME.size + length


@contextmanager
def _explain_reading(path: str) -> Iterator[None]:
    """Raise OS errors as CacheError, unless there is no file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CacheError(
            f"The cache {path} cannot be read: {error.strerror or error}. Delete it, and restart the epoch, or choose "
            "another folder"
        ) from error


def _damage_error(path: str, offset: int) -> CacheError:
    return CacheError(
        f"The cache {path} is damaged: at byte {offset}, its data has a wrong length or checksum. Delete it, and "
        "restart the epoch"
    )


def _pickle_sample(sample: object) -> bytes:
    try:
        return pickle.dumps(sample, protocol=5)
    except Exception as error:
        key = sample.get("__key__") if isinstance(sample, Mapping) else None
        which = f"an item of type {type(sample).__name__}" if key is None else f"the sample {key!r}"
        raise CacheError(
            f"cache_samples cannot cache {which}: pickling it raised {type(error).__name__}: {text_of(error)}. Put the "
            f"cache before the stage that creates it"
        ) from error


def _unpickle_sample(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)  # noqa: S301 - the documentation requires a trusted directory
    except Exception as error:
        note(error, "raised while cache_samples unpickled a cached sample")
        raise
