"""Tar reader: yields the members of an archive.

The reader needs only a forward stream. It supports ustar with its name prefix, the older v7 format, GNU long names and
base-256 numbers, and PAX headers (IEEE Std 1003.1, "pax Interchange Format"). Directories, links and devices are
skipped. Sparse files and parts of multi-volume archives are rejected, because they cannot be read faithfully. The
checksum of every header is verified. The end marker is required, because an archive truncated between two members looks
like a shorter one, and would lose data silently.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from struct import Struct
from typing import Any, BinaryIO
from zlib import adler32

from wds_datapipes.errors import CorruptShardError, TruncatedShardError
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error
from wds_datapipes.tar.buffer import PIECE, READ_AHEAD_BYTES, ReadBuffer
from wds_datapipes.tar.headers import (
    ADLERS,
    BLOCK,
    DAMAGED,
    FILE,
    INCOMPLETE,
    NUMBERS,
    PAX_LOCAL,
    EndMarker,
    HeaderReader,
    MemberHeader,
)
from wds_datapipes.types import MemberTuple, Shard
from wds_datapipes.user_warnings import warn_user

#: A member below this size, in bytes, is read together with the next header; a larger one is read directly into its
#: bytes.
JOINT_READ_BELOW = 16 * 1024
#: The size below which a member is small, in bytes; after this number of consecutive small members,
#: `READ_AHEAD_BYTES` are read at once.
SMALL, SMALL_IN_A_ROW = 4096, 8
#: If only headers are wanted: the number of bytes read at once at first, doubled each time up to `READ_AHEAD_BYTES`,
#: and the minimum size of data to skip by seeking.
FIRST_AHEAD, SEEK_FROM = 4 * 1024, 16 * 1024

#: The fields that identify the header of a plain file: name, size, checksum, kind, the first byte of the prefix.
PLAIN_FIELDS = Struct("100s 24x 12s 12x 8s c 188x c")


#: The archive about whose links this process has warned; one warning per shard would mean thousands.
_warned_about_links: list[str] = []


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
    headers_only: bool = False,
) -> Generator[MemberTuple, None, int]:
    """Yield the regular files of a tar archive, reading the stream to its end.

    The generator returns the offset at which the archive ends, excluding its end marker.

    Args:
        stream: an uncompressed archive, or a part of one; it is not closed.
        shard: the first item of each member.
        archive: the name of the archive for messages; by default, the shard's URL.
        select_files: called with a member's name before its data is read; returns False to skip the member.
        rename_files: maps a member's name to its new name, before ``select_files`` is called.
        ignore_zeros: continue after an end marker to read concatenated archives.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end, and ``"final"``
            ignores data that follow them.
        start: the offset of the stream in the archive, in bytes: 0, or the ``offset`` of a member.
        stop: the offset at which the stream ends, if it ends before the archive: the ``offset`` of another member.
        limits: the limits that the archive must observe.
        headers_only: yield the name, the offset of the data and its size instead of the data, which is skipped if the
            stream can seek.

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
    # A window up to this size cannot exceed a limit; the header reader checks larger ones.
    harmless = min(most, limits.most("headers") * BLOCK, limits.most("header_bytes"))
    choose = _chooser(select_files, rename_files)
    tracked = None if isinstance(shard, str) else shard
    small = 0  # the number of consecutive small members
    # The number of blocks between the data of two large members: headers and small members, usually the same each time.
    # They are read at once, but without data of the next large member, which would have to be copied.
    between, data_end = 1, start
    scan_ahead = FIRST_AHEAD
    while True:
        entry = None
        if headers_only and ahead.left < BLOCK:
            ahead.fill(scan_ahead)
            scan_ahead = min(scan_ahead * 2, READ_AHEAD_BYTES)
        if headers.plain and len(ahead.window) <= harmless:
            members, entry = _plain_members(ahead, headers, shard, choose, headers_only)
            yield from members
            del members  # free them before reading more
        if entry is None:
            end = ahead.offset
            entry = headers.resolve(ahead.take(BLOCK))
            if entry is None:
                return end
            if tracked is not None:
                tracked.has_begun = True
        name, size, is_file, start = entry
        chosen = choose(name) if is_file and choose is not None else name
        if tracked is not None and is_file and chosen is not None:
            tracked.reached = chosen, start
        padding = -size % BLOCK
        if size > most and is_file and chosen is not None and limits.member_bytes is not None:
            found = f"{archive} has the member {name!r} (header at byte {start}) of {size} bytes"
            raise limit_error(limits, "member_bytes", found)
        if is_file and headers_only:
            if chosen is not None:
                span: Any = (chosen, ahead.offset, size)
                yield shard, chosen, span, start
            chosen = None
            scan_ahead = FIRST_AHEAD if size >= SEEK_FROM else scan_ahead
        if is_file and size < JOINT_READ_BELOW and not headers_only:
            small = small + 1 if size < SMALL else 0
            if ahead.left < size + padding + BLOCK:
                ahead.fill(size + padding + (READ_AHEAD_BYTES if small > SMALL_IN_A_ROW else BLOCK))
            data = ahead.take(min(size, ahead.left))
        elif is_file and chosen is not None:
            small = 0
            between = min(between + 1, max((ahead.offset - data_end) // BLOCK, 1))
            try:
                data = ahead.take(size)
            except (MemoryError, OverflowError) as error:
                raise CorruptShardError(
                    f"{archive} declares {size} bytes for its member {name!r} (header at byte {start}), more than fit "
                    f"into memory. {DAMAGED}, or exclude the member with select_files"
                ) from error
            ahead.fill(padding + between * BLOCK)
            data_end = ahead.offset + padding
        else:
            if headers.is_link and not is_file and select_files is None:  # it sees only files
                _warn_about_link(name if rename_files is None else rename_files(name), archive, start)
            # If the end marker is optional, so is the padding of the last file.
            seek_from = SEEK_FROM if headers_only else PIECE
            if not ahead.skip(size + padding, least=size if is_file else size + padding, seek_from=seek_from):
                raise _truncated_error(entry, archive, "its data is incomplete")
            data_end += size + padding  # do not count the skipped data
            continue
        if len(data) != size:
            raise _truncated_error(entry, archive, f"only {len(data)} of its {size} bytes are present")
        ahead.at += padding
        if chosen is not None:
            yield shard, chosen, data, start
        del data


def _plain_members(
    ahead: ReadBuffer,
    headers: HeaderReader,
    shard: Shard | str,
    choose: Callable[[str], str | None] | None,
    headers_only: bool,
) -> tuple[list[MemberTuple], MemberHeader | None]:
    """Slice those plain files out of the window that are complete in it.

    Return these files, and the next one, if it is a plain file whose header is in the window, but not all of its data.
    """
    window, at = ahead.window, ahead.at
    available = len(window)
    begin = ahead.position - available  # the window's offset in the archive
    members: list[MemberTuple] = []
    first_at = at  # the first header of the member
    while (data_at := at + BLOCK) <= available:
        block = window[at:data_at]
        raw_name, raw_size, raw_checksum, kind, prefix = PLAIN_FIELDS.unpack_from(block)
        size = NUMBERS[raw_size]
        if prefix != b"\0" or size < 0 or adler32(block) & 0xFFFF != ADLERS[raw_checksum]:
            break
        next_at = data_at + ((size + BLOCK - 1) & -BLOCK)
        if kind != FILE:
            # Ignore a PAX header that does not affect how the member is read; tarfile writes one for fractional times.
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
            return members, MemberHeader(name, size, True, begin + first_at)
        chosen = name if choose is None else choose(name)
        if chosen is not None:
            data: Any = (chosen, begin + data_at, size) if headers_only else window[data_at : data_at + size]
            members.append((shard, chosen, data, begin + first_at))
        at = first_at = next_at
    ahead.at = first_at
    return members, None


def _chooser(
    select_files: Callable[[str], bool] | None, rename_files: Callable[[str], str] | None
) -> Callable[[str], str | None] | None:
    """Return a function that maps a member's name to its new name, or to None to skip it."""
    if select_files is None:
        return rename_files

    def choose(name: str) -> str | None:
        renamed = name if rename_files is None else rename_files(name)
        return renamed if select_files(renamed) else None

    return choose


def _warn_about_link(name: str, archive: str, start: int) -> None:
    """Warn once per process about a link that would be a field if it were a file."""
    if _warned_about_links or name.rpartition("/")[2].find(".") <= 0:  # not the name of a field
        return
    _warned_about_links.append(archive)
    warn_user(
        f"{archive} has the member {name!r} (header at byte {start}) as a link, and links are skipped, so its "
        "sample lacks a field. Write the archive again with tar's --hard-dereference and --dereference. Other links "
        "are skipped without a warning"
    )


def _truncated_error(entry: MemberHeader, archive: str, found: str) -> TruncatedShardError:
    return TruncatedShardError(
        f"{archive} ends inside the member {entry.name!r} (header at byte {entry.start}): {found}. {INCOMPLETE}"
    )
