"""The items that flow through a pipeline: shards, members and samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias

__all__ = ["Member", "MemberTuple", "Opener", "PlacedField", "PlacedSample", "Sample", "Shard", "ShardInfo"]

Sample = dict[str, Any]
"""One training sample: ``__key__``, ``__url__`` and its fields, such as ``{"__key__": "000", "jpg": b"..."}``."""


@dataclass(slots=True, unsafe_hash=True)
class Shard:
    """A shard that is being read; all of its members refer to it.

    A stage downstream learns from it that a shard ended well, so that the sample being gathered is whole, or that it
    broke off, so that the sample may lack a field. A shard is equal to another one of the same URL.
    """

    #: Its path or URL, as it was given.
    url: str
    #: The path of the file, or ``None`` if the shard is not a local file.
    local_path: str | None = field(default=None, compare=False)
    #: Its number among the shards that were opened, from 0; -1 if it is not known, as for a copy.
    number: int = field(default=-1, compare=False)
    #: Where reading ends, in bytes, if that is before the end of the shard; otherwise -1.
    end: int = field(default=-1, compare=False)
    #: ``None`` while it is read, ``True`` once it was read to its end without an error, and ``False`` if it broke off.
    is_complete: bool | None = field(default=None, compare=False)
    #: Whether this is a copy, as from another process, which does not learn how reading ends. A copy counts as
    #: complete, since samples would be dropped otherwise.
    is_copy: bool = field(default=False, compare=False)

    def __reduce__(self) -> tuple[type[Shard], tuple[str, str | None, int, int, bool, bool]]:
        return Shard, (self.url, self.local_path, -1, -1, True, True)


class Member(NamedTuple):
    """One file of a shard."""

    #: The shard that it comes from; or the URL of one, in a member that a user has made.
    shard: Shard | str
    #: Its whole name in the archive, such as ``"train/000123.jpg"``.
    name: str
    #: Its content.
    data: bytes
    #: Where its first header begins in the (uncompressed) archive, in bytes.
    offset: int

    @property
    def url(self) -> str:
        """The path or URL of the shard, as it was given."""
        return self.shard if isinstance(self.shard, str) else self.shard.url


MemberTuple: TypeAlias = tuple[Shard | str, str, bytes, int]
"""The fields of a `Member` as a plain tuple, which is made and taken apart in a third of the time."""


class ShardInfo(NamedTuple):
    """A shard that was written completely."""

    #: Its path or URL, or nothing if it was written to a stream.
    url: str
    #: How many samples it has.
    samples: int
    #: Its size, compressed if it is.
    bytes: int
    #: The digest of these bytes, in hexadecimal digits; nothing if none was asked for.
    sha256: str


class PlacedField(NamedTuple):
    """The position of a field's data in the uncompressed archive."""

    field: str
    offset: int
    size: int


class PlacedSample(NamedTuple):
    """The position of a sample in the uncompressed archive."""

    key: str
    #: Where its first header begins.
    offset: int
    #: In their order in the archive.
    fields: tuple[PlacedField, ...]


class Opener(Protocol):
    """Opens the shards of one URL scheme for reading."""

    def __call__(self, url: str, /, **options: Any) -> BinaryIO:
        """Return a binary stream that reads forward, and that its user closes."""
