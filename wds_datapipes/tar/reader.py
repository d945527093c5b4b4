"""Tar reader: yields the members of an archive.

The reader needs a stream that reads forward and nothing more. It knows ustar with its name prefix, the v7 format before
it, GNU long names and base-256 numbers, and PAX headers (IEEE Std 1003.1, "pax Interchange Format"). Directories, links
and devices are skipped; sparse files and the parts of multi-volume archives, which cannot be read faithfully, are
refused. Every header's checksum is verified, and the end marker has to be there: an archive that breaks off between two
members looks like a shorter one, and would lose data in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import BinaryIO
from zlib import adler32

from wds_datapipes.errors import CorruptShardError, TruncatedShardError
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.headers import (
    ADLERS,
    AGAIN,
    BLOCK,
    DAMAGED,
    FILE,
    NUMBERS,
    PAX_LOCAL,
    EndMarker,
    Entry,
    HeaderReader,
)
from wds_datapipes.types import MemberTuple, Shard
from wds_datapipes.user_warnings import warn_user

__all__ = ["read_members"]

#: A member below this size, in bytes, is read together with the header after it; a larger one straight into its bytes.
JOINT_READ_BELOW = 16 * 1024
#: After this many members in a row below the size before it, in bytes, so much is read at once.
SMALL, SMALL_IN_A_ROW, READ_AHEAD = 4096, 8, 64 * 1024

#: What tells the header of a plain file: name, size, checksum, kind, the first byte of the prefix.
PLAIN_FIELDS = Struct("100s 24x 12s 12x 8s c 188x c")


#: Archives with links of which this process has warned: at most one.
_warned_of_links: list[str] = []


def read_members(
    stream: BinaryIO,
    *,
    shard: Shard | str,
    archive: str = "",
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    start: int = 0,
    stop: int = -1,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> Iterator[MemberTuple]:
    """Yield the regular files of a tar archive, and read the stream to its end.

    Args:
        stream: an uncompressed archive, or a part of one; it is not closed.
        shard: the first item of each member.
        archive: the name of the archive in messages; the shard's URL by default.
        select_files: gets a member's name before its data is read; what it refuses is skipped without being kept.
        rename_files: gets a member's name and returns the one to use, before ``select_files`` sees it.
        ignore_zeros: continue after an end marker, to read archives that were concatenated.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end.
        start: where the stream begins in the archive, in bytes: 0, or the ``offset`` of a member.
        stop: where it ends, if that is before the end of the archive: the ``offset`` of another member.
        limits: what the archive may ask for.

    Raises:
        TruncatedShardError: the archive ends inside a member or without its end marker.
        CorruptShardError: a header is damaged, or data follows the end marker.
        UnsupportedMemberError: a member is sparse, or continues on another volume.
        ReadLimitError: a member exceeds its limit, which is checked before it is read, or another limit is exceeded.
    """
    archive = archive or (shard if isinstance(shard, str) else shard.url)
    ahead = ReadBuffer(stream, archive, start)
    headers = HeaderReader(ahead, archive, ignore_zeros=ignore_zeros, end_marker=end_marker, stop=stop, limits=limits)
    most = limits.most("member_bytes")
    # Nothing in a window of this size is beyond a limit. What may be is left to the headers' reader, which counts.
    harmless = min(most, limits.most("headers") * BLOCK)
    choose = _chooser(select_files, rename_files)
    small = 0  # how many small members came in a row
    # What stands between the data of two large members, in blocks: small members and headers, the same ones again and
    # again. It is read at once, but not more of the next large member, which would have to be copied together.
    between, data_end = 1, start
    while True:
        entry = None
        if headers.plain and len(ahead.window) <= harmless:
            members, entry = _plain_members(ahead, headers, shard, choose)
            yield from members
            del members  # so that they can be freed before more is read
        if entry is None:
            entry = headers.resolve(ahead.take(BLOCK))
            if entry is None:
                return
        name, size, is_file, start = entry
        chosen = choose(name) if is_file and choose is not None else name
        padding = -size % BLOCK
        if size > most and is_file and chosen is not None and limits.member_bytes is not None:
            found = f"{archive} has the member {name!r} (header at byte {start}) of {size} bytes"
            raise limit_error(limits, "member_bytes", found)
        if is_file and size < JOINT_READ_BELOW:
            small = small + 1 if size < SMALL else 0
            if ahead.left < size + padding + BLOCK:
                ahead.fill(size + padding + (READ_AHEAD if small > SMALL_IN_A_ROW else BLOCK))
            data = ahead.take(min(size, ahead.left))
        elif is_file and chosen is not None:
            small = 0
            between = min(between + 1, max((ahead.offset - data_end) // BLOCK, 1))
            try:
                data = ahead.take(size)
            except (MemoryError, OverflowError) as error:
                raise CorruptShardError(
                    f"{archive} says that its member {name!r} (header at byte {start}) has {size} bytes, more than "
                    f"memory holds. {DAMAGED}, or leave the member out with select_files"
                ) from error
            ahead.fill(padding + between * BLOCK)
            data_end = ahead.offset + padding
        else:
            if headers.is_link and not is_file and select_files is None:  # which is asked for files alone
                _warn_of_link(name if rename_files is None else rename_files(name), archive, start)
            if not ahead.skip(size + padding):
                raise _cut(entry, archive, "not all of its data is there")
            data_end += size + padding  # it is not between them, and stays unread
            continue
        if len(data) != size:
            raise _cut(entry, archive, f"{len(data)} of its {size} bytes are there")
        ahead.at += padding
        if chosen is not None:
            yield shard, chosen, data, start
        del data


def _plain_members(
    ahead: ReadBuffer, headers: HeaderReader, shard: Shard | str, choose: Callable[[str], str | None] | None
) -> tuple[list[MemberTuple], Entry | None]:
    """Slice plain files out of the window, as far as they are complete in it.

    Return them, and the one after them if it is a plain file too, of which the window has the header and not all data.
    """
    window, at = ahead.window, ahead.at
    available = len(window)
    begin = ahead.position - available  # of the window in the archive
    members: list[MemberTuple] = []
    first_at = at  # of the first header of the member
    while (data_at := at + BLOCK) <= available:
        block = window[at:data_at]
        raw_name, raw_size, raw_checksum, kind, prefix = PLAIN_FIELDS.unpack_from(block)
        size = NUMBERS[raw_size]
        if prefix != b"\0" or size < 0 or adler32(block) & 0xFFFF != ADLERS[raw_checksum]:
            break
        next_at = data_at + ((size + BLOCK - 1) & -BLOCK)
        if kind != FILE:
            # A PAX header that says nothing of how to read the member, as tarfile writes one for a fractional time.
            if kind != PAX_LOCAL or next_at > available or not headers.may_be_ignored(window[data_at : data_at + size]):
                break
            at = next_at
            continue
        try:
            name = raw_name.partition(b"\0")[0].decode()
        except UnicodeDecodeError:
            break
        if next_at > available:
            ahead.at = data_at
            return members, Entry(name, size, True, begin + first_at)
        if choose is None:
            members.append((shard, name, window[data_at : data_at + size], begin + first_at))
        elif (chosen := choose(name)) is not None:
            members.append((shard, chosen, window[data_at : data_at + size], begin + first_at))
        at = first_at = next_at
    ahead.at = first_at
    return members, None


def _chooser(
    select_files: Callable[[str], bool] | None, rename_files: Callable[[str], str] | None
) -> Callable[[str], str | None] | None:
    """Return a function that maps a member's name to its new one, or to None to skip it."""
    if select_files is None:
        return rename_files

    def choose(name: str) -> str | None:
        renamed = name if rename_files is None else rename_files(name)
        return renamed if select_files(renamed) else None

    return choose


def _warn_of_link(name: str, archive: str, start: int) -> None:
    """Warn, once in a process, of a link that would be a field if it were a file."""
    if _warned_of_links or name.rpartition("/")[2].find(".") <= 0:  # no field's name
        return
    _warned_of_links.append(archive)
    warn_user(
        f"{archive} has the member {name!r} (header at byte {start}) as a link, and links are skipped, so its "
        "sample lacks a field. Write the archive again with tar's --hard-dereference and --dereference. Other links "
        "are skipped without a warning"
    )


def _cut(entry: Entry, archive: str, found: str) -> TruncatedShardError:
    return TruncatedShardError(
        f"{archive} ends inside the member {entry.name!r} (header at byte {entry.start}): {found}. {AGAIN}"
    )
