"""Index builder: groups the members of a shard into index entries."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from wds_datapipes.errors import DuplicateKeyError, SampleError
from wds_datapipes.index.shard_columns import COLUMNS
from wds_datapipes.index.shard_index import ShardFacts, ShardIndex, rule_name
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.user_warnings import warn_user

__all__ = ["IndexBuilder"]

#: How many names of files that belong to no sample are recorded.
MAX_STRAY_NAMES = 3
#: Keys of a sample that are not fields.
NO_FIELDS = frozenset(("__key__", "__url__", "__local_path__"))


class IndexBuilder:
    """Builds the index of a shard from its members, by the rules of `group_samples`.

    Args:
        key_rule: splits member names.
        lowercase: convert field names to lower case.
        on_duplicate: what to do if a field occurs twice in a sample.
        on_repeated_key: what to do if a key recurs after other samples.
        on_fault: called with each error, the key and the field, or "", instead of raising the error. Of several members
            of the same field, the first counts then.
        archive: the name of the shard in error messages.

    Attributes:
        strays: the number of files that belong to no sample, not counting metadata.
        stray_names: some of their names.

    Examples:
        >>> from wds_datapipes.index.shard_index import ShardFacts
        >>> builder = IndexBuilder()
        >>> builder.add("a.txt", 0, 512, 3)
        >>> builder.add("a.cls", 1024, 1536, 1)
        >>> builder.finish(end=2048, facts=ShardFacts(bytes=10240))[0].entries
        (IndexEntry(field='txt', offset=512, size=3), IndexEntry(field='cls', offset=1536, size=1))
    """

    def __init__(
        self,
        *,
        key_rule: KeyRule = first_dot,
        lowercase: bool = True,
        on_duplicate: OnDuplicate = "raise",
        on_repeated_key: OnRepeatedKey = "warn",
        on_fault: Callable[[SampleError, str, str], object] | None = None,
        archive: str = "A shard",
    ) -> None:
        self._key_rule, self._lowercase = key_rule, lowercase
        self._on_duplicate, self._on_repeated_key = on_duplicate, on_repeated_key
        self._on_fault = on_fault
        self.strays = 0
        self.stray_names: list[str] = []
        self._archive = archive
        self._samples, self._counts, self._key_ends = array("q"), array("q", [0]), array("q")
        self._offsets, self._sizes, self._numbers = array("q"), array("q"), array("I")
        self._keys = bytearray()
        #: Fields as written in member names -> their numbers.
        self._fields: dict[str, int] = {}
        self._previous_keys: set[str] = set()
        # The current sample: its key, its offset, and its fields -> their members.
        self._key: str | None = None
        self._start = 0
        self._members: dict[str, tuple[int, int, int]] = {}

    def add(self, name: str, start: int, offset: int, size: int) -> None:
        """Add a file of the shard, in the order of the archive.

        Args:
            name: its full name.
            start: the offset of its first header, in uncompressed bytes.
            offset: the offset of its data.
            size: the size of its data.

        Raises:
            DuplicateKeyError: the sample already has this field, or the key recurs, and the options forbid it.
        """
        is_metadata = name[:2] == "__" and is_meta(name)
        parts = None if is_metadata else self._key_rule(name)
        if parts is None:
            if not is_metadata:
                self.strays += 1
                if len(self.stray_names) < MAX_STRAY_NAMES:
                    self.stray_names.append(name)
            return
        key, raw = parts
        if key != self._key:
            self._begin(key, start)
        field = raw.lower() if self._lowercase else raw
        number = self._fields.get(raw)
        if field in self._members:
            if self._on_duplicate == "raise":
                text = (
                    f"{self._archive} holds the field {field!r} of the sample {key!r} twice, the second time at byte "
                    f"{start} (member {name!r}). Write the shard again with distinct names, or pass "
                    f'on_duplicate="first" or "last"'
                )
                self._report(DuplicateKeyError(text), key, field)
            if self._on_duplicate != "last":
                return
        elif field in NO_FIELDS:
            return  # written by another program that recorded the source of the sample
        if number is None:
            number = self._fields[raw] = len(self._fields)
        self._members[field] = (number, offset, size)

    def finish(self, *, end: int | None, facts: ShardFacts) -> ShardIndex:
        """Return the index of all added files.

        Args:
            end: the end of the archive without its end marker, in uncompressed bytes. None if the archive is truncated,
                which leaves out the last sample, since it may lack a field.
            facts: facts about the shard; the rules in it are replaced by those of the builder.
        """
        if end is None:
            end, self._members = self._start, {}
        self._flush()
        fields = [field.encode("utf-8", "surrogateescape") for field in self._fields]
        columns = {
            "sample_offsets": [*self._samples, end],
            "sample_members": self._counts,
            "member_offsets": self._offsets,
            "member_sizes": self._sizes,
            "member_fields": self._numbers,
            "key_ends": self._key_ends,
            "key_text": np.frombuffer(bytes(self._keys), np.uint8),
            "field_ends": np.cumsum([len(field) for field in fields]),
            "field_text": np.frombuffer(b"".join(fields), np.uint8),
        }
        rules = {"key_rule": rule_name(self._key_rule), "lowercase": self._lowercase}
        return ShardIndex(
            ShardFacts(**{**vars(facts), **rules, "on_duplicate": self._on_duplicate}),
            {name: np.array(columns[name], kind) for name, kind in COLUMNS.items()},
            name=f"The index of {self._archive}",
        )

    def _begin(self, key: str, start: int) -> None:
        self._flush()
        self._key, self._start = key, start
        if key not in self._previous_keys:
            self._previous_keys.add(key)
            return
        if self._on_repeated_key == "ignore":
            return
        text = (
            f"{self._archive} holds the sample {key!r} in parts: a file of it is at byte {start}, after files of "
            f"other samples. They must be adjacent: write the shard again, sorted by name (tar --sort=name)"
        )
        if self._on_repeated_key == "raise":
            self._report(DuplicateKeyError(text), key, "")
            return
        self._on_repeated_key = "ignore"
        warn_user(text)

    def _report(self, error: SampleError, key: str, field: str) -> None:
        if self._on_fault is None:
            raise error
        self._on_fault(error, key, field)

    def _flush(self) -> None:
        """Finish the current sample."""
        if not self._members:
            return
        self._samples.append(self._start)
        self._keys += str(self._key).encode("utf-8", "surrogateescape")
        self._key_ends.append(len(self._keys))
        for number, offset, size in self._members.values():
            self._numbers.append(number)
            self._offsets.append(offset)
            self._sizes.append(size)
        self._counts.append(len(self._offsets))
        self._members = {}
