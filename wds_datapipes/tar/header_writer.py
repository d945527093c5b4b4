"""Tar header writer: ustar headers, with PAX records for members that ustar cannot describe.

A ustar header (IEEE Std 1003.1) holds names of up to 100 characters, or 155 more before a slash, and sizes below 8 GiB.
It defines no encoding for names, so non-ASCII names get a PAX record, which is UTF-8.
"""

from __future__ import annotations

from zlib import adler32

from wds_datapipes.tar.headers import BLOCK

#: The end marker of an archive.
END = bytes(2 * BLOCK)
#: The padding of data, by its size modulo a block.
PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]
#: The smallest size that does not fit into the octal digits of a header.
TOO_LARGE = 8**11
NAME_BYTES, PREFIX_BYTES = 100, 155


class _Checksums(dict[int, bytes]):
    """Caches the text of checksums; only a few thousand different ones occur."""

    def __missing__(self, total: int) -> bytes:
        field = self[total] = b"%06o\0 " % total
        return field


CHECKSUMS = _Checksums()


class HeaderWriter:
    """Creates headers for plain files that differ only in name and size.

    Args:
        user: the name of the owner, whose ID is 0.
        group: the name of the group, whose ID is 0.
        mode: the permissions.
        mtime: the modification time, in seconds since 1970; a fraction would need a PAX header for each member.

    Raises:
        ValueError: an argument does not fit into a header.
    """

    def __init__(self, *, user: str, group: str, mode: int, mtime: float) -> None:
        seconds = int(mtime)
        if not 0 <= mode <= 0o7777:
            raise ValueError(f"mode must be permission bits such as 0o644, not {mode!r}")
        if not 0 <= seconds < TOO_LARGE:
            raise ValueError(f"mtime must be a number of seconds since 1970, not {mtime!r}")
        names = []
        for what, name in (("user", user), ("group", group)):
            raw = name.encode("utf-8", "surrogateescape")
            if len(raw) >= 32 or b"\0" in raw:
                raise ValueError(f"{what} must have at most 31 bytes, without null bytes, not {name!r}")
            names.append(raw.ljust(32, b"\0"))
        owner = b"%07o\0" % 0
        self._before_size = b"%07o\0" % mode + owner + owner
        self._time = b"%011o\0" % seconds
        #: The bytes after the type flag, up to the prefix.
        self._before_prefix = bytes(100) + b"ustar\x0000" + names[0] + names[1] + owner + owner
        self._tail = b"0" + self._before_prefix + bytes(PREFIX_BYTES + 12)
        self._tail_sum = sum(self._tail) + 8 * ord(" ")
        #: Size -> the bytes between the name and the checksum, and the sum of a header without a name.
        self._middles: dict[int, tuple[bytes, int]] = {}

    def header(self, name: str, size: int) -> bytes:
        """Return all header blocks of a file.

        Raises:
            UnicodeEncodeError: the name contains half of a surrogate pair.
        """
        if len(name) <= NAME_BYTES and size < TOO_LARGE and name.isascii():
            return b"".join(self.plain(name.encode("ascii"), size))
        try:
            raw, binary = name.encode("utf-8"), False
        except UnicodeEncodeError:
            raw, binary = name.encode("utf-8", "surrogateescape"), True  # a non-UTF-8 file name
        records = b""
        prefix, short = (b"", raw) if name.isascii() else (b"", b"")
        if len(short) > NAME_BYTES:
            prefix, short = _split(raw)
        if not short:
            if binary:
                records += _record(b"hdrcharset", b"BINARY")
            records += _record(b"path", raw)
            short = name.encode("ascii", "replace")[:NAME_BYTES]
        if size >= TOO_LARGE:
            records += _record(b"size", b"%d" % size)
            size = 0
        if not records:
            return self._block(short, size, b"0", prefix)
        extended = self._block(b"././@PaxHeader", len(records), b"x")
        return extended + records + PADDING[len(records) % BLOCK] + self._block(short, size, b"0", prefix)

    def plain(self, raw: bytes, size: int) -> tuple[bytes, ...]:
        """Return the parts of the header of a file, whose name has at most 100 ASCII characters and whose size fits."""
        # For few bytes, the low half of Adler-32 is one plus their sum.
        try:
            middle, total = self._middles[size]
        except KeyError:
            if len(self._middles) > 8192:
                self._middles.clear()
            middle = self._before_size + b"%011o\0" % size + self._time
            total = (adler32(middle) & 0xFFFF) - 1 + self._tail_sum
            self._middles[size] = middle, total
        checksum = CHECKSUMS[total + (adler32(raw) & 0xFFFF) - 1]
        return raw.ljust(NAME_BYTES, b"\0"), middle, checksum, self._tail

    def _block(self, name: bytes, size: int, kind: bytes, prefix: bytes = b"") -> bytes:
        before = name.ljust(NAME_BYTES, b"\0") + self._before_size + b"%011o\0" % size + self._time
        after = kind + self._before_prefix + prefix.ljust(PREFIX_BYTES + 12, b"\0")
        return before + b"%06o\0 " % (sum(before) + 8 * ord(" ") + sum(after)) + after


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """Split a long name at a slash into a prefix and the rest; both are empty if no slash fits."""
    at = raw.rfind(b"/", 0, PREFIX_BYTES + 1)
    short = raw[at + 1 :]
    return (raw[:at], short) if at > 0 and 0 < len(short) <= NAME_BYTES else (b"", b"")


def _record(keyword: bytes, value: bytes) -> bytes:
    """Return a PAX record; its length includes its own digits."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest
