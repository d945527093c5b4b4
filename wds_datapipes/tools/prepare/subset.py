"""Subsets of a dataset: selected samples and fields, with new names and keys."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.fields import Lacking
from wds_datapipes.samples.sampling import parse_slice, slice_samples
from wds_datapipes.samples.select import parse_patterns, rename, select_fields
from wds_datapipes.shards.held_samples import ItemCounter
from wds_datapipes.tools.prepare.read_options import ReadOptions, read_samples
from wds_datapipes.types import Sample

#: The placeholders of a pattern for new keys.
KEY_PARTS = ("number", "key", "name", "shard")


@dataclass(frozen=True, kw_only=True)
class Subset(ReadOptions):
    """Selects samples and fields of shards; the attributes are applied in this order.

    Attributes:
        positions: the positions of samples in the stream, as in ``slice_samples``; empty selects all.
        select: patterns of the fields to select, as in ``select_fields``; empty selects all.
        missing: how to handle a sample that lacks a selected field.
        rename: maps new field names to old ones, as in ``rename``.
        rekey: a pattern for new keys, such as ``"{number:06d}"`` or ``"{shard}/{name}"``, where ``number`` counts the
            selected samples, ``key`` is the old key, ``name`` is its last part, and ``shard`` is the name of the shard.
        on_error: how to handle bad shards and samples, as in all stages.

    Raises:
        ValueError, TypeError: an attribute is invalid.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"old/{n}", "jpg": "x", "cls": str(n)} for n in range(4)])
        >>> subset = Subset(positions=(1, 3), select=["cls"], rekey="{number:03d}-{name}")
        >>> [(sample["__key__"], sample["cls"]) for sample in subset.samples([url])]
        [('000-1', b'1'), ('001-2', b'2')]
    """

    positions: tuple[int | None, ...] = ()
    select: Sequence[str] = ()
    missing: Lacking = "raise"
    rename: Mapping[str, str] = field(default_factory=dict)
    rekey: str = ""
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        if self.positions:
            parse_slice(self.positions)
        if self.select:
            parse_patterns("select_fields", self.select)
        if self.rekey:
            check_rekey(self.rekey)

    def samples(self, urls: Iterable[str]) -> Iterator[Sample]:
        """Yield the samples of the subset, with their fields as bytes.

        Files that belong to no sample are skipped.

        Args:
            urls: the shards, in reading order.

        Raises:
            ShardError: a shard cannot be read.
            SampleError: a sample has a repeated field, is split into parts, or lacks a requested field.
        """
        samples = read_samples(urls, self, on_error=self.on_error, on_repeated_key="raise")
        if self.positions:
            samples = slice_samples(samples, *parse_slice(self.positions), counter=ItemCounter())
        if self.select:
            samples = select_fields(samples, list(self.select), missing=self.missing, on_error=self.on_error)
        if self.rename:
            samples = rename(samples, self.rename, on_error=self.on_error)
        if not self.rekey:
            return samples
        return ({**each, "__key__": make_key(self.rekey, number, each)} for number, each in enumerate(samples))


def check_rekey(pattern: str, parts: Sequence[str] = KEY_PARTS) -> None:
    """Check a pattern for new keys, which may contain the given parts.

    Raises:
        ValueError: the pattern is invalid, or produces the same key for all samples.
    """
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
        pattern.format(**{part: 1 if part == "number" else "a" for part in parts})
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The key pattern {pattern!r} is invalid: {type(error).__name__}: {error}. Use "
            f"{', '.join(f'{{{part}}}' for part in parts)}, as in '{{number:06d}}'"
        ) from None
    if not names & {"number", "key", "name"}:
        raise ValueError(
            f"The key pattern {pattern!r} produces the same key for all samples of a shard. Add {{number}}, {{key}} or "
            f"{{name}}"
        )


def make_key(pattern: str, number: int, sample: Sample) -> str:
    """Return the new key of a sample."""
    key = sample["__key__"]
    return pattern.format(number=number, key=key, name=key.rpartition("/")[2], shard=_shard_name(sample["__url__"]))


def _shard_name(url: str) -> str:
    """Return the name of a shard without folders and extensions.

    >>> _shard_name("s3://bucket/train-000.tar.gz"), _shard_name("pipe:cat a.tar | gunzip"), _shard_name("-")
    ('train-000', 'gunzip', '-')
    """
    base = url.partition("?")[0].rstrip("/").rpartition("/")[2]
    words = base.split()
    name = (words[-1] if words else base).partition(".")[0]
    return name or "shard"
