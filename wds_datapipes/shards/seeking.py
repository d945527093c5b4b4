"""The parts of a shard that a state asks for: from their places where one can go there, or past all before them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO, Protocol, cast

from wds_datapipes.errors import (
    ChangedShardError,
    CorruptShardError,
    ShardError,
    ShardReadError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.compression.decompress import buffer_stream, decompress_stream
from wds_datapipes.io.compression.formats import detect_compression
from wds_datapipes.io.openers import open_parts, open_url, redact
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.io.remote.range_sources import RangeSource
from wds_datapipes.types import MemberTuple, Opener

__all__ = ["SeekableShard", "check_unchanged", "open_archive", "opened_parts"]

LOGGER = logging.getLogger("wds_datapipes")

#: From how many bytes on that have to be passed over it is told, since it takes a while.
TOLD_FROM_BYTES = 16 << 20
#: Bytes are passed over in pieces of this size.
PIECE = 128 << 10


class SeekableShard(Protocol):
    """The parts of an uncompressed archive, in the order of their places."""

    def at(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` up to ``end``, or to the end of the archive if that is -1.

        The streams before are no longer read.
        """


def open_archive(
    path: str, options: Mapping[str, Any], opened: ExitStack, opener: Opener = open_url, *, limits: ReadLimits
) -> BinaryIO:
    """Open a shard at its beginning, with options for ``opener``; ``opened`` closes it."""
    try:
        raw = opened.enter_context(opener(path, **options))
        return opened.enter_context(decompress_stream(raw, url=path, limits=limits))
    except ShardError:
        raise
    except OSError as error:
        raise _read_error(redact(path), error) from error


def opened_parts(
    path: str, options: Mapping[str, Any], opened: ExitStack, last: int, *, limits: ReadLimits
) -> SeekableShard:
    """Open a shard once for all its parts; ``opened`` closes it.

    Args:
        path: the shard.
        options: for `open_url`.
        opened: closes what is open.
        last: where the last part begins, in bytes.
        limits: what it may expand to.
    """
    remote = open_parts(path, **options)
    if remote is not None:
        opened.callback(remote.close)
        if detect_compression(remote.head) is None:
            found = _PartsOfRemote(remote)
            opened.callback(found.close)
            return found
    return _PartsOfStream(open_archive(path, options, opened, limits=limits), redact(path), last)


class _PartsOfRemote:
    """Each part by a request of its own."""

    def __init__(self, remote: RangeSource) -> None:
        self._remote = remote
        self._stream: BinaryIO | None = None

    def at(self, start: int, end: int) -> BinaryIO:
        self.close()
        self._stream = buffer_stream(self._remote.part(start, end))
        return self._stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class _PartsOfStream:
    """All parts from one stream: by seeking where it can, or past what is before them, once."""

    def __init__(self, stream: BinaryIO, archive: str, last: int) -> None:
        self._stream = stream
        self._archive = archive
        self._seeks = stream.seekable()
        self._at = 0
        self._section = _Section(stream, 0)
        if not self._seeks and last >= TOLD_FROM_BYTES:
            LOGGER.info(
                "%s cannot be read from the middle, so its first %d MB are passed over to go on from there",
                archive,
                last // 1_000_000,
            )

    def at(self, start: int, end: int) -> BinaryIO:
        try:
            if self._seeks:
                self._stream.seek(start)
            else:
                left = start - (self._at - self._section.left)
                while left > 0 and (piece := self._stream.read(min(left, PIECE))):
                    left -= len(piece)
        except ShardError:
            raise
        except OSError as error:
            raise _read_error(self._archive, error) from error
        if end < 0:
            return self._stream
        self._at, self._section = end, _Section(self._stream, end - start)
        return cast(BinaryIO, self._section)


class _Section:
    """The next bytes of a stream."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self.left = size

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self.left))
        self.left -= len(data)
        return data

    def seekable(self) -> bool:
        return False


def check_unchanged(members: Iterator[MemberTuple], archive: str, start: int, end: int) -> Iterator[MemberTuple]:
    """Yield the members of a part, if they are where they were.

    Raises:
        ChangedShardError: no member begins at ``start``; or, if there is an end, they do not end there.
    """
    try:
        first = next(members, None)
        if first is None or first[3] != start:
            raise CorruptShardError(f"{archive} has no member at byte {start}")
        yield first
        if end >= 0:
            yield from members
    except (CorruptShardError, TruncatedShardError, UnsupportedMemberError) as error:
        raise ChangedShardError(
            f"{archive} is not what it was when the state was saved: what began at byte {start} is no longer there. A "
            f"state can be loaded only with the very shards that it was saved with"
        ) from error
    yield from members


def _read_error(archive: str, error: OSError) -> ShardReadError:
    return ShardReadError(f"{archive} could not be read to its end: {type(error).__name__}: {error}")
