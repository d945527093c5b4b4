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

from wds_datapipes.core.ahead import Ahead
from wds_datapipes.core.headers import ADLERS, AGAIN, BLOCK, DAMAGED, FILE, NUMBERS, EndMarker, HeaderReader, text
from wds_datapipes.core.types import Member
from wds_datapipes.errors import CorruptShard, TruncatedShard

__all__ = ["read_members"]

#: A member below this size is read in one piece with the header after it; a larger one straight into its own bytes.
JOINT_READ_BELOW = 128 * 1024
#: After some members below the first number of bytes in a row, the second number of bytes is read at once.
SMALL, SMALL_IN_A_ROW, READ_AHEAD = 4096, 8, 64 * 1024

#: What tells the header of a plain file: name, size, checksum, kind, the first byte of the prefix.
PLAIN_FIELDS = Struct("100s 24x 12s 12x 8s c 188x c")


def read_members(
    stream: BinaryIO,
    *,
    url: str,
    archive: str | None = None,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
) -> Iterator[Member]:
    """Read the regular files of a tar archive, to the end of the stream.

    Args:
        stream: an uncompressed archive at its beginning; it is not closed.
        url: what its members say that they come from.
        archive: what errors call it, where that differs from ``url``.
        select_files: gets a member's name before its data is read; what it refuses is passed over without being kept.
        rename_files: gets a member's name and returns the one to use, before ``select_files`` sees it.
        ignore_zeros: go on after an end marker, to read archives that were concatenated.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.

    Raises:
        TruncatedShard: the archive ends inside a member or without its end marker.
        CorruptShard: a header is damaged, or data follows the end marker.
        UnsupportedMember: a member is sparse, or continues on another volume.
    """
    ahead = Ahead(stream)
    archive = archive or url
    headers = HeaderReader(ahead, archive, ignore_zeros=ignore_zeros, end_marker=end_marker)
    make_member = tuple.__new__  # NamedTuple's own constructor takes twice the time
    position = 0  # of the next header
    small = 0  # small members in a row
    while True:
        # A shard is made of plain files, so their headers are read here, in line; all else is left to `headers`.
        start = position
        at = ahead.at
        if (end := at + BLOCK) <= len(ahead.window):
            block = ahead.window[at:end]
            ahead.at = end
        else:
            block = ahead.take(BLOCK)
        if len(block) == BLOCK:
            raw_name, raw_size, raw_checksum, kind, prefix = PLAIN_FIELDS.unpack_from(block)
        else:
            kind = b""
        if (
            kind == FILE
            and prefix == b"\0"
            and headers.plain
            and adler32(block) & 0xFFFF == ADLERS[raw_checksum]
            and (size := NUMBERS[raw_size]) >= 0
        ):
            try:
                name = raw_name.partition(b"\0")[0].decode()
            except UnicodeDecodeError:
                name = text(raw_name)
            position += BLOCK
        else:
            entry = headers.resolve(block, position)
            if entry is None:
                return
            name, size, is_file, start, position = entry
            if not is_file:
                if not ahead.skip(size):
                    raise _cut(archive, name, start, "not all of its data is there")
                position += size
                continue
        if rename_files is not None:
            name = rename_files(name)
        in_blocks = (size + BLOCK - 1) & -BLOCK
        position += in_blocks
        if select_files is not None and not select_files(name):
            if not ahead.skip(in_blocks):
                raise _cut(archive, name, start, "not all of its data is there")
            continue
        if size < JOINT_READ_BELOW:
            at = ahead.at
            if at + in_blocks > len(ahead.window):
                small = small + 1 if size < SMALL else 0
                ahead.fill(in_blocks + (READ_AHEAD if small > SMALL_IN_A_ROW else BLOCK))
                at = 0
            data = ahead.window[at : at + size]
            ahead.at = at + in_blocks
        else:
            small = 0
            try:
                data = ahead.take(size)
            except (MemoryError, OverflowError) as error:
                raise CorruptShard(
                    f"{archive} says that its member {name!r} (header at byte {start}) has {size} bytes, more than "
                    f"memory holds. {DAMAGED}, or leave the member out with select_files"
                ) from error
            ahead.fill(in_blocks - size + BLOCK)
            ahead.at = in_blocks - size
        if len(data) != size:
            raise _cut(archive, name, start, f"{len(data)} of its {size} bytes are there")
        yield make_member(Member, (url, name, data, start))
        del data  # so that it can be freed before the next one is read


def _cut(archive: str, name: str, start: int, found: str) -> TruncatedShard:
    return TruncatedShard(f"{archive} ends inside the member {name!r} (header at byte {start}): {found}. {AGAIN}")
