"""Facts that an index records about its shard, and the rules by which its members were grouped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from wds_datapipes.samples.keys import KeyRule, first_dot, last_dot


class Rules(NamedTuple):
    """The rules by which an index groups members into samples, as `IndexOptions` has them.

    >>> str(Rules("last_dot", True, "raise")), str(Rules("first_dot", True, "raise"))
    ('key_rule=last_dot', 'the default rules')
    """

    key_rule: str = "first_dot"
    lowercase: bool = True
    on_duplicate: str = "raise"

    def __str__(self) -> str:
        shown = {"key_rule": self.key_rule, "lowercase": self.lowercase, "on_duplicate": repr(self.on_duplicate)}
        different = [name for name, value, default in zip(shown, self, Rules(), strict=True) if value != default]
        return ", ".join(f"{name}={shown[name]}" for name in different) or "the default rules"


#: The key rules that an index refers to by name.
RULES: dict[str, KeyRule] = {"first_dot": first_dot, "last_dot": last_dot}


def rule_name(rule: KeyRule) -> str:
    """Return the name of a key rule in an index: plain for those of this package, otherwise with the module."""
    for name, known in RULES.items():
        if rule is known:
            return name
    return f"{getattr(rule, '__module__', '?')}:{getattr(rule, '__qualname__', type(rule).__qualname__)}"


@dataclass(frozen=True)
class ShardFacts:
    """Facts that an index records about its shard; ``None`` if unknown.

    Attributes:
        bytes: the size of the file.
        sha256: its digest, in hexadecimal digits.
        mtime_ns: the modification time of a local file, or of a file without an ETag, in nanoseconds since 1970.
        etag: the identifier of this version in a store.
        origin: a digest of the location where this time or ETag was recorded; those of a copy differ.
        compression: ``"gzip"``, ``"bz2"``, ``"xz"`` or ``"zstd"``; ``None`` for a plain archive.
        key_rule: the rule that splits member names: ``"first_dot"``, ``"last_dot"`` or ``"module:function"``.
        lowercase: whether field names are lowercased.
        on_duplicate: which of several members for the same field of a sample is used; ``"raise"`` for none.
    """

    bytes: int | None = None
    sha256: str | None = None
    mtime_ns: int | None = None
    etag: str | None = None
    origin: str | None = None
    compression: str | None = None
    key_rule: str = "first_dot"
    lowercase: bool = True
    on_duplicate: str = "raise"

    @classmethod
    def from_json(cls, found: object) -> ShardFacts:
        """Create facts from JSON and check them.

        Raises:
            ValueError: the JSON is invalid.
        """
        kinds = _kinds_of_facts()
        if not isinstance(found, dict) or found.keys() != kinds.keys():
            raise ValueError(f"its facts about the shard are not {', '.join(sorted(kinds))}")
        for name, kind in kinds.items():
            if not isinstance(found[name], kind) or (kind is not bool and isinstance(found[name], bool)):
                raise ValueError(f"its {name} is {found[name]!r}")
        if found["bytes"] is not None and found["bytes"] < 0:
            raise ValueError(f"its bytes is {found['bytes']}")
        return cls(**found)

    def at(self, origin: str) -> ShardFacts:
        """Return the facts that hold at a location: a copy has neither the time nor the ETag of another one."""
        return self if origin == self.origin else replace(self, mtime_ns=None, etag=None)

    @property
    def rules(self) -> Rules:
        """The rules by which the members were grouped."""
        return Rules(self.key_rule, self.lowercase, self.on_duplicate)


@cache
def _kinds_of_facts() -> dict[str, Any]:
    return get_type_hints(ShardFacts)
