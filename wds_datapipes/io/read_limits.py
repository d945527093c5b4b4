"""Limits for reading shards: sizes of members, names and headers, zeros at the end, expansion, pixels."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import ReadLimitError, TruncatedShardError
from wds_datapipes.hints import LIMITS

#: The expansion limit applies only above this many uncompressed bytes.
EXPANSION_FROM_BYTES = 1 << 30
#: Stands for "no limit" in comparisons.
NO_LIMIT = sys.maxsize


@checks_calls
@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits on the resources that reading a shard may take; a shard beyond them raises `ReadLimitError`.

    The limits are checked before the bytes are read into memory. The defaults reject only malicious or damaged shards.
    A service that reads untrusted shards should set limits that fit its data, such as
    ``ReadLimits(member_bytes=64 << 20, expansion=100)``. ``None`` disables a limit.

    Args:
        member_bytes: the size of a member or a record, and of the decompressed content of a compressed field
            (``json.gz``), in bytes. By default 8 GiB, the largest size in a plain tar header. A member is read into
            memory as a whole and copied once or twice while it is decoded. Members that ``select_files`` excludes may
            be larger.
        name_bytes: the length of a member's name including its folders, in bytes. By default 4096, the longest path on
            Linux.
        headers: the number of consecutive headers for one member: long name, long link, PAX records and global PAX
            records. By default 256; common programs write at most three.
        header_bytes: the size of a long name or of the PAX records of a member, in bytes. By default 1 MiB; common ones
            take a few hundred bytes, extended attributes more.
        gap_bytes: the number of bytes between two files that are folders, links, devices, members of unknown types, or
            zeros after an end marker. By default 512 MiB, a million links. Without this limit, a server could keep a
            reader busy forever without sending a file.
        tail_bytes: the number of zero bytes after the end marker of an archive, or after its compressed data. By
            default 10,240, one tar record. More zeros raise `TruncatedShardError`, since they indicate a file whose
            space was allocated but whose content was never written. ``tar -b N`` pads to ``N * 512`` bytes.
        expansion: the ratio of decompressed to compressed size, checked above 1 GiB of decompressed data. By default
            1000. Text reaches 3 to 30, label masks of images 100 to 500, and zeros 1032 with gzip and many thousands
            with zstd, xz and bzip2.
        window_bytes: the memory that zstd and xz need for what was decompressed before, in bytes. By default 2 GiB, the
            largest window of zstd (``--ultra --long=31``); usual ones need 8 to 128 MiB.
        image_pixels: the number of pixels of an image. By default 178,956,970, as in Pillow: a blank page of 3 kB may
            decode to as many.

    Raises:
        ValueError: a limit is out of range.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("a.tar", [{"__key__": "a", "txt": "one"}, {"__key__": "b", "txt": "three"}])
        >>> members = ShardList(shard).load_wds_shards(limits=ReadLimits(member_bytes=4), on_error="skip")
        >>> [member.name for member in members]
        ['a.txt']
    """

    member_bytes: int | None = 8 << 30
    name_bytes: int | None = 4096
    headers: int | None = 256
    header_bytes: int | None = 1 << 20
    gap_bytes: int | None = 512 << 20
    tail_bytes: int | None = 20 * 512
    expansion: float | None = 1000.0
    window_bytes: int | None = 2 << 30
    image_pixels: int | None = 178_956_970

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "expansion":
                if not isinstance(value, int | float) or not value >= 1:
                    raise ValueError(f"expansion must be a number of at least 1, or None, not {value!r}")
            elif not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} must be a non-negative integer or None, not {value!r}")

    def most(self, name: str) -> int:
        """Return a limit as a number; `NO_LIMIT` if it is ``None``."""
        value: int | None = getattr(self, name)
        return NO_LIMIT if value is None else value

    def most_expanded(self, compressed: int) -> float:
        """Return how many bytes ``compressed`` bytes may expand to, by ``expansion`` alone."""
        if self.expansion is None:
            return NO_LIMIT
        return max(EXPANSION_FROM_BYTES, self.expansion * compressed)

    def most_of_field(self, compressed: int) -> float:
        """Return how many bytes a field of ``compressed`` bytes may expand to."""
        return min(self.most("member_bytes"), self.most_expanded(compressed))

    def check_field(self, compressed: int, expanded: int, what: str, *, is_all: bool = True) -> None:
        """Raise `ReadLimitError` if a compressed field expands to more bytes than it may.

        Args:
            compressed: the compressed size in bytes.
            expanded: the decompressed size in bytes.
            what: the field's name in the error.
            is_all: whether ``expanded`` is the whole size rather than a lower bound.
        """
        for name, most in (("member_bytes", self.most("member_bytes")), ("expansion", self.most_expanded(compressed))):
            if expanded > most:
                found = f"{compressed} bytes of {what} expand to {expanded} bytes{'' if is_all else ' or more'}"
                raise limit_error(self, name, found)


DEFAULT_LIMITS = ReadLimits()


def limit_error(limits: ReadLimits, name: str, found: str) -> ReadLimitError:
    """Return the error for an exceeded limit.

    Args:
        limits: the limits.
        name: the exceeded limit.
        found: the offending size and its location, the start of the message.
    """
    return ReadLimitError(
        f"{found}, and the limit is {name}={getattr(limits, name)}. If the shard is valid, ",
        LIMITS[name],
        " with more, or with None for no limit",
    )


def trailing_zeros_error(limits: ReadLimits, archive: str, what: str) -> TruncatedShardError:
    """Return the error for more zeros than ``tail_bytes``.

    Args:
        limits: the limits.
        archive: the shard's name, without credentials.
        what: what precedes the zeros.
    """
    return TruncatedShardError(
        f"{archive} has more than {limits.tail_bytes} bytes of zeros after {what}, so members may be missing. Its "
        f"space was probably allocated and its content never written: write or fetch it again. If the zeros are "
        "padding, as from tar -b, ",
        LIMITS["tail_bytes"],
        " with more, or with None for no limit",
    )
