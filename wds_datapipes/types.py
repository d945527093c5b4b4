"""Types that all packages share: the items of a pipeline, the instance it runs for, facts about shards, and openers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias

from wds_datapipes.redaction import hides_credentials

Sample = dict[str, Any]
"""One training sample: ``__key__``, ``__url__`` and its fields, such as ``{"__key__": "000", "jpg": b"..."}``."""


@dataclass(slots=True, unsafe_hash=True)
class Shard:
    """A shard that is being read, referenced by all of its members.

    It records whether the shard was read to its end, which completes the current sample, or failed, in which case that
    sample may lack fields. Shards with the same URL are equal.
    """

    #: Its path or URL, as given.
    url: str
    #: The path of the file, or ``None`` if the shard is not a local file.
    local_path: str | None = field(default=None, compare=False)
    #: Its number among the opened shards, from 0; -1 if unknown, as in a copy.
    number: int = field(default=-1, compare=False)
    #: The offset at which reading ends, in bytes, if that is before the end of the shard; otherwise -1.
    end: int = field(default=-1, compare=False)
    #: ``None`` while it is being read, ``True`` after it was read to its end, and ``False`` after an error.
    is_complete: bool | None = field(default=None, compare=False)
    #: Whether this is a copy, as received from another process. Copies are not updated, so they count as complete;
    #: otherwise, their samples would be dropped.
    is_copy: bool = field(default=False, compare=False)
    #: Whether the beginning of the shard was valid, so that any error concerns the rest.
    has_begun: bool = field(default=False, compare=False)
    #: The name of the last file whose header was read before its data, and the offset of its first header. If the shard
    #: breaks off in this data, files before it are complete.
    reached: tuple[str, int] | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[type[Shard], tuple[str, str | None, int, int, bool, bool]]:
        return Shard, (self.url, self.local_path, -1, -1, True, True)


class Member(NamedTuple):
    """One file of a shard.

    Attributes:
        shard: its shard, or the URL of a shard for a member created by a user.
        name: its full name in the archive, such as ``"train/000123.jpg"``.
        data: its content.
        offset: the offset of its first header in the uncompressed archive, in bytes.
    """

    shard: Shard | str
    name: str
    data: bytes
    offset: int

    @property
    def url(self) -> str:
        """The path or URL of the shard, as given."""
        return self.shard if isinstance(self.shard, str) else self.shard.url


MemberTuple: TypeAlias = tuple[Shard | str, str, bytes, int]
"""The fields of a `Member` as a plain tuple, which is three times as fast to create and unpack."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One of the processes that share the data: a worker of a rank.

    Attributes:
        rank: the number of the rank.
        ranks: the number of all ranks.
        worker: the number of the worker in its rank.
        workers: the number of workers of each rank; 0 if its main process reads the data.

    Examples:
        >>> Instance(rank=1, ranks=2).on_worker(2, workers=3).number
        5
    """

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def on_worker(self, worker: int, workers: int) -> Instance:
        """Return the instance of a worker of this rank."""
        return Instance(self.rank, self.ranks, worker, workers)

    @property
    def count(self) -> int:
        """The number of all instances."""
        return self.ranks * max(self.workers, 1)

    @property
    def number(self) -> int:
        """The number of this instance among all of them, as in torch's ``DataLoader``.

        The first worker of every rank comes first, then the second of every rank, and so on. The remainder of a split
        then goes to different ranks.
        """
        return self.worker * self.ranks + self.rank

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker of the first rank."""
        return self.rank == self.worker == 0

    def share_of(self, count: int) -> int:
        """Return the number of this rank's ``count`` items that belong to this worker.

        >>> [Instance(worker=worker, workers=3).share_of(8) for worker in range(3)]
        [3, 3, 2]
        """
        return count // self.workers + (self.worker < count % self.workers)


#: The only process that reads the data.
ALONE = Instance()


@hides_credentials
class ShardInfo(NamedTuple):
    """A shard: one that was written completely, or an entry of a manifest.

    Attributes:
        url: its path or URL, or "" if it was written to a stream.
        samples: the number of samples.
        bytes: its size in bytes, after compression; 0 if unknown.
        sha256: its SHA-256, in hexadecimal digits; "" if unknown.
    """

    url: str
    samples: int
    bytes: int
    sha256: str = ""


class Opener(Protocol):
    """A callable that opens the shards of one URL scheme for reading."""

    def __call__(self, url: str, /, **options: Any) -> BinaryIO:
        """Return a binary stream for sequential reading, which the caller closes."""
