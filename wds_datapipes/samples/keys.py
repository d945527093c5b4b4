"""Keys of samples: the rules that extract them from member names, and the assignment of samples to splits by key."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

from wds_datapipes.arguments import checks_calls

KeyRule: TypeAlias = Callable[[str], "tuple[str, str] | None"]
"""Maps a member's name to ``(key, field)``, or to ``None`` if the file belongs to no sample."""


#: The beginnings of names for which `is_meta` may be true.
META_STARTS = frozenset({"__", "./"})


def check_key_rule(key_rule: object) -> None:
    """Raise TypeError unless an argument is a function."""
    if not callable(key_rule):
        raise TypeError(f"key_rule must be first_dot, last_dot or another function of a name, not {key_rule!r}")


def first_dot(name: str) -> tuple[str, str] | None:
    """Split at the first dot of the base name, as the format requires; the directory stays in the key.

    Hidden files (whose base name begins with a dot), directories and files without a dot belong to no sample.

    Examples:
        >>> first_dot("train/000123.seg.png")
        ('train/000123', 'seg.png')
        >>> first_dot("v1.2/a.jpg")
        ('v1.2/a', 'jpg')
        >>> first_dot("train/._000123.jpg"), first_dot("README")
        (None, None)
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    return (name[:dot], name[dot + 1 :]) if dot > base else None


def last_dot(name: str) -> tuple[str, str] | None:
    """Split at the last dot of the base name, for keys that contain dots.

    Examples:
        >>> last_dot("scan-1.25mm.png")
        ('scan-1.25mm', 'png')
        >>> last_dot("train/.hidden.png") is None
        True
    """
    base = name.rfind("/") + 1
    dot = name.rfind(".", base)
    if dot <= base or name[base] == ".":
        return None
    return name[:dot], name[dot + 1 :]


def is_meta(name: str) -> bool:
    """Whether a member describes the shard: the first part of its name begins and ends with two underscores.

    >>> is_meta("__index__"), is_meta("__meta__/classes.json"), is_meta("d/__meta__"), is_meta("__a__.txt")
    (True, True, False, False)
    >>> is_meta("./__meta__/classes.json")  # as in an archive of "tar -C folder ."
    True
    """
    while name.startswith("./"):
        name = name[2:]
    first = name.partition("/")[0]
    return len(first) >= 4 and first.startswith("__") and first.endswith("__")


@checks_calls
class KeySplit:
    """Assigns samples to splits by their keys alone.

    A sample stays in its split regardless of its shard, its position, and the other samples. All versions and
    ``wds-datapipes split`` use the same rule.

    Args:
        shares: maps the name of each split to its share; only the proportions count.
        seed: a different seed assigns samples differently.

    Raises:
        ValueError: there are no shares, or a share is not positive.

    Examples:
        >>> splits = KeySplit({"train": 0.8, "val": 0.2})
        >>> [splits.assign(f"{number:06d}") for number in range(6)]
        ['train', 'train', 'train', 'train', 'train', 'train']

        In a stream, ``.filter(lambda sample: splits.assign(sample["__key__"]) == "val")`` keeps a split. Indexed
        samples are selected by `select`:

        >>> from wds_datapipes import IndexedSamples
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"{number:06d}", "cls": "1"} for number in range(100)])
        >>> [len(IndexedSamples(url, select=splits.select(name))) for name in ("train", "val")]
        [82, 18]
    """

    def __init__(self, shares: Mapping[str, float], *, seed: int = 0) -> None:
        if not shares or not all(0 < share < float("inf") for share in shares.values()):
            raise ValueError(
                f"the shares of splits must be positive, as in {{'train': 0.9, 'val': 0.1}}, not {dict(shares)!r}"
            )
        self.names = list(shares)
        self._ends = list(accumulate(shares.values()))
        self._seed = str(seed).encode()[:64]

    def assign(self, key: str) -> str:
        """Return the split of the sample with this key."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=7, key=self._seed).digest()
        # A float represents 53 bits exactly.
        at = int.from_bytes(digest, "big") >> 3
        return self.names[bisect_right(self._ends, at / (1 << 53) * self._ends[-1], hi=len(self._ends) - 1)]

    def select(self, name: str) -> Callable[[Any], list[bool]]:
        """Return a function for ``select`` of `IndexedSamples`, which selects the samples of a split.

        Raises:
            ValueError: there is no such split.
        """
        if name not in self.names:
            raise ValueError(f"there is no split {name!r}, only {self.names}")
        return partial(self._is_in, name)

    def _is_in(self, name: str, index: Any) -> list[bool]:
        return [self.assign(key) == name for key in index.keys]
