"""Field chains: select functions that decode or encode fields by name, and apply them to samples.

Fields whose names end in ``.gz`` are compressed; the rest of the name selects the functions.
"""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from wds_datapipes.codecs import describe_value
from wds_datapipes.errors import SampleError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import CountedErrors, ErrorPolicy, OnError
from wds_datapipes.samples.fields import not_a_sample_error
from wds_datapipes.types import Sample

#: The maximum number of plans in a chain's cache, one per field name: far more than a dataset has, unless keys contain
#: dots.
MAX_PLANS = 1000
#: The first bytes of gzip data.
GZIP_MAGIC = b"\x1f\x8b\x08"
#: The maximum expansion of deflate: 258 bytes from two bits.
MAX_DEFLATE_RATIO = 1032


class FieldStep(NamedTuple):
    """A function for fields of one name."""

    #: The name for messages.
    name: str
    function: Callable[[Any], Any]
    #: The values that an encoder accepts, if known.
    takes: str = ""
    #: The position of a decoder in its chain; None for basic decoders.
    position: int | None = None


class FieldPlan(NamedTuple):
    """The functions for fields of one name."""

    #: The ``.gz`` suffixes removed from the name, one for each compression.
    gzips: tuple[str, ...]
    #: One or more: the first result that is not ``None`` is used, or else the result of the last step.
    steps: tuple[FieldStep, ...]


class FieldChain(ABC):
    """Functions that convert fields, selected by the name of each field.

    Args:
        only: names of the fields to convert, as a space-separated string or several strings.
        allow_pickle: allow codecs whose data can run code when it is decoded.
    """

    #: The name of the stage, and the error class for fields that fail.
    stage: str
    error: ClassVar[type[SampleError]]

    def __init__(self, only: str | Iterable[str] | None, allow_pickle: bool) -> None:
        names = only.split() if isinstance(only, str) else None if only is None else list(only)
        if names is not None and not all(isinstance(name, str) for name in names):
            raise TypeError(f'only must be names of fields, as in "jpg cls", not {only!r:.200}')
        self.only = None if names is None else frozenset(names)
        self.allow_pickle = allow_pickle
        self.plans: dict[str, FieldPlan | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plans": {}}  # cached plans do not affect equality

    def plan(self, field: str) -> FieldPlan | None:
        """Return and cache the plan for fields of one name; ``None`` keeps them unchanged."""
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        if not isinstance(field, str):
            raise self.error(f"field names must be str, but {field!r} is {describe_value(field)}")
        skipped = field.startswith("__") or (self.only is not None and field not in self.only)
        plan = self.plans[field] = None if skipped else self.make_plan(field)
        return plan

    def make_plan(self, field: str, start: int = 0) -> FieldPlan | None:
        """Return the plan for fields of one name, with the functions from position ``start``."""
        name, gzips = field, list[str]()
        while f".{name}".lower().endswith(".gz"):
            name, gzips = name[:-3], [*gzips, name[-3:]]
        steps = self.find_steps(name, start)
        return FieldPlan(tuple(gzips), steps) if steps else None

    def convert_field(self, sample: Sample, field: str) -> Any:
        """Return the converted value of a field, or the original value if it has no plan.

        Raises:
            SampleError: the value does not match the field's name, or no function supports it.
            UnsafeInputError: the field needs ``allow_pickle``.
            MissingDependencyError: the field needs a package that is not installed.
        """
        plan = self.plans[field] if field in self.plans else self.plan(field)
        return sample[field] if plan is None else self.apply(sample, field, plan)

    @abstractmethod
    def find_steps(self, name: str, start: int, /) -> tuple[FieldStep, ...]:
        """Return the functions from position ``start`` for a name without ``.gz``; without any, fields are kept."""

    @abstractmethod
    def apply(self, sample: Sample, field: str, plan: FieldPlan) -> Any:
        """Return the converted value of a field."""


def convert_samples(
    source: Iterable[Sample], chain: FieldChain, on_error: OnError | CountedErrors = "raise"
) -> Iterator[Sample]:
    """Decode or encode samples with a chain; if a field fails, the policy decides about its sample."""
    policy = ErrorPolicy(on_error, chain.stage)
    plans, apply = chain.plans, chain.apply
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise not_a_sample_error(chain.stage, sample)
        converted = {}
        try:
            for field, value in sample.items():
                try:
                    plan = plans[field]
                except KeyError:
                    plan = chain.plan(field)
                converted[field] = value if plan is None else apply(sample, field, plan)
        except chain.error as error:
            if policy.handle(error, sample, field=field):
                continue
            break
        yield converted
    policy.finish()


def name_field(sample: Sample, field: str) -> str:
    """Describe a field by its sample and, if known, its shard."""
    location = f" in shard {redact(str(sample['__url__']))!r}" if "__url__" in sample else ""
    described = f"sample {sample['__key__']!r}" if "__key__" in sample else "a sample without a key"
    return f"field {field!r} of {described}{location}"


def gunzip(data: bytes, *, limits: ReadLimits = DEFAULT_LIMITS) -> bytes:
    """Decompress all members of gzip data, and verify their checksums.

    Raises:
        ValueError: the data are empty.
        OSError, EOFError, zlib.error: the data are not gzip, truncated, or damaged.
        ReadLimitError: the data expand to more than the limits; decompression stops there.
    """
    if not data:
        raise ValueError("the data are empty, but even an empty file has bytes when compressed")
    if limits.most_of_field(len(data)) >= len(data) * MAX_DEFLATE_RATIO:
        return gzip.decompress(data)
    pieces, size, rest = [], 0, data
    while rest:
        member = zlib.decompressobj(wbits=31)  # 16: with gzip's header and checksum; 15: the largest window
        pieces.append(member.decompress(rest, int(limits.most_of_field(len(data))) - size + 1))
        size += len(pieces[-1])
        limits.check_field(len(data), size, "gzip data", is_all=member.eof)
        if not member.eof:
            raise EOFError("the gzip data are truncated")
        rest = member.unused_data.lstrip(b"\0")
    return b"".join(pieces)


def to_gzip(data: bytes) -> bytes:
    """Compress data without a time and a name in the header, for reproducible bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # 16: with gzip's header and checksum; 15: the largest window
    return compressor.compress(data) + compressor.flush()
