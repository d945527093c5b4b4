"""The things that flow through a pipeline, from an address to a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Member", "MemberTuple", "Opener", "PlacedField", "PlacedSample", "Sample", "ShardInfo", "ShardURL"]

Sample = dict[str, Any]
"""One training sample: ``__key__``, ``__url__`` and its fields, such as ``{"__key__": "000", "jpg": b"..."}``."""


class ShardURL(str):
    """The URL of a shard that is being read: a plain string that also knows how the reading went.

    All members of one reading of a shard carry the same object, so a stage downstream can tell that a shard ended well
    (and the sample that it is gathering is whole) from one that broke off (and the sample may lack a field).
    """

    #: The path of the file that was read, or ``None`` if the shard is not a local file.
    local_path: str | None
    #: ``True`` once the shard was read to its end marker and its source ended without an error; ``False`` once the
    #: reading broke off; ``None`` while it goes on.
    complete: bool | None
    #: Whether it is a copy, as from another process, which is not told how the reading ends. It counts as complete,
    #: since the other way would drop samples.
    copied: bool
    #: Its number among the shards that were opened, from 0; -1 if it is a copy.
    number: int = -1
    #: Where the reading ends before the end of the shard, in bytes; -1 if it goes on to that.
    end: int = -1

    def __new__(
        cls, url: str, local_path: str | None = None, complete: bool | None = None, copied: bool = False
    ) -> Self:
        """Make a URL whose shard has not been read yet."""
        self = super().__new__(cls, url)
        self.local_path = local_path
        self.complete = complete
        self.copied = copied
        return self

    def __reduce__(self) -> tuple[type[ShardURL], tuple[str, str | None, bool, bool]]:
        return ShardURL, (str(self), self.local_path, True, True)


class Member(NamedTuple):
    """One file of a shard."""

    #: The shard it came from, as it was asked for.
    url: str
    #: Its whole name in the archive, such as ``"train/000123.jpg"``.
    name: str
    #: Its content.
    data: bytes
    #: Where its first header begins in the (uncompressed) archive, in bytes.
    offset: int


MemberTuple: TypeAlias = tuple[str, str, bytes, int]
"""The fields of a `Member` as a plain tuple, which is made and taken apart in a third of the time."""


class ShardInfo(NamedTuple):
    """A shard that was written, and stands whole under its name."""

    #: Its path or URL, or nothing if it was written to a stream.
    url: str
    #: How many samples it has.
    samples: int
    #: Its size, compressed if it is.
    bytes: int
    #: The digest of these bytes, in hexadecimal digits; nothing if none was asked for.
    sha256: str


class PlacedField(NamedTuple):
    """Where the data of a field are in an archive, before it was compressed."""

    field: str
    offset: int
    size: int


class PlacedSample(NamedTuple):
    """Where a sample is in an archive, before it was compressed."""

    key: str
    #: Where its first header begins.
    offset: int
    #: In their order in the archive.
    fields: tuple[PlacedField, ...]


class Opener(Protocol):
    """Opens the shards of one URL scheme for reading."""

    def __call__(self, url: str, /, **options: Any) -> BinaryIO:
        """Return a binary stream that reads forward, and that its user closes."""
