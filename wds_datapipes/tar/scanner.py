"""Tar scanner: reads the headers of a shard, and seeks past the data where it can."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast
from zlib import adler32

from wds_datapipes.errors import ChangedShardError, ShardError, ShardReadError, StaleSidecarError, TruncatedShardError
from wds_datapipes.io.compression.decompress import compression_name, decompress_stream
from wds_datapipes.io.compression.formats import HEAD_BYTES, detect_compression
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error
from wds_datapipes.io.remote.range_reader import FileFacts, file_facts, open_ranges
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.headers import ADLERS, AGAIN, BLOCK, FILE, NUMBERS, PAX_LOCAL, EndMarker, Entry, HeaderReader
from wds_datapipes.tar.reader import PLAIN_FIELDS

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Scan", "scan_shard"]

#: Bytes per read: first and after a large member, doubled each time, up to the maximum.
FIRST_AHEAD, MOST_AHEAD = 4 << 10, 256 << 10
#: What is skipped is read as well where it is less than this, in bytes.
SEEK_FROM = 16 << 10

Found = Callable[[str, int, int, int], None]
"""Gets a file's name, where its first header begins, where its data begins, and how many bytes they are."""


class Scan(NamedTuple):
    """The result of a scan.

    Attributes:
        end: where the archive ends, without its end marker, in uncompressed bytes.
        bytes: the size of the file.
        sha256: its digest, if that was asked for.
        mtime_ns: when it was changed, if it is a local file.
        etag: what its store calls this version of it.
        compression: how it is compressed, if it is.
    """

    end: int
    bytes: int
    sha256: str | None
    mtime_ns: int | None
    etag: str | None
    compression: str | None


def scan_shard(
    url: str,
    found: Found,
    *,
    digest: bool = False,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> Scan:
    """Read the headers of a shard, and report each file in it.

    Data are skipped where the shard is a plain archive that can be read by ranges, and no digest is asked for.

    Raises:
        ShardError: the shard cannot be read to its end; the same errors as in reading.
        StaleSidecarError: it has changed meanwhile.
    """
    archive = redact(url)
    before = file_facts(url, storage_options=storage_options)
    with ExitStack() as opened:
        try:
            counted = None
            stream = None if digest else _plain_ranges(url, storage_options, opened)
            if stream is None:
                options: dict[str, Any] = {} if storage_options is None else {"storage_options": storage_options}
                counted = Counted(opened.enter_context(open_url(url, **options)), digest)
                stream = opened.enter_context(decompress_stream(cast(BinaryIO, counted), url=url, limits=limits))
            total = before.bytes if counted is None else None
            end = _scan(stream, archive, found, ignore_zeros, end_marker, total, limits)
            compression = compression_name(stream)
            size = before.bytes if counted is None else counted.finish()
        except ChangedShardError as error:
            raise _changed_error(archive) from error
        except ShardError:
            raise
        except OSError as error:
            raise ShardReadError(f"{archive} could not be read to its end: {type(error).__name__}: {error}") from error
    if before != FileFacts() and (
        before != file_facts(url, storage_options=storage_options) or before.bytes not in (None, size)
    ):
        raise _changed_error(archive)
    sha256 = None if counted is None or counted.hash is None else counted.hash.hexdigest()
    return Scan(end, size or 0, sha256, before.mtime_ns, before.etag, compression)


def _changed_error(archive: str) -> StaleSidecarError:
    return StaleSidecarError(f"{archive} has changed while its headers were read. Build its index again")


def _plain_ranges(url: str, storage_options: Mapping[str, Any] | None, opened: ExitStack) -> BinaryIO | None:
    """Open a shard for seeking, if it is not compressed and can be read by ranges."""
    stream = open_ranges(url, storage_options=storage_options)
    if stream is None:
        return None
    opened.enter_context(stream)
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    return stream if detect_compression(head) is None else None


def _scan(
    stream: BinaryIO,
    archive: str,
    found: Found,
    ignore_zeros: bool,
    end_marker: EndMarker,
    total: int | None,
    limits: ReadLimits,
) -> int:
    """Report each file; return the offset at which the archive ends, without its end marker.

    The stream seeks if the ``total`` of its bytes is known.
    """
    ahead = ReadBuffer(stream, archive)
    headers = HeaderReader(ahead, archive, ignore_zeros=ignore_zeros, end_marker=end_marker, limits=limits)
    most, most_before = limits.most("member_bytes"), limits.most("headers") * BLOCK
    read_ahead = FIRST_AHEAD
    while True:
        if ahead.left < BLOCK:
            ahead.fill(read_ahead)
            read_ahead = min(read_ahead * 2, MOST_AHEAD)
        entry = _plain_members(ahead, headers, found, most, most_before) if headers.plain else None
        if entry is None:
            begin = ahead.offset
            entry = headers.resolve(ahead.take(BLOCK))
            if entry is None:
                return begin
        name, size, is_file, start = entry
        if is_file:
            if size > most and limits.member_bytes is not None:
                what = f"{archive} has the member {name!r} (header at byte {start}) of {size} bytes"
                raise limit_error(limits, "member_bytes", what)
            found(name, start, ahead.offset, size)
        needed = size + -size % BLOCK
        if needed <= ahead.left:
            ahead.at += needed
            continue
        # Of a file, the zeros that fill up its last block may be missing where the end marker may.
        enough = size if is_file else needed
        if total is not None and needed - ahead.left >= SEEK_FROM:
            read_ahead = FIRST_AHEAD
            data_at = ahead.offset
            is_there = data_at + enough <= total
            if is_there:
                _jump(ahead, min(data_at + needed, total))
        elif is_there := ahead.skip(enough):
            ahead.fill(read_ahead)
            read_ahead = min(read_ahead * 2, MOST_AHEAD)
            ahead.at += min(needed - enough, ahead.left)
        if not is_there:
            raise TruncatedShardError(
                f"{archive} ends inside the member {name!r} (header at byte {start}): not all of its data is there. "
                f"{AGAIN}"
            )


def _jump(ahead: ReadBuffer, position: int) -> None:
    """Continue at another offset of a seekable stream."""
    ahead.stream.seek(position)
    ahead.window, ahead.at, ahead.position = b"", 0, position


def _plain_members(ahead: ReadBuffer, headers: HeaderReader, found: Found, most: int, most_before: int) -> Entry | None:
    """Report the plain files that are complete in the window, as `read_members` slices them out of it.

    Return the one after them if it is a plain file too, of which the window has the header and not all data.
    """
    window, at = ahead.window, ahead.at
    available = len(window)
    begin = ahead.position - available  # of the window in the archive
    first_at = at  # of the first header of the member
    while (data_at := at + BLOCK) <= available:
        block = window[at:data_at]
        raw_name, raw_size, raw_checksum, kind, prefix = PLAIN_FIELDS.unpack_from(block)
        size = NUMBERS[raw_size]
        if prefix != b"\0" or not 0 <= size <= most or adler32(block) & 0xFFFF != ADLERS[raw_checksum]:
            break
        next_at = data_at + ((size + BLOCK - 1) & -BLOCK)
        if kind != FILE:
            # A PAX header that says nothing of how to read the member, as tarfile writes one for a fractional time.
            if kind != PAX_LOCAL or next_at > available or not headers.may_be_ignored(window[data_at : data_at + size]):
                break
            at = next_at
            if at - first_at > most_before:
                break
            continue
        try:
            name = raw_name.partition(b"\0")[0].decode()
        except UnicodeDecodeError:
            break
        if next_at > available:
            ahead.at = data_at
            return Entry(name, size, True, begin + first_at)
        found(name, begin + first_at, begin + data_at, size)
        at = first_at = next_at
    ahead.at = first_at
    return None


class Counted(io.RawIOBase):
    """A stream that counts its bytes and computes their digest."""

    def __init__(self, stream: BinaryIO, digest: bool) -> None:
        self._stream = stream
        self.hash = hashlib.sha256() if digest else None
        self.count = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        size = cast(io.RawIOBase, self._stream).readinto(view) or 0
        self.count += size
        if self.hash is not None:
            self.hash.update(view[:size])
        return size

    def finish(self) -> int:
        """Read the rest of the stream, and return the number of bytes."""
        while self.readinto(bytearray(1 << 20)):
            pass
        return self.count
