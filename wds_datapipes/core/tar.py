"""Tar archives: bytes to members.

The reader needs a stream that reads forward and nothing more. It knows ustar with its name prefix, the v7 format before
it, GNU long names and base-256 numbers, and PAX headers (IEEE Std 1003.1, "pax Interchange Format"). Directories, links
and devices are passed over; sparse files and the parts of multi-volume archives, which cannot be read faithfully, are
refused. Every header's checksum is verified, and the end marker has to be there: an archive that breaks off between two
members looks like a shorter one, and would lose data in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import BinaryIO
from zlib import adler32

from wds_datapipes.core.headers import (
    AGAIN,
    BLOCK,
    DAMAGED,
    FILE,
    EndMarker,
    HeaderReader,
    expected_adler,
    number,
    text,
)
from wds_datapipes.core.types import Member
from wds_datapipes.errors import CorruptShard, TruncatedShard

__all__ = ["read_members"]

#: A member below this size is read together with the header after it; one above it is read straight into its bytes.
READ_AHEAD_BELOW = 128 * 1024

#: What tells the header of a plain file: name, size, checksum, kind, the first byte of the prefix.
PLAIN_FIELDS = Struct("100s 24x 12s 12x 8s c 188x c")


def read_members(
    stream: BinaryIO,
    *,
    url: str,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
) -> Iterator[Member]:
    """Read the regular files of a tar archive, to the end of the stream.

    Args:
        stream: an uncompressed archive at its beginning; it is not closed.
        url: what the archive is called, in the members and in errors.
        select_files: gets a member's name before its data is read; what it refuses is passed over without being kept.
        rename_files: gets a member's name and returns the one to use, before ``select_files`` sees it.
        ignore_zeros: go on after an end marker, to read archives that were concatenated.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.

    Raises:
        TruncatedShard: the archive ends inside a member or without its end marker.
        CorruptShard: a header is damaged, or data follows the end marker.
        UnsupportedMember: a member is sparse, or continues on another volume.
    """
    read = stream.read
    headers = HeaderReader(stream, url, ignore_zeros=ignore_zeros, end_marker=end_marker)
    block = read(BLOCK)
    position = 0  # of `block` in the archive
    while True:
        # A shard is made of plain files, so their headers are read here, in line; all else is left to `headers`.
        if len(block) == BLOCK:
            raw_name, raw_size, raw_checksum, kind, prefix = PLAIN_FIELDS.unpack_from(block)
        else:
            kind = b""
        if (
            kind == FILE
            and prefix == b"\0"
            and headers.plain
            and adler32(block) & 0xFFFF == expected_adler(raw_checksum)
            and (size := number(raw_size)) >= 0
        ):
            name = text(raw_name)
            start = position
            position += BLOCK
        else:
            entry = headers.resolve(block, position)
            if entry is None:
                return
            name, size, is_file, start, position = entry
            if not is_file:
                _skip(stream, size, url, name, start)
                position += size
                block = read(BLOCK)
                continue
        if rename_files is not None:
            name = rename_files(name)
        in_blocks = (size + BLOCK - 1) & -BLOCK
        if select_files is not None and not select_files(name):
            _skip(stream, in_blocks, url, name, start)
            position += in_blocks
            block = read(BLOCK)
            continue
        if size < READ_AHEAD_BELOW:
            block = read(in_blocks + BLOCK)
            data = block[:size]
            block = block[in_blocks:]
        else:
            try:
                data = read(size)
            except (MemoryError, OverflowError) as error:
                raise CorruptShard(
                    f"{url} says that its member {name!r} (header at byte {start}) has {size} bytes, more than memory "
                    f"holds. {DAMAGED}, or leave the member out with select_files"
                ) from error
            block = read(in_blocks - size + BLOCK)[in_blocks - size :]
        if len(data) != size:
            raise _cut(url, name, start, f"{len(data)} of its {size} bytes are there")
        position += in_blocks
        yield Member(url, name, data, start)
        del data  # so that it can be freed before the next one is read


def _skip(stream: BinaryIO, count: int, url: str, name: str, start: int) -> None:
    """Move past ``count`` bytes without keeping them, and without reading them where the stream can seek."""
    left = count
    if count >= READ_AHEAD_BELOW and stream.seekable():
        # A seek may go beyond the end without a word, so the last byte is read.
        stream.seek(count - 1, 1)
        left = 1
    while left and (chunk := stream.read(min(left, READ_AHEAD_BELOW))):
        left -= len(chunk)
    if left:
        raise _cut(url, name, start, "not all of its data is there")


def _cut(url: str, name: str, start: int, found: str) -> TruncatedShard:
    return TruncatedShard(f"{url} ends inside the member {name!r} (header at byte {start}): {found}. {AGAIN}")
