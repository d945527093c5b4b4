"""Caching of samples for later passes, in memory or on disk."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from wds_datapipes.errors import CacheError, ChangedShardError
from wds_datapipes.on_error.policy import note
from wds_datapipes.samples.sample_file import DamagedFile, SampleFileWriter, open_samples, payloads
from wds_datapipes.shards.position import check_of
from wds_datapipes.user_warnings import warn_user

__all__ = ["CachePosition", "CachedPart", "DiskCache", "MemoryCache", "SampleCache"]

Begin = Callable[[], Iterable[Any]]
"""Begins a pass over the source."""

Describe = Callable[[], list[str]]
"""Describes the stages of the source."""

Wanted = Callable[[int], bool]
"""Whether to yield the sample of a number, from 0. What is not wanted is kept all the same."""


def always(number: int) -> bool:  # noqa: ARG001 - of Wanted
    """Return True."""
    return True


class CachedPart(NamedTuple):
    """The part of the data that passes through a pipeline instance."""

    instances: int = 1
    instance: int = 0


class CachePosition:
    """The position of a pass over cached samples.

    Args:
        passed: how many samples were yielded.
        check: `check_of` the key of the last of them.
        again: the numbers of those that are yielded once more.
        ends: whether nothing follows these.

    Attributes:
        at: the number of the sample that was yielded last, from 0.
    """

    def __init__(self, passed: int = 0, check: int = 0, again: Collection[int] = (), *, ends: bool = False) -> None:
        self.passed = passed
        self.check = check
        self.at = -1
        self._again = set(again)
        self._ends = ends
        self._seen = -1

    def wants(self, number: int) -> bool:
        """Tell whether a sample is needed: it is new, or comes again, or tells whether all is as it was."""
        self._seen = number
        return number >= self.passed - 1 or number in self._again

    def counted(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Yield those of the samples that come again, and then what is new.

        Raises:
            ChangedShardError: the samples are not what they were.
        """
        if self._ends and not self._again:
            return
        for sample in samples:
            number, check = self._seen, _check_of(sample)
            if number == self.passed - 1 and check != self.check:
                raise ChangedShardError(
                    f"cache_samples resumes after its sample {number}, and that is another one than when the state "
                    f"was saved. A state can be loaded only with the very shards that it was saved with"
                )
            if number >= self.passed and not self._ends:
                self.at, self.passed, self.check = number, number + 1, check
                yield sample
            elif number in self._again:
                self.at = number
                self._again.remove(number)
                yield sample
                if self._ends and not self._again:
                    return
        if self._seen + 1 < self.passed:
            raise ChangedShardError(
                f"cache_samples resumes after {self.passed} samples, and there are {self._seen + 1} now. A state can "
                f"be loaded only with the very shards that it was saved with"
            )


class SampleCache(Protocol):
    """A cache for the samples of a part."""

    def cached(self, begin: Begin, part: CachedPart, stages: Describe, wanted: Wanted = always) -> Iterator[Any]:
        """Yield the samples of a pass: the cached ones, or those of the source, which are then cached.

        Args:
            begin: begins a pass over the source.
            part: what the source yields of all data.
            stages: describes the stages of the source.
            wanted: tells which samples to yield, for a pass that another process has begun.
        """


class MemoryCache:
    """Caches samples in memory, as pickled bytes, which no stage can change. Its copies are empty.

    Args:
        max_bytes: keep nothing if it would be more.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._kept: list[bytes] | None = None
        self._part = CachedPart()
        self._is_too_large = False

    def __reduce__(self) -> tuple[type[MemoryCache], tuple[int | None]]:
        return MemoryCache, (self._max_bytes,)

    def cached(
        self,
        begin: Begin,
        part: CachedPart,
        stages: Describe,  # noqa: ARG002 - of SampleCache
        wanted: Wanted = always,
    ) -> Iterator[Any]:
        """Yield the samples of a pass: the cached ones, or those of the source, which are then cached."""
        if self._kept is not None and self._part == part:  # a forked process has what another part was
            yield from _choose_samples(self._kept, wanted)
            return
        kept: list[bytes] | None = None if self._is_too_large else []
        size = 0
        for number, sample in enumerate(begin()):
            if kept is not None:
                payload = _pickle_sample(sample)
                size += len(payload)
                kept.append(payload)
                if _exceeds(self._max_bytes, size, len(kept)):
                    kept, self._is_too_large = None, True
            if wanted(number):
                yield sample
        if kept is not None:
            self._kept, self._part = kept, part


class DiskCache:
    """Caches samples in a directory, each part in a file of its own.

    Args:
        folder: the directory.
        max_bytes: keep nothing of a part if it would be more.
    """

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._is_too_large = False

    def cached(self, begin: Begin, part: CachedPart, stages: Describe, wanted: Wanted = always) -> Iterator[Any]:
        """Yield the samples of a pass: the cached ones, or those of the source, which are then cached."""
        path = f"{self._folder}/part-{part.instance:05d}-of-{part.instances:05d}.samples"
        facts = {"stages": stages()}
        try:
            stream = open_samples(path, facts)
        except DamagedFile as damage:
            warn_user(f"The cache {path} is damaged, as {damage}. It is read from the source and made again")
            stream = None
        if stream is not None:
            with stream:
                yield from _choose_samples(payloads(stream, path), wanted)
            return
        samples = begin() if self._is_too_large else self._writing(begin, path, facts)
        yield from (sample for number, sample in enumerate(samples) if wanted(number))

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


def _choose_samples(payloads: Iterable[bytes], wanted: Wanted) -> Iterator[Any]:
    """Yield some of the cached samples."""
    return (_unpickle_sample(payload) for number, payload in enumerate(payloads) if wanted(number))


def _check_of(sample: object) -> int:
    key = sample.get("__key__") if isinstance(sample, Mapping) else None
    return check_of(key) if isinstance(key, str) else 0


def _exceeds(max_bytes: int | None, size: int, count: int) -> bool:
    if max_bytes is None or size <= max_bytes:
        return False
    warn_user(
        f"cache_samples keeps nothing, since its first {count} samples already have {size} bytes, which is more than "
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
            f"cache_samples cannot keep {which}, as it cannot be pickled: {type(error).__name__}: {error}. Put the "
            f"cache before the stage that makes it"
        ) from error


def _unpickle_sample(payload: bytes) -> Any:
    try:
        return pickle.loads(payload)  # noqa: S301 - the user has named this directory, and the docs tell to trust it
    except Exception as error:
        note(error, "cache_samples has met this when it unpickled a sample that it had kept")
        raise
