"""Shard index: the offsets of samples and fields in a shard, as columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import CorruptSidecarError, UnsupportedSidecarError, plural
from wds_datapipes.index.format.index_columns import COLUMNS, Columns, NamedColumns, check_columns
from wds_datapipes.index.format.shard_facts import RULES, ShardFacts
from wds_datapipes.io.remote.remote_file import FileFacts
from wds_datapipes.samples.keys import KeyRule
from wds_datapipes.tar.headers import NAME_BYTES

#: Keys are decoded together unless the surrounding text is more than this many times as long.
SPARSE_KEYS = 16


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


@checks_calls
class ShardIndex:
    """The offsets of the samples of a shard and their fields, built by `build_index` or read by `read_index`.

    ``len(index)`` is the number of samples, ``index[n]`` the position of sample n, and iterating yields all positions.

    Args:
        facts: facts about the shard.
        columns: the arrays of an index and those of the user, which have one value per sample; they are
            not copied.
        columns_by: the fingerprint of the function that computed the user columns; ``None`` if there are none.
        name: the name of the index in error messages.

    Attributes:
        facts: facts about the shard, a `ShardFacts`.
        columns: the arrays by name, including user columns, for vectorized work on all samples.
        columns_by: the fingerprint of the function that computed the user columns.
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
    """

    def __init__(
        self, facts: ShardFacts, columns: Columns, columns_by: str | None = None, name: str = "An index"
    ) -> None:
        self.facts = facts
        self.columns = NamedColumns(columns)
        self.columns.index_name = name
        self.columns_by = columns_by
        try:
            check_columns(self.columns)
            text, ends = self.columns["field_text"].tobytes(), self.columns["field_ends"].tolist()
            raw_fields = [text[begin:end].decode("utf-8", "surrogateescape") for begin, end in pairwise([0, *ends])]
        except ValueError as error:
            raise CorruptSidecarError(f"{name} is damaged: {error}. Delete it and build it again") from error
        #: The fields as written in member names, before lowercasing.
        self.raw_fields = raw_fields
        self.fields = [field.lower() for field in raw_fields] if facts.lowercase else raw_fields
        self._name = name

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.columns["sample_offsets"]) - 1

    def __getitem__(self, number: int) -> IndexedSample:
        """Return the position of a sample in its shard."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"{self._name} has {plural(count, 'sample')}, so there is no sample {number}")
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
        return (
            f"<ShardIndex of {plural(len(self), 'sample')}, {plural(self.members, 'member')}, {self.facts.bytes} bytes>"
        )

    def __reduce__(self) -> tuple[Callable[..., ShardIndex], tuple[Any, ...]]:
        columns = {name: np.array(column) for name, column in self.columns.items()}  # arrays that own their memory
        return ShardIndex, (self.facts, columns, self.columns_by, self._name)

    @property
    def members(self) -> int:
        """The number of members of all samples."""
        return len(self.columns["member_offsets"])

    @property
    def user_columns(self) -> list[str]:
        """The names of the user columns."""
        return [name for name in self.columns if name not in COLUMNS]

    @property
    def sample_sizes(self) -> npt.NDArray[np.int64]:
        """The size of all fields of each sample, in bytes."""
        begins = self.columns["sample_members"][:-1]
        return np.add.reduceat(self.columns["member_sizes"], begins) if len(begins) else np.empty(0, np.int64)

    @property
    def keys(self) -> list[str]:
        """The keys of all samples, in the order of the shard."""
        return self.keys_of(np.arange(len(self)))

    def keys_of(self, numbers: npt.NDArray[np.int64]) -> list[str]:
        """Return the keys of samples; if they are close together, their text is decoded at once."""
        ends, text = self.columns["key_ends"], self.columns["key_text"]
        begins, stops = np.where(numbers > 0, ends[numbers - 1], 0), ends[numbers]
        first, last = int(begins.min(initial=len(text))), int(stops.max(initial=0))
        if last - first <= SPARSE_KEYS * int((stops - begins).sum()):
            raw = text[first:last].tobytes()
            if raw.isascii():
                whole = raw.decode()
                spans = zip((begins - first).tolist(), (stops - first).tolist(), strict=True)
                return [whole[begin:end] for begin, end in spans]
        spans = zip(begins.tolist(), stops.tolist(), strict=True)
        return [str(text.data[begin:end], "utf-8", "surrogateescape") for begin, end in spans]

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
        """The text after the key in the header of each field; b"" if the key rule is not one of this package."""
        if self.key_rule is None:
            return [b""] * len(self.raw_fields)
        return [b".%b\0" % field.encode("utf-8", "surrogateescape") for field in self.raw_fields]

    @cached_property
    def has_plain_names(self) -> bool:
        """Whether each name fits into a single header, that is, is ASCII text of less than 100 bytes."""
        text, longest = self.columns["key_text"], max(map(len, self.suffixes), default=0)
        lengths = np.diff(self.columns["key_ends"], prepend=0)
        return bool(lengths.max(initial=0) + longest <= NAME_BYTES and text.max(initial=0) < 128)

    def describe_change(self, origin: str, now: FileFacts) -> str:
        """Return how a shard differs from what the index records about it; "" if it does not.

        The ETag is that of one copy in one store. The time of a local file is only compared if headers do not show
        whether the index is still valid.

        Args:
            origin: the location of the shard.
            now: what its store reports about it.
        """
        then = self.facts.at(origin)
        if None not in (then.bytes, now.bytes) and then.bytes != now.bytes:
            return f"it has {now.bytes} bytes instead of {then.bytes}"
        if None not in (then.etag, now.etag) and then.etag != now.etag:
            return f"its ETag is {now.etag!r} instead of {then.etag!r}"
        hidden = "columns" if self.columns_by is not None else f"the key rule {then.key_rule}"
        needs_time = self.columns_by is not None or self.key_rule is None
        if needs_time and None not in (then.mtime_ns, now.mtime_ns) and then.mtime_ns != now.mtime_ns:
            return (
                f"its modification time differs from that in its index, and because the index has {hidden}, the "
                "headers do not show whether the shard is still the same"
            )
        return ""

    def has_same_layout(self, other: ShardIndex) -> bool:
        """Whether two indexes have the same samples at the same offsets, regardless of other facts."""
        return self.fields == other.fields and all(
            np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS
        )

    def check_random_access(self) -> None:
        """Raise an error unless samples can be read in any order.

        Raises:
            UnsupportedSidecarError: the shard is compressed.
        """
        if self.facts.compression is not None:
            raise UnsupportedSidecarError(
                f"{self._name} belongs to a shard compressed with {self.facts.compression}, so its samples can only be "
                f"read in order. Decompress the shard to read them in any order"
            )

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
        return IndexedSample(self.keys_of(np.array([number]))[0], offset, end, tuple(entries))
