"""Open shards, and parts of them at an offset, if the shard supports it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.errors import (
    ChangedShardError,
    CorruptShardError,
    SampleError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.compression.decompress import buffer_stream, decompress_stream
from wds_datapipes.io.compression.formats import detect_compression
from wds_datapipes.io.openers import open_parts, open_url, redact
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.io.streams import name_read_errors
from wds_datapipes.shards.position import Resume
from wds_datapipes.types import MemberTuple, Opener, Shard

if TYPE_CHECKING:
    from wds_datapipes.io.remote.remote_file import RemoteFile


LOGGER = logging.getLogger("wds_datapipes")

#: Log when at least this many bytes have to be skipped, because that takes a while.
LOGGED_FROM_BYTES = 16 << 20
#: Bytes are skipped in pieces of this size.
PIECE = 128 << 10


def open_archive(
    url: str, options: Mapping[str, Any], stack: ExitStack, opener: Opener | None = None, *, limits: ReadLimits
) -> BinaryIO:
    """Open a shard and decompress it; ``stack`` closes it."""
    with name_read_errors(redact(url)):
        raw = stack.enter_context((opener or open_url)(url, **options))
        return stack.enter_context(decompress_stream(raw, url=url, limits=limits))


class ArchiveSpans:
    """Reads spans of an archive in the order of their offsets; opens the archive once, for the first span.

    A remote archive is read with a range request per span. Any other archive is a single stream, which seeks to each
    span or skips the bytes in between.

    Args:
        url: the archive.
        options: passed to `open_url`.
        limits: the limits on decompression.
        last_start: the offset of the last span.
        open_rest: opens a remote archive from an offset to its end, or returns None.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        limits: ReadLimits,
        last_start: int,
        open_rest: Callable[[RemoteFile, int], BinaryIO | None],
    ) -> None:
        self._url, self._options, self._limits, self._last_start = url, options, limits, last_start
        self._open_rest = open_rest
        self._stack = ExitStack()
        self._remote: RemoteFile | None = None
        self._stream: BinaryIO | None = None
        self._section: _Section | None = None

    def open_span(self, start: int, end: int) -> BinaryIO:
        """Return a stream of the bytes from ``start`` to ``end``, or to the end of the archive if ``end`` is -1.

        Earlier streams become invalid.
        """
        if self._remote is None and self._section is None:
            self._open()
        if self._remote is not None:
            if self._stream is not None:
                self._stream.close()
            rest = self._open_rest(self._remote, start) if end < 0 else None
            self._stream = buffer_stream(self._remote.part(start, end)) if rest is None else rest
            return self._stream
        stream, section = cast(BinaryIO, self._stream), cast(_Section, self._section)
        with name_read_errors(redact(self._url)):
            if stream.seekable():
                section.at = stream.seek(start)
            section.end = start
            while section.read(PIECE):
                pass
        section.end = end
        return stream if end < 0 else cast(BinaryIO, section)

    def close(self) -> None:
        """Close the archive."""
        if self._remote is not None and self._stream is not None:
            self._stream.close()
        self._stack.close()

    def _open(self) -> None:
        remote = open_parts(self._url, **self._options)
        if remote is not None:
            self._stack.callback(remote.close)
            if detect_compression(remote.head) is None:
                self._remote = remote
                return
        self._stream = open_archive(self._url, self._options, self._stack, limits=self._limits)
        self._section = _Section(self._stream)
        if not self._stream.seekable() and self._last_start >= LOGGED_FROM_BYTES:
            LOGGER.info(
                "%s cannot be read from an offset: skipping its first %d MB to resume",
                redact(self._url),
                self._last_start // 1_000_000,
            )


class _Section:
    """The bytes of a stream before the offset ``end``; ``at`` is the offset of the next byte."""

    def __init__(self, stream: BinaryIO) -> None:
        self._read, self._read1 = stream.read, getattr(stream, "read1", stream.read)
        self.at = self.end = 0

    def read(self, size: int) -> bytes:
        data = self._read(min(size, self.end - self.at))
        self.at += len(data)
        return data

    def read1(self, size: int) -> bytes:
        data = self._read1(min(size, self.end - self.at))
        self.at += len(data)
        return data

    def seekable(self) -> bool:
        return False


def check_unchanged(members: Iterator[MemberTuple], part: Shard, start: int, resume: Resume) -> Iterator[MemberTuple]:
    """Yield the members of a part of a shard, and check that their offsets and the next key are unchanged.

    Raises:
        ChangedShardError: no member begins at ``start``, or it belongs to another sample; or, if an end is given, the
            members do not end there.
    """
    archive = redact(part.url)
    try:
        try:
            first = next(members, None)
        except SampleError as error:  # of a record
            raise CorruptShardError(f"{archive} has no sample at byte {start}") from error
        if first is None or first[3] != start:
            raise CorruptShardError(f"{archive} has no member at byte {start}")
        key = resume.key_at(part.number, start)
        if key and (resume.key_rule(first[1]) or ("",))[0] != key:
            raise CorruptShardError(f"the sample {key!r} began at byte {start}, but now a member {first[1]!r} does")
        yield first
        if part.end >= 0:
            yield from members
    except (CorruptShardError, TruncatedShardError, UnsupportedMemberError) as error:
        raise ChangedShardError(
            f"{archive} has changed since the state was saved: ",
            str(error),
            ". A state can only be loaded with the shards it was saved with",
        ) from error
    yield from members
