"""What is known of the shard that an index was made from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ShardFacts"]


@dataclass(frozen=True)
class ShardFacts:
    """What an index knows of the shard that it was made from; ``None`` is what it does not know.

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
        """Check what a file says.

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
