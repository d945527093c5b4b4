"""Caching of samples for later passes, in memory or on disk."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from wds_datapipes.errors import CacheError
from wds_datapipes.on_error.policy import note
from wds_datapipes.samples.sample_file import DamagedFile, SampleFileWriter, open_samples, payloads
from wds_datapipes.user_warnings import warn_user

Begin = Callable[[], Iterable[Any]]
"""Returns a new iterator over the source."""

Describe = Callable[[], list[str]]
"""Describes the stages of the source."""


class CachedPart(NamedTuple):
    """The part of the data that a pipeline instance reads."""

    instances: int = 1
    instance: int = 0


class SampleCache(Protocol):
    """A cache for the samples of a part."""

    def cached(self, begin: Begin, part: CachedPart, stages: Describe) -> Iterator[Any]:
        """Yield the samples of a pass: the cached ones, or those of the source, which are then cached.

        Args:
            begin: returns a new iterator over the source.
            part: the part of the data that the source yields.
            stages: describes the stages of the source.
        """


class MemoryCache:
    """Caches samples in memory, as pickled bytes that no stage can change. Copies of the cache are empty.

    Args:
        max_bytes: cache nothing if the samples need more.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._pickled: list[bytes] | None = None
        self._part = CachedPart()
        self._is_too_large = False

    def __reduce__(self) -> tuple[type[MemoryCache], tuple[int | None]]:
        return MemoryCache, (self._max_bytes,)

    def cached(
        self,
        begin: Begin,
        part: CachedPart,
        stages: Describe,  # noqa: ARG002 - part of the protocol
    ) -> Iterator[Any]:
        """Yield the samples of a pass: the cached ones, or those of the source, which are then cached."""
        if self._pickled is not None and self._part == part:  # a forked process inherits the cache of another part
            yield from map(_unpickle_sample, self._pickled)
            return
        pickled: list[bytes] | None = None if self._is_too_large else []
        size = 0
        for sample in begin():
            if pickled is not None:
                payload = _pickle_sample(sample)
                size += len(payload)
                pickled.append(payload)
                if _exceeds(self._max_bytes, size, len(pickled)):
                    pickled, self._is_too_large = None, True
            yield sample
        if pickled is not None:
            self._pickled, self._part = pickled, part


class DiskCache:
    """Caches samples in a directory, with one file per part.

    Args:
        folder: the directory.
        max_bytes: cache nothing of a part that needs more.
    """

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_too_large = False

    def cached(self, begin: Begin, part: CachedPart, stages: Describe) -> Iterator[Any]:
        """Yield the samples of a pass: the cached ones, or those of the source, which are then cached."""
        path = f"{self._folder}/part-{part.instance:05d}-of-{part.instances:05d}.samples"
        facts = {"stages": stages()}
        try:
            stream = open_samples(path, facts)
        except DamagedFile as damage:
            warn_user(f"The cache {path} is damaged: {damage}. It is rebuilt from the source")
            stream = None
        if stream is not None:
            with stream:
                yield from map(_unpickle_sample, payloads(stream, path))
            return
        yield from begin() if self._is_too_large else self._writing(begin, path, facts)

    def _writing(self, begin: Begin, path: str, facts: Mapping[str, Any]) -> Iterator[Any]:
        samples = iter(begin())
        writer = SampleFileWriter(path, facts)
        try:
            for number, sample in enumerate(samples, 1):
                writer.write(_pickle_sample(sample))
                if _exceeds(self._max_bytes, writer.size, number):
                    self._is_too_large = True
                    writer.discard()
                    yield sample
                    yield from samples
                    return
                yield sample
            writer.finish()
        finally:
            writer.discard()


def _exceeds(max_bytes: int | None, size: int, count: int) -> bool:
    if max_bytes is None or size <= max_bytes:
        return False
    warn_user(
        f"cache_samples caches nothing: its first {count} samples already take {size} bytes, more than "
        f"max_bytes={max_bytes}. Each epoch is read from the source"
    )
    return True


def _pickle_sample(sample: object) -> bytes:
    try:
        return pickle.dumps(sample, protocol=5)
    except Exception as error:
        key = sample.get("__key__") if isinstance(sample, Mapping) else None
        which = f"an item of type {type(sample).__name__}" if key is None else f"the sample {key!r}"
        raise CacheError(
            f"cache_samples cannot cache {which}, as it cannot be pickled: {type(error).__name__}: {error}. Put the "
            f"cache before the stage that creates it"
        ) from error


def _unpickle_sample(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)  # noqa: S301 - the documentation requires a trusted directory
    except Exception as error:
        note(error, "raised while cache_samples unpickled a cached sample")
        raise
