"""Index builder: groups the members of a shard into index entries."""

from __future__ import annotations

from array import array

import numpy as np

from wds_datapipes.errors import DuplicateFieldError, RepeatedKeyError
from wds_datapipes.index.shard_index import COLUMNS, ShardFacts, ShardIndex, rule_name
from wds_datapipes.samples.grouping import OnDuplicate, OnRepeatedKey
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.user_warnings import warn_user

__all__ = ["IndexBuilder"]

#: What samples have that is no field.
NO_FIELDS = frozenset(("__key__", "__url__", "__local_path__"))


class IndexBuilder:
    """Builds the index of a shard from its members, by the rules of `group_samples`.

    Who writes a shard knows where each member is, and needs no second look at it.

    Args:
        key_rule: splits the members' names.
        lowercase: whether fields are called by their lower-case names.
        on_duplicate: what to do where a field occurs twice in a sample.
        on_repeated_key: what to do where a key comes back after other samples.
        archive: what errors call the shard.

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
        archive: str = "A shard",
    ) -> None:
        self._key_rule, self._lowercase = key_rule, lowercase
        self._on_duplicate, self._on_repeated_key = on_duplicate, on_repeated_key
        self._archive = archive
        self._samples, self._counts, self._key_ends = array("q"), array("q", [0]), array("q")
        self._offsets, self._sizes, self._numbers = array("q"), array("q"), array("I")
        self._keys = bytearray()
        #: Fields as names have them, to their numbers.
        self._fields: dict[str, int] = {}
        self._seen: set[str] = set()
        # The sample being gathered: its key, where it begins, and its fields to their members.
        self._key: str | None = None
        self._start = 0
        self._members: dict[str, tuple[int, int, int]] = {}

    def add(self, name: str, start: int, offset: int, size: int) -> None:
        """Add a file of the shard, in the order of the archive.

        Args:
            name: its whole name.
            start: where its first header begins, in uncompressed bytes.
            offset: where its data begin.
            size: how many they are.

        Raises:
            DuplicateFieldError: its sample has this field already, and that is an error.
            RepeatedKeyError: its sample has ended before, and that is an error.
        """
        parts = None if name[:2] == "__" and is_meta(name) else self._key_rule(name)
        if parts is None:
            return
        key, raw = parts
        if key != self._key:
            self._begin(key, start)
        field = raw.lower() if self._lowercase else raw
        number = self._fields.get(raw)
        if field in self._members:
            if self._on_duplicate == "raise":
                raise DuplicateFieldError(
                    f"{self._archive} holds the field {field!r} of the sample {key!r} twice, the second time at byte "
                    f"{start} (member {name!r}). Write the shard again with distinct names, or pass "
                    f'on_duplicate="first" or "last"'
                )
            if self._on_duplicate == "first":
                return
        elif field in NO_FIELDS:
            return  # what another program noted of where it had the sample from
        if number is None:
            number = self._fields[raw] = len(self._fields)
        self._members[field] = (number, offset, size)

    def finish(self, *, end: int, facts: ShardFacts) -> ShardIndex:
        """Return the index of all that was added.

        Args:
            end: where the archive ends, without its end marker, in uncompressed bytes.
            facts: what is known of the shard; its rules are replaced by those that were used.
        """
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
            where=f"The index of {self._archive}",
        )

    def _begin(self, key: str, start: int) -> None:
        self._flush()
        self._key, self._start = key, start
        if key not in self._seen:
            self._seen.add(key)
            return
        if self._on_repeated_key == "ignore":
            return
        text = (
            f"{self._archive} holds the sample {key!r} in parts: a file of it is at byte {start}, after files of "
            f"other samples. They have to be adjacent: write the shard again, ordered by name (tar --sort=name)"
        )
        if self._on_repeated_key == "raise":
            raise RepeatedKeyError(text)
        self._on_repeated_key = "ignore"
        warn_user(text)

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
