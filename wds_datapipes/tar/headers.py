"""Parse tar headers, the blocks of 512 bytes that describe members."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Literal, NamedTuple, TypeAlias
from zlib import adler32

from wds_datapipes.errors import CorruptShardError, TruncatedShardError, UnsupportedMemberError
from wds_datapipes.hints import END_MARKER, FINAL, IGNORE_ZEROS
from wds_datapipes.io.magic_numbers import describe_kind
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error, trailing_zeros_error
from wds_datapipes.tar.buffer import ReadBuffer

EndMarker: TypeAlias = Literal["required", "optional", "final"]

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)
END_MARKER_BYTES = 2 * BLOCK
#: The number of bytes to read at once of data that follow the archive.
REST_BYTES = 1 << 20

#: name, size, checksum, kind, magic, prefix
FIELDS = Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s")
SIGNED_BYTES = Struct("512b")
#: The size of the name field in a header.
NAME_BYTES = 100

FILE, OLD_FILE, CONTIGUOUS_FILE = b"0", b"\0", b"7"
GNU_LONG_NAME, GNU_LONG_LINK, GNU_SPARSE, GNU_CONTINUED = b"L", b"K", b"S", b"M"
PAX_LOCAL, PAX_GLOBAL, PAX_SOLARIS = b"x", b"g", b"X"
EXTENSIONS = (GNU_LONG_NAME, GNU_LONG_LINK, PAX_LOCAL, PAX_GLOBAL, PAX_SOLARIS)
HARD_LINK, SYMBOLIC_LINK = b"1", b"2"
#: Links, devices, directories and pipes: no data follows them, whatever their size field says.
WITHOUT_DATA = (HARD_LINK, SYMBOLIC_LINK, b"3", b"4", b"5", b"6")

INCOMPLETE = "The file is incomplete; write or fetch it again"
DAMAGED = "The archive is damaged; write or fetch it again"


class MemberHeader(NamedTuple):
    """A member as described by its headers."""

    #: The full name.
    name: str
    #: The size of the data in bytes, without the padding of the last block.
    size: int
    is_file: bool
    #: The offset of its first header in the archive, which may be the header of its long name or PAX records.
    start: int


class HeaderReader:
    """Interprets headers of anything but plain files, and finds the end of the archive."""

    def __init__(
        self,
        ahead: ReadBuffer,
        archive: str,
        *,
        ignore_zeros: bool,
        end_marker: EndMarker,
        stop: int = -1,
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        self._ahead = ahead
        self._limits = limits
        self._most_headers, self._most_of_gap = limits.most("headers"), limits.most("gap_bytes")
        self._most_of_name, self._most_of_tail = limits.most("name_bytes"), limits.most("tail_bytes")
        #: The start and the current end of the last gap.
        self._gap_from = self._gap_to = -1
        self._stop = stop
        self._archive = archive
        self._ignore_zeros = ignore_zeros
        self._end_marker = end_marker
        self._globals: dict[str, bytes] = {}
        #: Whether the last member was a link.
        self.is_link = False
        #: Whether a header that follows no long name or PAX header can be taken literally, within the limits.
        self.plain = self._is_plain()

    def resolve(self, block: bytes) -> MemberHeader | None:
        """Follow the headers, starting with ``block``, to the next member; return None at the end of the archive."""
        start = position = self._ahead.offset - len(block)
        if position != self._gap_to:  # there is a file in between
            self._gap_from = position
        pending: dict[str, bytes] = {}
        count = 0
        while True:
            if not block and start == position == self._stop:
                return None
            if len(block) < BLOCK:
                self._check_end(block, position, inside=position > start)
                return None
            if block == ZERO_BLOCK:
                if position > start:
                    raise self._corrupt(
                        f"has its end marker at byte {position}, right after a long name or PAX header at byte "
                        f"{start}, whose member is missing"
                    )
                block, position = self._after_zeros(position)
                if not block:
                    return None
                start = position
                continue
            raw_name, raw_size, raw_checksum, kind = FIELDS.unpack_from(block)[:4]
            self._verify(block, raw_checksum, position)
            size = NUMBERS[raw_size]
            if size < 0:
                raise self._corrupt(
                    f"has a header at byte {position} (member {text(raw_name)!r}) whose size field is {raw_size!r}, "
                    f"which is not a number"
                )
            if kind not in EXTENSIONS:
                entry = self._entry(block, {**self._globals, **pending}, start)
                if not entry.is_file:
                    self._extend_gap(self._ahead.offset + round_to_blocks(entry.size))
                return entry
            count += 1
            if count > self._most_headers:
                found = f"{self._archive} has {count} headers for one member, the last one at byte {position}"
                raise limit_error(self._limits, "headers", found)
            self._extend(pending, kind, size, position)
            if kind == PAX_GLOBAL and start == position:
                start = self._ahead.offset  # a global header belongs to no member
            position = self._ahead.offset
            block = self._ahead.take(BLOCK)

    def may_be_ignored(self, records: bytes) -> bool:
        """Whether PAX records are valid and do not affect how a member is read."""
        try:
            return not self._records(records, 0)
        except CorruptShardError:
            return False

    def _extend(self, pending: dict[str, bytes], kind: bytes, size: int, position: int) -> None:
        """Read the long name or the PAX records of a member after their header at ``position``."""
        if size > self._limits.most("header_bytes"):
            found = f"{self._archive} has a long name or PAX header of {size} bytes at byte {position}"
            raise limit_error(self._limits, "header_bytes", found)
        content = self._ahead.take(round_to_blocks(size))
        if len(content) < round_to_blocks(size):
            raise self._truncated()
        if kind == GNU_LONG_NAME:
            pending.setdefault("path", content[:size].partition(b"\0")[0])
        elif kind == PAX_GLOBAL:
            self._globals.update(self._records(content[:size], position))
            self.plain = self._is_plain()
        elif kind != GNU_LONG_LINK:
            for keyword, value in self._records(content[:size], position).items():
                pending.setdefault(keyword, value)

    def _entry(self, block: bytes, records: dict[str, bytes], start: int) -> MemberHeader:
        """Return the member described by the header ``block`` and the preceding records."""
        raw_name, raw_size, _, kind, magic, raw_prefix = FIELDS.unpack_from(block)
        path = records.get("path")
        if not path:
            path = raw_name.partition(b"\0")[0]
            if magic == b"ustar\0" and raw_prefix[0]:
                path = b"%b/%b" % (raw_prefix.partition(b"\0")[0], path)
        if len(path) > self._most_of_name:
            what = f"{self._archive} has a member at byte {start} whose name has {len(path)} bytes"
            raise limit_error(self._limits, "name_bytes", f"{what} and begins with {text(path[:40])!r}")
        name = text(path)
        size = NUMBERS[raw_size]
        if given := records.get("size"):
            if not given.isdigit() or len(given) > 19:
                raise self._corrupt(
                    f"has a PAX header (member {name!r}, at byte {start}) whose size is {given!r}, which is not a "
                    f"number"
                )
            size = int(given)
        continued = kind == GNU_CONTINUED or "GNU.volume" in records
        if continued or kind == GNU_SPARSE or "GNU.sparse" in records:
            what = "began on another volume" if continued else "is a sparse file"
            raise UnsupportedMemberError(
                f"{self._archive} holds the member {name!r} (header at byte {start}), which {what} and cannot be read "
                f"from a shard. Write the archive again without it, or without tar's --sparse and --multi-volume"
            )
        self.is_link = kind in (HARD_LINK, SYMBOLIC_LINK)
        is_directory = kind == OLD_FILE and name.endswith("/")
        if kind in (FILE, OLD_FILE, CONTIGUOUS_FILE) and not is_directory:
            return MemberHeader(name, size, True, start)
        return MemberHeader(name, 0 if is_directory or kind in WITHOUT_DATA else size, False, start)

    def _check_end(self, block: bytes, position: int, *, inside: bool) -> None:
        """Raise an error unless an archive may end at ``position`` with ``block``, which is shorter than a header.

        An archive must not end ``inside`` the headers of a member.
        """
        if position == 0:
            what = "is empty" if not block else "is shorter than one tar header"
            kind = f" {describe_kind(block)}." if describe_kind(block) else ""
            raise TruncatedShardError(
                f"{self._archive} {what}: {len(block)} bytes.{kind} It is not a tar archive; write or fetch it again"
                f"{_advise_records(block)}"
            )
        if block or inside:
            raise self._truncated()
        if self._end_marker != "optional":
            raise TruncatedShardError(
                f"{self._archive} ends at byte {self._ahead.position} without the two blocks of zeros that end a tar "
                f"archive, so members may be missing. {INCOMPLETE}; or, if it was written without them, ",
                END_MARKER,
            )

    def _after_zeros(self, position: int) -> tuple[bytes, int]:
        """Skip zeros from the block at ``position``; return the next header, or ``b""`` at the end."""
        zeros_at = position
        while True:
            position += BLOCK
            block = self._ahead.take(BLOCK)
            is_too_long = position + len(block) - zeros_at - END_MARKER_BYTES > self._most_of_tail
            if block == ZERO_BLOCK:
                if is_too_long and not self._ignore_zeros:  # regardless of what follows
                    raise trailing_zeros_error(self._limits, self._archive, f"its end marker at byte {zeros_at}")
                self._extend_gap(position)
                continue
            if block.strip(b"\0"):
                if self._ignore_zeros and len(block) == BLOCK:
                    return block, position
                if self._end_marker == "final":
                    self._skip_rest()
                    return b"", position
                raise CorruptShardError(
                    f"{self._archive} has data at byte {position}, after the end marker at byte {zeros_at}. "
                    "If archives were concatenated, ",
                    IGNORE_ZEROS,
                    " to read them all. If the data belong to no archive, ",
                    FINAL,
                    " to ignore them, as tar does. Otherwise write or fetch it again",
                )
            if position == zeros_at + BLOCK and self._end_marker != "optional" and position != self._stop:
                raise TruncatedShardError(
                    f"{self._archive} ends inside its end marker: one block of zeros at byte {zeros_at}, not two. "
                    f"{INCOMPLETE}; or, if it was written that way, ",
                    END_MARKER,
                )
            if is_too_long:
                raise trailing_zeros_error(self._limits, self._archive, f"its end marker at byte {zeros_at}")
            return b"", position

    def _skip_rest(self) -> None:
        """Read a stream to its end, so that a command or a download ends without an error."""
        while self._ahead.take(REST_BYTES):
            self._extend_gap(self._ahead.offset)

    def _verify(self, block: bytes, raw_checksum: bytes, position: int) -> None:
        """Raise an error unless the checksum of the header ``block`` is right, by the standard or with signed bytes."""
        if adler32(block) & 0xFFFF == ADLERS[raw_checksum]:
            return
        stored = NUMBERS[raw_checksum]
        others = block[:148] + b" " * 8 + block[156:]
        # Some old programs summed signed bytes, which differs for non-ASCII names.
        if stored not in (sum(others), sum(SIGNED_BYTES.unpack(others))):
            if position == 0:
                kind = describe_kind(block) or "Inspect the file; error pages of web servers are a common cause"
                raise CorruptShardError(
                    f"{self._archive} is not a tar archive, plain or compressed with gzip, bzip2, xz or zstd: it "
                    f"begins with {block[:24]!r}. {kind}{_advise_records(block)}"
                )
            raise self._corrupt(
                f"has a damaged header at byte {position}: its checksum field is {raw_checksum!r}, and its bytes "
                f"sum to {sum(others):o} (octal)"
            )

    def _records(self, content: bytes, position: int) -> dict[str, bytes]:
        """Parse the records of a PAX header; keep those that affect how a member is read."""
        records: dict[str, bytes] = {}
        at = 0
        while at < len(content) and content[at]:
            digits = content[at : at + 10].partition(b" ")[0]
            end = at + int(digits) if digits.isdigit() else 0
            keyword, equals, value = content[at + len(digits) + 1 : end - 1].partition(b"=")
            if not equals or end > len(content) or content[end - 1 : end] != b"\n":
                raise self._corrupt(
                    f"has a damaged PAX header at byte {position}: {content[at : at + 40]!r} is not a record of "
                    f"the form 'length keyword=value'"
                )
            if keyword == b"path":
                records["path"] = value
            elif keyword == b"size":
                records["size"] = value
            elif keyword.startswith(b"GNU.sparse."):
                records["GNU.sparse"] = value
            elif keyword == b"GNU.volume.offset":
                records["GNU.volume"] = value
            at = end
        return records

    def _is_plain(self) -> bool:
        return not self._globals and self._most_of_name >= NAME_BYTES

    def _extend_gap(self, position: int) -> None:
        """Record that there is no file before an offset; raise an error if the gap is too large."""
        self._gap_to = position
        if position - self._gap_from > self._most_of_gap:
            found = f"{self._archive} has no file from byte {self._gap_from} to byte {position}"
            raise limit_error(self._limits, "gap_bytes", found)

    def _corrupt(self, found: str) -> CorruptShardError:
        return CorruptShardError(f"{self._archive} {found}. {DAMAGED}")

    def _truncated(self) -> TruncatedShardError:
        return TruncatedShardError(
            f"{self._archive} ends inside a header, at byte {self._ahead.position}. {INCOMPLETE}"
        )


def round_to_blocks(size: int) -> int:
    """Round a size up to a multiple of the block size."""
    return (size + BLOCK - 1) & -BLOCK


def text(raw: bytes) -> str:
    """Decode a name field; non-UTF-8 bytes become surrogate escapes, as in Python's file names."""
    try:
        return raw.partition(b"\0")[0].decode()
    except UnicodeDecodeError:
        return raw.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _advise_records(block: bytes) -> str:
    """Return the end of a message about a file that is no archive; "" if it cannot have records either."""
    if not block or describe_kind(block, may_be_text=True):
        return ""
    return "; JSON lines, msgpack and CBOR records are read with load_wds_records()"


def _number(raw: bytes) -> int:
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    digits = raw.partition(b"\0")[0].strip()
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else -1


def _adler(raw_checksum: bytes) -> int:
    stored = NUMBERS[raw_checksum]
    return -1 if stored < 0 else (1 + stored - 8 * ord(" ") + sum(raw_checksum)) % 65521


class _CachedFunction(dict[bytes, int]):
    """Caches the values of a function, because sizes and checksums repeat."""

    def __init__(self, function: Callable[[bytes], int]) -> None:
        self._function = function

    def __missing__(self, raw: bytes) -> int:
        if len(self) > 8192:
            self.clear()
        value = self[raw] = self._function(raw)
        return value


#: Maps a number field, in octal digits, or in base 256 for large numbers, to its number; -1 if it is invalid.
NUMBERS = _CachedFunction(_number)
#: Maps a checksum field to the low half of the Adler-32 that its header has if the checksum is right; -1 if it is
#: invalid. A tar checksum is the sum of the header's bytes, with blanks for the checksum itself. The low half of
#: Adler-32 is one plus the sum of all bytes, modulo 65521, and ten times as fast as `sum`. The two differ by the bytes
#: of the field itself.
ADLERS = _CachedFunction(_adler)
