"""An excerpt: some samples of shards, with some of their fields, under other names, their bytes as they are."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import OnError
from wds_datapipes.samples.fields import rename
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.samples.sampling import parse_slice, rsample, slice_samples
from wds_datapipes.samples.select import Lacking, parse_patterns, select_fields
from wds_datapipes.shards.loading import ReadOptions, read_shards
from wds_datapipes.shards.position import SkippedCount
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.types import Sample

__all__ = ["Subset", "check_rekey"]

#: What a new key may be made of.
KEY_PARTS = ("number", "key", "name", "shard")


@dataclass(frozen=True, kw_only=True)
class Subset:
    """What to take of shards, in the order of its attributes.

    Attributes:
        positions: the positions of samples in the whole stream, as for ``slice_samples``; none is all of them.
        share: the probability with which each of these is taken.
        seed: draws them.
        select: patterns of the fields to take, as for ``select_fields``; none is all fields.
        missing: what becomes of a sample without a selected field.
        rename: new names of fields to old ones, as for ``rename``.
        rekey: the new key, such as ``"{number:06d}"`` or ``"{shard}/{name}"``: ``number`` counts the samples that are
            taken, ``key`` is the old key and ``name`` its last part, ``shard`` is the name of the shard.
        key_rule: how the shards are read, and so for the next two.
        end_marker: ``"optional"`` accepts shards without an end marker.
        on_error: ``"raise"`` ends with the first bad shard or sample; others as in all stages.
        storage_options: passed to remote file systems.
        limits: what shards may ask for.

    Raises:
        ValueError, TypeError: an attribute makes no sense.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": f"old/{n}", "jpg": "x", "cls": str(n)} for n in range(4)])
        >>> excerpt = Subset(positions=(1, 3), select=["cls"], rekey="{number:03d}-{name}")
        >>> [(sample["__key__"], sample["cls"]) for sample in excerpt.samples([url])]
        [('000-1', b'1'), ('001-2', b'2')]
    """

    positions: tuple[int | None, ...] = ()
    share: float = 1.0
    seed: int = 0
    select: Sequence[str] = ()
    missing: Lacking = "raise"
    rename: Mapping[str, str] = field(default_factory=dict)
    rekey: str = ""
    key_rule: KeyRule = first_dot
    end_marker: EndMarker = "required"
    on_error: OnError = "raise"
    storage_options: Mapping[str, Any] | None = None
    limits: ReadLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"the share of samples is from 0 to 1, not {self.share!r}")
        if self.positions:
            parse_slice(self.positions)
        if self.select:
            parse_patterns("select_fields", self.select)
        if self.rekey:
            check_rekey(self.rekey)

    def samples(self, urls: Iterable[str], *, on_read: Callable[[Sample], object] | None = None) -> Iterator[Sample]:
        """Yield the samples of shards that belong to the excerpt, with their fields as bytes.

        Files that belong to no sample are left out.

        Args:
            urls: the shards, in the order in which they are read.
            on_read: called with each sample that was read, whether it is taken or not.

        Raises:
            ShardError: a shard cannot be read.
            SampleError: a sample has a field twice or comes in parts, or lacks what was asked for.
        """
        shards = read_shards(
            urls,
            ReadOptions(
                end_marker=self.end_marker,
                on_error=self.on_error,
                storage_options=self.storage_options,
                limits=self.limits,
            ),
        )
        samples = group_samples(shards, key_rule=self.key_rule, on_repeated_key="raise", on_error=self.on_error)
        if on_read is not None:
            samples = _observe_samples(samples, on_read)
        if self.positions:
            samples = slice_samples(samples, *parse_slice(self.positions), passed=SkippedCount())
        if self.share < 1:
            samples = rsample(samples, self.share, rng=Random(self.seed), passed=SkippedCount())
        if self.select:
            samples = select_fields(samples, list(self.select), missing=self.missing, on_error=self.on_error)
        if self.rename:
            samples = rename(samples, self.rename, on_error=self.on_error)
        return _rekey_samples(samples, self.rekey) if self.rekey else samples


def check_rekey(pattern: str) -> None:
    """Raise unless keys can be made by a pattern.

    Raises:
        ValueError: they cannot, or all samples would have the same.
    """
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
        pattern.format(number=1, key="a/b", name="b", shard="s")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The new key {pattern!r} cannot be made: {type(error).__name__}: {error}. It is made of "
            f"{', '.join(f'{{{part}}}' for part in KEY_PARTS)}, as in '{{number:06d}}'"
        ) from None
    if not names & {"number", "key", "name"}:
        raise ValueError(
            f"The new key {pattern!r} would be the same for all samples of a shard. It needs {{number}}, {{key}} or "
            f"{{name}}"
        )


def _observe_samples(samples: Iterable[Sample], on_read: Callable[[Sample], object]) -> Iterator[Sample]:
    for sample in samples:
        on_read(sample)
        yield sample


def _rekey_samples(samples: Iterable[Sample], pattern: str) -> Iterator[Sample]:
    """Yield samples with new keys."""
    for number, sample in enumerate(samples):
        key = sample["__key__"]
        new = pattern.format(number=number, key=key, name=key.rpartition("/")[2], shard=_shard_name(sample["__url__"]))
        yield {**sample, "__key__": new}


def _shard_name(url: str) -> str:
    """Return the name of a shard without folders and suffixes.

    >>> _shard_name("s3://bucket/train-000.tar.gz"), _shard_name("pipe:cat a.tar | gunzip"), _shard_name("-")
    ('train-000', 'gunzip', '-')
    """
    base = url.partition("?")[0].rstrip("/").rpartition("/")[2]
    words = base.split()
    name = (words[-1] if words else base).partition(".")[0]
    return name or "shard"
