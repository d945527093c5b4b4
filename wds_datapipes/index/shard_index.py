"""Shard index: the offsets of samples and fields, as columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from wds_datapipes.errors import CorruptSidecarError, UnsupportedSidecarError
from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot
from wds_datapipes.tar.headers import BLOCK

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["COLUMNS", "Columns", "IndexEntry", "IndexedSample", "ShardFacts", "ShardIndex", "rule_name"]


@dataclass(frozen=True)
class ShardFacts:
    """The facts that an index records about its shard; ``None`` if unknown.

    Attributes:
        bytes: the size of the file.
        sha256: its digest, in hexadecimal digits.
        mtime_ns: when a local file was last changed, in nanoseconds since 1970.
        etag: what a store calls this version of it.
        compression: ``"gzip"``, ``"bz2"``, ``"xz"`` or ``"zstd"``; ``None`` for a plain archive.
        key_rule: the rule that has split the names: ``"first_dot"``, ``"last_dot"`` or ``"module:function"``.
        lowercase: whether fields are called by their lower-case names.
        on_duplicate: which of two members counts that are the same field of one sample; ``"raise"`` is neither.
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
        """Make facts from JSON, and check them.

        Raises:
            ValueError: it makes no sense.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            raise ValueError(f"its facts on the shard are not {', '.join(sorted(names))}")
        for name, kinds in _KINDS.items():
            if type(found[name]) not in kinds:
                raise ValueError(f"its {name} is {found[name]!r}")
        if found["bytes"] is not None and found["bytes"] < 0:
            raise ValueError(f"its bytes is {found['bytes']}")
        return cls(**found)


_KINDS: dict[str, tuple[type, ...]] = {
    "bytes": (int, type(None)),
    "sha256": (str, type(None)),
    "mtime_ns": (int, type(None)),
    "etag": (str, type(None)),
    "compression": (str, type(None)),
    "key_rule": (str,),
    "lowercase": (bool,),
    "on_duplicate": (str,),
}


Columns: TypeAlias = Mapping[str, "npt.NDArray[Any]"]

#: Every column of an index and the type of its numbers, which are little-endian in a file and in memory.
COLUMNS = {
    "sample_offsets": "<i8",
    "sample_members": "<i8",
    "member_offsets": "<i8",
    "member_sizes": "<i8",
    "member_fields": "<u4",
    "key_ends": "<i8",
    "key_text": "|u1",
    "field_ends": "<i8",
    "field_text": "|u1",
}
#: The key rules that an index knows by name.
RULES: dict[str, KeyRule] = {"first_dot": first_dot, "last_dot": last_dot}


class IndexEntry(NamedTuple):
    """The position of a field's bytes.

    Attributes:
        field: its name, as in a sample.
        offset: of its first byte, in the uncompressed archive.
        size: in bytes.
    """

    field: str
    offset: int
    size: int


class IndexedSample(NamedTuple):
    """The position of a sample in its shard.

    Attributes:
        key: of the sample.
        offset: where its first header begins, in the uncompressed archive.
        end: where the next sample begins, or the archive's end marker.
        entries: its fields, in the order in which a sample has them.
    """

    key: str
    offset: int
    end: int
    entries: tuple[IndexEntry, ...]


class ShardIndex:
    """The offsets of the samples of a shard and their fields: built by `build_index`, or read by `read_index`.

    ``len(index)`` is the number of samples, ``index[n]`` tells where sample n is, and iterating tells it of all.

    Args:
        facts: what is known of the shard.
        columns: the arrays that the format describes. They are kept, not copied.
        where: what errors call the index.

    Attributes:
        facts: what is known of the shard, a `ShardFacts`.
        columns: the arrays, by name, for work on all samples at once.
        fields: the names of all fields of the shard, each once; ``member_fields`` counts in this list.

    Raises:
        CorruptSidecarError: the columns do not go together.

    Examples:
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

    def __init__(self, facts: ShardFacts, columns: Columns, *, where: str = "An index") -> None:
        self.facts = facts
        self.columns = dict(columns)
        try:
            _check(self.columns)
            raw_fields = _texts(self.columns["field_ends"], self.columns["field_text"])
        except ValueError as error:
            raise CorruptSidecarError(f"{where} is damaged: {error}. Delete it, and build it again") from error
        #: The fields as the members' names have them, with their capitals.
        self.raw_fields = raw_fields
        self.fields = [field.lower() for field in raw_fields] if facts.lowercase else raw_fields
        self._where = where
        self._found: dict[str, int] | None = None

    def __len__(self) -> int:
        """How many samples the shard has."""
        return len(self.columns["sample_offsets"]) - 1

    def __getitem__(self, number: int) -> IndexedSample:
        """The position of a sample in its shard."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"{self._where} has {count} samples, and none of number {number}")
        return self._sample(number % count)

    def __iter__(self) -> Iterator[IndexedSample]:
        """Where each sample is, in the order of the shard."""
        return map(self._sample, range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Whether two indexes have the same content."""
        if not isinstance(other, ShardIndex):
            return NotImplemented
        return self.facts == other.facts and self.places_equal(other)

    __hash__ = None  # type: ignore[assignment]  # it is compared by its arrays

    def __repr__(self) -> str:
        return f"<ShardIndex of {len(self)} samples, {self.members} members, {self.facts.bytes} bytes>"

    def __reduce__(self) -> tuple[Callable[..., ShardIndex], tuple[ShardFacts, dict[str, npt.NDArray[Any]], str]]:
        return _rebuilt, (self.facts, {name: np.array(column) for name, column in self.columns.items()}, self._where)

    @property
    def members(self) -> int:
        """The number of members of all samples."""
        return len(self.columns["member_offsets"])

    @property
    def keys(self) -> list[str]:
        """The keys of all samples, in the order of the shard."""
        return _texts(self.columns["key_ends"], self.columns["key_text"])

    @property
    def end(self) -> int:
        """The offset of the archive's end marker, in uncompressed bytes."""
        return int(self.columns["sample_offsets"][-1])

    @property
    def key_rule(self) -> KeyRule | None:
        """The key rule, if it is one of this package."""
        return RULES.get(self.facts.key_rule)

    def find(self, key: str) -> int:
        """Return the number of the first sample with a key.

        Raises:
            KeyError: there is none.
        """
        if self._found is None:
            keys = self.keys
            self._found = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        if key not in self._found:
            raise KeyError(f"{self._where} has no sample {key!r}")
        return self._found[key]

    def names(self, number: int) -> list[str] | None:
        """Return the names that the members of a sample have in the archive, if the key rule tells them."""
        if self.key_rule is None:
            return None
        first, last = self.columns["sample_members"][number : number + 2]
        key = self._key(number)
        return [f"{key}.{self.raw_fields[field]}" for field in self.columns["member_fields"][first:last]]

    def places_equal(self, other: ShardIndex) -> bool:
        """Whether two indexes have the same samples in the same places, whatever else they know."""
        return self.fields == other.fields and all(
            np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS
        )

    def check_random_access(self) -> None:
        """Raise unless a sample can be read without all that is before it.

        Raises:
            UnsupportedSidecarError: the shard is compressed.
        """
        if self.facts.compression is not None:
            raise UnsupportedSidecarError(
                f"{self._where} is of a shard that is compressed with {self.facts.compression}, so its samples can "
                f"only be read from the first to the last. Unpack the shard to read them in any order"
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
    """What an index calls a key rule: those of this package by their names, and others by their places."""
    for name, known in RULES.items():
        if rule is known:
            return name
    return f"{getattr(rule, '__module__', '?')}:{getattr(rule, '__qualname__', type(rule).__qualname__)}"


def _rebuilt(facts: ShardFacts, columns: Columns, where: str) -> ShardIndex:
    return ShardIndex(facts, columns, where=where)


def _text(raw: npt.NDArray[np.uint8]) -> str:
    return raw.tobytes().decode("utf-8", "surrogateescape")


def _texts(ends: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8]) -> list[str]:
    text = raw.tobytes()
    return [text[begin:end].decode("utf-8", "surrogateescape") for begin, end in pairwise([0, *ends.tolist()])]


def _check(columns: dict[str, npt.NDArray[Any]]) -> None:
    """Raise ValueError unless all numbers of the columns go together: none may lead outside of its sample."""
    if columns.keys() != COLUMNS.keys():
        raise ValueError(f"it has the columns {sorted(columns)}, not {sorted(COLUMNS)}")
    for name, kind in COLUMNS.items():
        if columns[name].dtype != np.dtype(kind) or columns[name].ndim != 1:
            raise ValueError(f"its column {name} is {columns[name].dtype} with {columns[name].ndim} dimensions")
    samples, counts = columns["sample_offsets"], columns["sample_members"]
    offsets, sizes, numbers = columns["member_offsets"], columns["member_sizes"], columns["member_fields"]
    _all(len(samples) >= 1 and len(counts) == len(samples) == len(columns["key_ends"]) + 1, "its columns of samples")
    _all(len(offsets) == len(sizes) == len(numbers), "its columns of members")
    _all(samples[0] >= 0 and np.all(samples[1:] > samples[:-1]), "the offsets of its samples")
    _all(counts[0] == 0 and counts[-1] == len(offsets) and np.all(counts[1:] > counts[:-1]), "its counts of members")
    _all(not len(numbers) or numbers.max() < len(columns["field_ends"]), "its fields")
    begins, ends = np.repeat(samples[:-1], np.diff(counts)), np.repeat(samples[1:], np.diff(counts))
    _all(np.all((offsets % BLOCK == 0) & (offsets - BLOCK >= begins) & (offsets <= ends)), "the offsets of its members")
    _all(np.all((sizes >= 0) & (sizes <= ends - offsets)), "the sizes of its members")
    for name in ("key", "field"):
        texts, raw = columns[f"{name}_ends"], columns[f"{name}_text"]
        whole = int(texts[-1]) if len(texts) else 0
        _all(whole == len(raw) and (not len(texts) or texts[0] >= 0), f"its {name}s")
        _all(np.all(texts[1:] >= texts[:-1]), f"its {name}s")


def _all(holds: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} do not go together")
