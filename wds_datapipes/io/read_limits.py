"""Limits for reading shards: sizes of members, names and headers, zeros at the end, expansion."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from wds_datapipes.errors import ReadLimitError, TruncatedShardError

__all__ = ["DEFAULT_LIMITS", "EXPANSION_FROM_BYTES", "ReadLimits", "limit_error", "padded_too_far"]

#: From how many uncompressed bytes on an expansion counts.
EXPANSION_FROM_BYTES = 1 << 30
#: No limit, for comparisons. It is still more than memory holds.
NO_LIMIT = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits on what a shard may demand of its reader; more raises a `ReadLimitError` before it is read.

    The defaults refuse what only an attack or damage asks for. A service that reads the shards of others sets what its
    data need, such as ``ReadLimits(member_bytes=64 << 20, expansion=100)``. ``None`` is no limit.

    Args:
        member_bytes: the size of a member that is read, in bytes, and of what a compressed field (``json.gz``) expands
            to. By default 8 GiB, the most that the size field of a plain tar header holds; a member is read into memory
            as a whole, and then once more or twice while it is decoded. What ``select_files`` leaves out may be larger.
        name_bytes: the length of a member's name with its folders. By default 4096, the most that Linux allows for a
            path, so that no archive of files has more.
        headers: how many headers may come in a row for one member: its long name, its long link, its PAX records and
            those for all that follows. By default 256; programs write three at most.
        gap_bytes: how many bytes may lie between one file and the next without being any of the two: folders, links,
            devices, members of unknown kinds, and zeros after an end marker. By default 512 MiB, a million links.
            Without a limit, a server could keep a reader busy forever without a file.
        tail_bytes: how many zeros may follow the end of an archive: its end marker, or its compressed data. By default
            10,240, one record as most programs write them. More are the sign of a file whose space was reserved before
            its content came, and never did; they are a `TruncatedShardError`. ``tar -b N`` fills up to ``N * 512``.
        expansion: how many times as large as the compressed data the uncompressed may be, as soon as those are more
            than 1 GiB. By default 1000. Text has 3 to 30, label masks of images 100 to 500, and gzip ends at 1032,
            which nothing but zeros reaches; zstd, xz and bzip2 go to many thousands with those. Up to 1 GiB nothing is
            counted: some masks without any label may well reach that, and do no harm.

    Raises:
        ValueError: a limit makes no sense.

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
    gap_bytes: int | None = 512 << 20
    tail_bytes: int | None = 20 * 512
    expansion: float | None = 1000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name == "expansion":
                if not isinstance(value, int | float) or not value >= 1:
                    raise ValueError(f"expansion is a number from 1, or None, not {value!r}")
            elif not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} is a whole number from 0, or None, not {value!r}")

    def most(self, name: str) -> int:
        """Return a limit as a number for comparisons, also if there is none."""
        value: int | None = getattr(self, name)
        return NO_LIMIT if value is None else value

    def most_expanded(self, compressed: int) -> float:
        """Return the limit of decompressed bytes for ``count`` compressed ones, without ``member_bytes``."""
        if self.expansion is None:
            return NO_LIMIT
        return max(EXPANSION_FROM_BYTES, self.expansion * compressed)

    def most_of_field(self, compressed: int) -> float:
        """Return the most bytes that a compressed field may expand to."""
        return min(self.most("member_bytes"), self.most_expanded(compressed))

    def check_field(self, compressed: int, expanded: int, what: str, *, is_all: bool = True) -> None:
        """Raise if a compressed field expands to more than it may.

        Args:
            compressed: its size in bytes.
            expanded: how many bytes came of it, or would come.
            what: what it is called.
            is_all: whether there would not be more.
        """
        for name, most in (("member_bytes", self.most("member_bytes")), ("expansion", self.most_expanded(compressed))):
            if expanded > most:
                found = f"{compressed} bytes of {what} expand to {expanded} bytes{'' if is_all else ' or more'}"
                raise limit_error(self, name, found)


DEFAULT_LIMITS = ReadLimits()


def limit_error(limits: ReadLimits, name: str, found: str) -> ReadLimitError:
    """Return the error for a limit.

    Args:
        limits: what holds.
        name: which of them was exceeded.
        found: by what, and where.
    """
    return ReadLimitError(
        f"{found}, and the limit is {name}={getattr(limits, name)}. If this is as it should be, pass "
        f"limits=ReadLimits({name}=...) with more, or with None for no limit"
    )


def padded_too_far(limits: ReadLimits, archive: str, what: str) -> TruncatedShardError:
    """Return the error for zeros beyond ``tail_bytes``.

    Args:
        limits: what holds.
        archive: the shard, without secrets.
        what: what the zeros follow, and where.
    """
    return TruncatedShardError(
        f"{archive} has more than {limits.tail_bytes} bytes of zeros after {what}, so members may be missing. Its "
        f"space was reserved and its content did not arrive: write or fetch it again; or, if it was written so, as by "
        f"tar -b, pass limits=ReadLimits(tail_bytes=...) with more, or with None for no limit"
    )
