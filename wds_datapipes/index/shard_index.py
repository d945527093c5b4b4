"""Shard index: the offsets of samples and fields in a shard, as columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import CorruptSidecarError, UnsupportedSidecarError
from wds_datapipes.index.shard_columns import COLUMNS, Columns, NamedColumns, check_columns
from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot
from wds_datapipes.tar.headers import NAME_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ShardFacts:
    """Facts that an index records about its shard; ``None`` if unknown.

    Attributes:
        bytes: the size of the file.
        sha256: its digest, in hexadecimal digits.
        mtime_ns: the modification time of a local file, or of one without an ETag, in nanoseconds since 1970.
        etag: the identifier of this version in a store.
        compression: ``"gzip"``, ``"bz2"``, ``"xz"`` or ``"zstd"``; ``None`` for a plain archive.
        key_rule: the rule that splits member names: ``"first_dot"``, ``"last_dot"`` or ``"module:function"``.
        lowercase: whether field names are lowercased.
        on_duplicate: which of several members with the same field of a sample is used; ``"raise"`` for none.
    """

    bytes: int | None = None
    sha256: str | None = None
    mtime_ns: int | None = None
    etag: str | None = None
    compression: str | None = None
    key_rule: str = "first_dot"
    lowercase: bool = True
    on_duplicate: str = "raise"

    @classmethod
    def from_json(cls, found: object) -> Self:
        """Create facts from JSON, and check them.

        Raises:
            ValueError: the JSON is invalid.
        """
        kinds = get_type_hints(cls)
        if not isinstance(found, dict) or found.keys() != kinds.keys():
            raise ValueError(f"its facts about the shard are not {', '.join(sorted(kinds))}")
        for name, kind in kinds.items():
            if not isinstance(found[name], kind) or (kind is not bool and isinstance(found[name], bool)):
                raise ValueError(f"its {name} is {found[name]!r}")
        if found["bytes"] is not None and found["bytes"] < 0:
            raise ValueError(f"its bytes is {found['bytes']}")
        return cls(**found)


#: The key rules that an index refers to by name.
RULES: dict[str, KeyRule] = {"first_dot": first_dot, "last_dot": last_dot}


class IndexEntry(NamedTuple):
    """The position of a field's data.

    Attributes:
        field: the name of the field, as in a sample.
        offset: the offset of its first byte in the uncompressed archive.
        size: its size in bytes.
    """

    field: str
    offset: int
    size: int


class IndexedSample(NamedTuple):
    """The position of a sample in its shard.

    Attributes:
        key: the key of the sample.
        offset: the offset of its first header in the uncompressed archive.
        end: the offset of the next sample, or of the archive's end marker.
        entries: the fields, in the order of the sample.
    """

    key: str
    offset: int
    end: int
    entries: tuple[IndexEntry, ...]

    @property
    def fields(self) -> dict[str, int]:
        """The size of each field, in bytes."""
        return {entry.field: entry.size for entry in self.entries}

    @property
    def bytes(self) -> int:
        """The total size of the fields, in bytes."""
        return sum(entry.size for entry in self.entries)


class ShardIndex:
    """The offsets of the samples of a shard and their fields, built by `build_index` or read by `read_index`.

    ``len(index)`` is the number of samples, ``index[n]`` the position of sample n, and iterating yields all positions.

    Args:
        facts: facts about the shard.
        columns: the arrays of an index, and those of the user, with one value per sample; they are not
            copied.
        columns_by: the fingerprint of the function that computed the columns of the user; ``None`` if there are none.
        name: the name of the index in error messages.

    Attributes:
        facts: facts about the shard, a `ShardFacts`.
        columns: the arrays, by name, for vectorized work on all samples; those of `build_indexes`'s ``columns`` too.
        columns_by: the fingerprint of the function that computed these.
        fields: the distinct names of all fields in the shard; ``member_fields`` refers to positions in this list.

    Raises:
        CorruptSidecarError: the columns are inconsistent.

    Examples:
        >>> from wds_datapipes.index import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one", "cls": "1"}, {"__key__": "y", "txt": "two"}])
        >>> index = build_index(url)
        >>> len(index), index.keys, index.fields
        (2, ['x', 'y'], ['txt', 'cls'])
        >>> index[1]
        IndexedSample(key='y', offset=2048, end=3072, entries=(IndexEntry(field='txt', offset=2560, size=3),))
        >>> index.find("y")
        1
    """

    def __init__(
        self, facts: ShardFacts, columns: Columns, *, columns_by: str | None = None, name: str = "An index"
    ) -> None:
        self.facts = facts
        self.columns = NamedColumns(columns)
        self.columns.index_name = name
        self.columns_by = columns_by
        try:
            check_columns(self.columns)
            raw_fields = _texts(self.columns["field_ends"], self.columns["field_text"])
        except ValueError as error:
            raise CorruptSidecarError(f"{name} is damaged: {error}. Delete it and build it again") from error
        #: The fields as written in member names, before lowercasing.
        self.raw_fields = raw_fields
        self.fields = [field.lower() for field in raw_fields] if facts.lowercase else raw_fields
        self._name = name
        self._number_of: dict[str, int] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.columns["sample_offsets"]) - 1

    def __getitem__(self, number: int) -> IndexedSample:
        """Return the position of a sample in its shard."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"{self._name} has {count} samples, so there is no sample {number}")
        return self._sample(number % count)

    def __iter__(self) -> Iterator[IndexedSample]:
        """Yield the position of each sample, in the order of the shard."""
        return map(self._sample, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Whether two indexes have the same content."""
        if not isinstance(other, ShardIndex):
            return NotImplemented
        return (
            (self.facts, self.columns_by) == (other.facts, other.columns_by)
            and self.has_same_layout(other)
            and self.user_columns == other.user_columns
            and all(np.array_equal(self.columns[name], other.columns[name]) for name in self.user_columns)
        )

    __hash__ = None  # type: ignore[assignment]  # it compares arrays

    def __repr__(self) -> str:
        return f"<ShardIndex of {len(self)} samples, {self.members} members, {self.facts.bytes} bytes>"

    def __reduce__(self) -> tuple[Callable[..., ShardIndex], tuple[Any, ...]]:
        columns = {name: np.array(column) for name, column in self.columns.items()}
        return _rebuild, (self.facts, columns, self.columns_by, self._name)

    @property
    def members(self) -> int:
        """The number of members of all samples."""
        return len(self.columns["member_offsets"])

    @property
    def user_columns(self) -> list[str]:
        """The names of the columns of the user."""
        return [name for name in self.columns if name not in COLUMNS]

    @property
    def sample_sizes(self) -> npt.NDArray[np.int64]:
        """The size of all fields of each sample, in bytes."""
        begins = self.columns["sample_members"][:-1]
        return np.add.reduceat(self.columns["member_sizes"], begins) if len(begins) else np.empty(0, np.int64)

    @property
    def keys(self) -> list[str]:
        """The keys of all samples, in the order of the shard."""
        return _texts(self.columns["key_ends"], self.columns["key_text"])

    def keys_of(self, numbers: npt.NDArray[np.int64]) -> list[str]:
        """Return the keys of samples."""
        ends, text = self.columns["key_ends"], self.columns["key_text"].data
        begins = np.where(numbers > 0, ends[numbers - 1], 0).tolist()
        return [
            str(text[begin:end], "utf-8", "surrogateescape")
            for begin, end in zip(begins, ends[numbers].tolist(), strict=True)
        ]

    @property
    def end(self) -> int:
        """The offset of the archive's end marker, in uncompressed bytes."""
        return int(self.columns["sample_offsets"][-1])

    @property
    def key_rule(self) -> KeyRule | None:
        """The key rule, if it is one of this package, otherwise None."""
        return RULES.get(self.facts.key_rule)

    @cached_property
    def suffixes(self) -> list[bytes]:
        """What follows the key in the header of each field; b"" if the key rule is not one of this package."""
        if self.key_rule is None:
            return [b""] * len(self.raw_fields)
        return [b".%b\0" % field.encode("utf-8", "surrogateescape") for field in self.raw_fields]

    @cached_property
    def has_plain_names(self) -> bool:
        """Whether each name fits into a single header: it is ASCII text of less than 100 bytes."""
        text, longest = self.columns["key_text"], max(map(len, self.suffixes), default=0)
        lengths = np.diff(self.columns["key_ends"], prepend=0)
        return bool(lengths.max(initial=0) + longest <= NAME_BYTES and text.max(initial=0) < 128)

    def span_of(self, number: int) -> int:
        """Return the bytes of a sample in the archive, with its headers."""
        offset, end = self.columns["sample_offsets"][number : number + 2].tolist()
        span: int = end - offset
        return span

    def find(self, key: str) -> int:
        """Return the number of the first sample with a key.

        Raises:
            KeyError: there is no such sample.
        """
        if self._number_of is None:
            keys = self.keys
            self._number_of = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        if key not in self._number_of:
            raise KeyError(f"{self._name} has no sample {key!r}")
        return self._number_of[key]

    def names(self, number: int) -> list[str] | None:
        """Return the member names of a sample in the archive; None if the key rule is not one of this package."""
        if self.key_rule is None:
            return None
        first, last = self.columns["sample_members"][number : number + 2]
        key = self._key(number)
        return [f"{key}.{self.raw_fields[field]}" for field in self.columns["member_fields"][first:last]]

    def has_same_layout(self, other: ShardIndex) -> bool:
        """Whether two indexes have the same samples at the same offsets, regardless of other facts."""
        return self.fields == other.fields and all(
            np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS
        )

    def check_random_access(self) -> None:
        """Raise unless samples can be read in any order.

        Raises:
            UnsupportedSidecarError: the shard is compressed.
        """
        if self.facts.compression is not None:
            raise UnsupportedSidecarError(
                f"{self._name} belongs to a shard compressed with {self.facts.compression}, so its samples can only be "
                f"read in order. Decompress the shard to read them in any order"
            )

    def _key(self, number: int) -> str:
        ends = self.columns["key_ends"]
        begin = int(ends[number - 1]) if number else 0
        return _text(self.columns["key_text"][begin : int(ends[number])])

    def _sample(self, number: int) -> IndexedSample:
        columns = self.columns
        offset, end = columns["sample_offsets"][number : number + 2].tolist()
        first, last = columns["sample_members"][number : number + 2].tolist()
        entries = map(
            IndexEntry,
            [self.fields[field] for field in columns["member_fields"][first:last].tolist()],
            columns["member_offsets"][first:last].tolist(),
            columns["member_sizes"][first:last].tolist(),
        )
        return IndexedSample(self._key(number), offset, end, tuple(entries))


def rule_name(rule: KeyRule) -> str:
    """Return the name of a key rule in an index: plain for those of this package, otherwise with the module."""
    for name, known in RULES.items():
        if rule is known:
            return name
    return f"{getattr(rule, '__module__', '?')}:{getattr(rule, '__qualname__', type(rule).__qualname__)}"


def _rebuild(facts: ShardFacts, columns: Columns, columns_by: str | None, name: str) -> ShardIndex:
    return ShardIndex(facts, columns, columns_by=columns_by, name=name)


def _text(raw: npt.NDArray[np.uint8]) -> str:
    return raw.tobytes().decode("utf-8", "surrogateescape")


def _texts(ends: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8]) -> list[str]:
    text = raw.tobytes()
    return [text[begin:end].decode("utf-8", "surrogateescape") for begin, end in pairwise([0, *ends.tolist()])]
