"""Resuming: reads the remaining parts of shards, from an offset if the shard supports it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.errors import (
    ChangedShardError,
    CorruptShardError,
    SampleError,
    ShardError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.compression.decompress import buffer_stream
from wds_datapipes.io.compression.formats import detect_compression
from wds_datapipes.io.openers import open_parts, redact
from wds_datapipes.shards.loading import ShardMembers, ShardReader, StreamOptions, open_archive, read_error
from wds_datapipes.shards.position import Resume
from wds_datapipes.types import MemberTuple, Shard

if TYPE_CHECKING:
    from wds_datapipes.io.remote.remote_file import RemoteFile


LOGGER = logging.getLogger("wds_datapipes")

#: Log when at least this many bytes have to be skipped, since that takes a while.
LOGGED_FROM_BYTES = 16 << 20
#: Bytes are skipped in pieces of this size.
PIECE = 128 << 10
#: All of a shard.
WHOLE = (0, -1)


def resume_shards(source: Iterable[Any], options: StreamOptions, resume: Resume) -> Iterator[ShardMembers]:
    """Read the part of the shards of ``source`` that remains after a state: buffered samples, and all that follow.

    Each part of a shard is yielded as a separate shard with the same number.

    Raises:
        ChangedShardError: a shard has changed since the state was saved.
    """

    def is_whole(number: int) -> bool:
        return number <= resume.last and resume.spans(number) == [WHOLE]

    remaining = source if resume.last == sys.maxsize else islice(source, resume.last + 1)  # may be infinite
    reader = ShardReader(remaining, options, is_whole)
    for shard in reader:
        yield from read_spans(reader, shard, resume.spans(shard.number))
    reader.finish()


def read_spans(reader: ShardReader, shard: Shard, spans: Sequence[tuple[int, int]]) -> Iterator[ShardMembers]:
    """Read spans of a shard, in order, each as a separate shard with the same number."""
    if not spans:
        return
    if spans == [WHOLE]:
        yield shard, reader.read(shard)
        return
    reader.record_shard(shard)
    archive = _SpanReader(reader, shard, last_start=spans[-1][0])
    try:
        for start, end in spans:
            part = Shard(shard.url, shard.local_path, shard.number, end)
            yield part, _read_span(reader, part, archive, start, is_last=(start, end) == spans[-1])
            if not part.is_complete:
                break
    finally:
        archive.close()


def _read_span(
    reader: ShardReader, part: Shard, archive: _SpanReader, start: int, *, is_last: bool
) -> Iterator[MemberTuple]:
    with reader.handle_errors(part):
        try:
            members = reader.members(archive.open_span(start, part.end), part, start)
            yield from check_unchanged(members, redact(part.url), start, part.end)
        except BaseException:
            archive.close()
            raise
        if is_last:
            archive.close()  # may raise, as for a command that failed


class _SpanReader:
    """Reads spans of an archive, in the order of their offsets; opens it once, when the first is read.

    A remote archive is read by a range request for each span. Any other is one stream, which seeks, or else skips the
    bytes between the spans.
    """

    def __init__(self, reader: ShardReader, shard: Shard, last_start: int) -> None:
        self._reader, self._shard, self._last_start = reader, shard, last_start
        self._stack = ExitStack()
        self._remote: RemoteFile | None = None
        self._stream: BinaryIO | None = None
        self._at = 0
        self._section: _Section | None = None

    def open_span(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` to ``end``, or to the end of the archive if ``end`` is -1.

        Earlier streams become invalid.
        """
        if self._remote is None and self._stream is None:
            self._open()
        if self._remote is not None:
            if self._stream is not None:
                self._stream.close()
            self._stream = buffer_stream(self._remote.part(start, end))
            return self._stream
        stream = cast(BinaryIO, self._stream)
        try:
            if stream.seekable():
                stream.seek(start)
            else:
                remaining = start - (self._at - (self._section.remaining if self._section else 0))
                while remaining > 0 and (piece := stream.read(min(remaining, PIECE))):
                    remaining -= len(piece)
        except ShardError:
            raise
        except OSError as error:
            raise read_error(redact(self._shard.url), error) from error
        if end < 0:
            return stream
        self._at, self._section = end, _Section(stream, end - start)
        return cast(BinaryIO, self._section)

    def close(self) -> None:
        if self._remote is not None and self._stream is not None:
            self._stream.close()
        self._stack.close()

    def _open(self) -> None:
        url, options, limits = self._shard.url, self._reader.opener_options, self._reader.options.limits
        remote = open_parts(url, **options)
        if remote is not None:
            self._stack.callback(remote.close)
            if detect_compression(remote.head) is None:
                self._remote = remote
                return
        self._stream = open_archive(url, options, self._stack, limits=limits)
        if not self._stream.seekable() and self._last_start >= LOGGED_FROM_BYTES:
            LOGGER.info(
                "%s cannot be read from an offset: skipping its first %d MB to resume",
                redact(url),
                self._last_start // 1_000_000,
            )


class _Section:
    """The next bytes of a stream."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self.remaining = size

    def read(self, size: int) -> bytes:
        return self._counted(self._stream.read(min(size, self.remaining)))

    def read1(self, size: int) -> bytes:
        read = getattr(self._stream, "read1", self._stream.read)
        return self._counted(read(min(size, self.remaining)))

    def _counted(self, data: bytes) -> bytes:
        self.remaining -= len(data)
        return data

    def seekable(self) -> bool:
        return False


def check_unchanged(members: Iterator[MemberTuple], archive: str, start: int, end: int) -> Iterator[MemberTuple]:
    """Yield the members of a span, and check that their offsets are unchanged.

    Raises:
        ChangedShardError: no member begins at ``start``; or, if there is an end, they do not end there.
    """
    try:
        try:
            first = next(members, None)
        except SampleError as error:  # of a record
            raise CorruptShardError(f"{archive} has no sample at byte {start}") from error
        if first is None or first[3] != start:
            raise CorruptShardError(f"{archive} has no member at byte {start}")
        yield first
        if end >= 0:
            yield from members
    except (CorruptShardError, TruncatedShardError, UnsupportedMemberError) as error:
        raise ChangedShardError(
            f"{archive} has changed since the state was saved: the sample at byte {start} is no longer there. A state "
            f"can only be loaded with the same shards that it was saved with"
        ) from error
    yield from members
