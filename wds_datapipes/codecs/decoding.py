"""Decoding of samples: chooses a decoder for each field, and reports the fields that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial as bind
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.codecs import UNSAFE, find_codec
from wds_datapipes.codecs.extensions import (
    ByExtension,
    ExtensionDecoder,
    FieldName,
    as_continue,
    handle_extension,
    name_of,
)
from wds_datapipes.codecs.gzip_fields import gunzip
from wds_datapipes.codecs.registry import find_word
from wds_datapipes.errors import DecodeError, MissingDependencyError, UnsafeCodecError
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.samples.fields import no_sample
from wds_datapipes.types import Sample
from wds_datapipes.user_warnings import warn_user

__all__ = ["Decoder", "DecoderChain", "decode_samples", "place_in", "wds_decode"]

Decoder: TypeAlias = "str | ByExtension | Callable[[str, bytes], Any]"
"""An image spec, ``"torch_video"``, ``"torch_audio"`` or a registered decoder's name; an `ImageDecoder` or what
`handle_extension` makes; or a function of a field's name and bytes that returns the value, ``None`` for a field that it
leaves to the next decoder, or a `Continue` with what the next ones are to decode."""

#: How many names of fields a pass remembers the plans of; far more than samples have, unless keys hold dots.
MAX_PLANS = 1000

#: After how many samples a decoder function that has taken no field is reported, if the pass does not end before.
UNUSED_AFTER = 1000


def wds_decode(
    source: Iterable[Sample],
    /,
    *decoders: Decoder,
    only: str | Iterable[str] | None = None,
    partial: bool = False,
    unsafe: bool = False,
    on_error: OnError = "raise",
    limits: ReadLimits = DEFAULT_LIMITS,
    **by_extension: Callable[[bytes], Any],
) -> Iterator[Sample]:
    """Decode the fields of samples, as described in `SampleDecoder`.

    >>> samples = [{"__key__": "a", "cls": b"7", "txt": b"a cat", "bin": b"x"}]
    >>> list(wds_decode(samples, bin=len, only="cls bin"))
    [{'__key__': 'a', 'cls': 7, 'txt': b'a cat', 'bin': 1}]
    """
    check_on_error(on_error)
    chain = DecoderChain(decoders, by_extension, only=only, partial=partial, unsafe=unsafe, limits=limits)
    return decode_samples(source, chain, on_error)


class _Step(NamedTuple):
    #: What to call it in a message.
    name: str
    function: Callable[[bytes], Any]
    #: The position of its decoder in the chain; none for what the chain brings itself.
    position: int | None = None


_STAYS = _Step("nothing", bytes)


class _Plan(NamedTuple):
    """The decoding of the fields of one name."""

    filters: tuple[_Step, ...]
    #: At least one: the first value that is not ``None`` stands, and the last one's always.
    decoders: tuple[_Step, ...]


class DecoderChain:
    """Chooses decoders by the names of fields.

    Args:
        decoders: asked in order, before the decoders of the basic table; the first value that is not ``None`` stands.
        by_extension: extension -> function ``bytes -> value``; they come before all other decoders.
        only: names of the fields to decode, as a string with blanks between them or as several strings.
        partial: let values pass that are not bytes, instead of an error.
        unsafe: allow codecs that can run code.
        basic: whether the basic table follows; without it, fields that no decoder takes are left as they are, ``.gz``
            ones and those that are not bytes too.
        limits: what compressed fields may expand to.
    """

    def __init__(
        self,
        decoders: Iterable[Decoder],
        by_extension: Mapping[str, Callable[[bytes], Any]],
        *,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        unsafe: bool = False,
        basic: bool = True,
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        # Of "png" and "seg.png", the one that says more comes first.
        keywords = sorted(by_extension, key=lambda extension: -extension.count("."))
        functions = list(range(len(keywords)))
        chain: list[ByExtension | Callable[[str, bytes], Any]] = [
            handle_extension(extension, by_extension[extension]) for extension in keywords
        ]
        for decoder in decoders:
            if not isinstance(decoder, str) and not callable(decoder):
                raise TypeError(f"a decoder is a word or a function of a field's name and bytes, not {decoder!r}")
            if not isinstance(decoder, str | ByExtension) or isinstance(decoder, ExtensionDecoder):
                functions.append(len(chain))
            chain.append(find_word(decoder) if isinstance(decoder, str) else decoder)
        self.decoders = tuple(chain)
        #: Positions of the decoders that are functions of the user's, and not words.
        self.functions = tuple(functions)
        self.only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self.partial = partial
        self.unsafe = unsafe
        self.basic = basic
        self.limits = limits

    def after(self, *decoders: ByExtension) -> DecoderChain:
        """Return a chain with other decoders before those of this one."""
        chain = copy(self)
        chain.decoders = (*decoders, *self.decoders)
        chain.functions = tuple(position + len(decoders) for position in self.functions)
        return chain

    def plan(self, field: str) -> _Plan | None:
        """Return the plan for the fields of one name; ``None`` leaves them as they are."""
        if field.startswith("__") or (self.only is not None and field not in self.only):
            return None
        return self.plan_from(0, field)

    def plan_from(self, start: int, field: str) -> _Plan | None:
        """Return the plan of the decoders from one position on for fields of one name."""
        filters: list[_Step] = []
        name = field
        while f".{name}".lower().endswith(".gz"):
            name = name[:-3]
            filters.append(_Step("gzip", bind(gunzip, limits=self.limits)))
        steps: list[_Step] = []
        for position, decoder in enumerate(self.decoders[start:], start):
            if not isinstance(decoder, ByExtension):
                steps.append(_Step(name_of(decoder), bind(decoder, FieldName(name)), position))
            elif decoder.takes(name):
                steps.append(_Step(repr(decoder), decoder.decode, position))
        if self.basic:
            steps.append(self._last_step(name.rpartition(".")[2].lower()))
        elif steps:
            steps.append(_STAYS)
        else:
            return None
        return _Plan(tuple(filters), tuple(steps))

    def _last_step(self, extension: str) -> _Step:
        codec = find_codec(extension, trusted=self.unsafe)
        if codec is None:
            return _STAYS
        function: Callable[..., Any] = _refuse if extension in UNSAFE and not self.unsafe else codec.decode
        if extension == "npz":  # the one that is compressed within
            function = bind(function, limits=self.limits)
        return _Step(f"the {extension} codec", function)


class _Unused:
    """Warns of decoder functions that have decoded nothing.

    A function that compares names in a way that never holds is otherwise silent: its fields stay bytes, or go to the
    next decoder. Functions for extensions count as one, since a table of them may cover more than the data has; words
    such as ``"rgb8"`` and the handlers of webdataset itself ask for no field in particular.
    """

    def __init__(self, chain: DecoderChain) -> None:
        by_extension: set[int] = set()
        self._groups: list[set[int]] = []
        for position in chain.functions:
            decoder = chain.decoders[position]
            if isinstance(decoder, ByExtension):
                by_extension.add(position)
            elif not str(getattr(decoder, "__module__", "")).startswith("webdataset."):
                self._groups.append({position})
        if by_extension:
            self._groups.append(by_extension)
        self._decoders = chain.decoders
        self._left = UNUSED_AFTER

    def __bool__(self) -> bool:
        return bool(self._groups)

    def discard(self, position: int) -> None:
        """Record that the decoder at a position has decoded something."""
        self._groups = [group for group in self._groups if position not in group]

    def count(self, plans: Mapping[str, _Plan | None]) -> None:
        """Count a sample, and warn when enough were counted."""
        self._left -= 1
        if not self._left:
            self.warn(plans)

    def warn(self, plans: Mapping[str, _Plan | None]) -> None:
        """Warn once of the decoders that have decoded nothing so far."""
        fields = sorted(field for field, plan in plans.items() if plan is not None)
        groups, self._groups = self._groups, []
        if not fields:
            return
        listed = ", ".join(map(repr, fields[:10])) + (", ..." if len(fields) > 10 else "")
        for group in groups:
            names = ", ".join(_name_decoder(self._decoders[position]) for position in sorted(group))
            warn_user(
                f"wds_decode: {names} decoded none of the fields, which are {listed}. A function gets the field's "
                f"name without a leading dot, 'png' and not '.png', and returns None for what it leaves to others"
            )


def _name_decoder(decoder: Any) -> str:
    return repr(decoder) if isinstance(decoder, ByExtension) else name_of(decoder)


def decode_samples(
    source: Iterable[Sample], chain: DecoderChain, on_error: OnError = "raise", *, warn_unused: bool = False
) -> Iterator[Sample]:
    """Decode samples by a chain, and skip those with a field that fails, if the policy says so.

    With ``warn_unused``, warn of decoder functions that have decoded nothing when the samples end.
    """
    policy = ErrorPolicy(on_error, "wds_decode")
    plans: dict[str, _Plan | None] = {}
    unused = _Unused(chain) if warn_unused else None
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise no_sample("wds_decode", sample)
        decoded = {}
        try:
            for field, value in sample.items():
                try:
                    plan = plans[field]
                except KeyError:
                    if len(plans) >= MAX_PLANS:
                        plans.clear()
                    plan = plans[field] = chain.plan(field)
                decoded[field] = value if plan is None else _decode_field(sample, field, plan, chain, unused)
        except DecodeError as error:
            if policy.goes_on(error, sample, field=field):
                continue
            break
        if unused:
            unused.count(plans)
        yield decoded
    else:
        if unused:
            unused.warn(plans)
    policy.finish()


def _decode_field(sample: Sample, field: str, plan: _Plan, chain: DecoderChain, unused: _Unused | None) -> Any:
    data = sample[field]
    if type(data) is not bytes:
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = bytes(data)
        elif chain.partial:
            return data
        else:
            raise DecodeError(
                f"{place_in(sample, field)} holds a value of type {type(data).__name__}, and not bytes. If it was "
                f"decoded before, partial=True lets it pass; only= names the fields to decode"
            )
    step = plan.decoders[0]
    try:
        while True:
            for step in plan.filters:
                data = step.function(data)
            value = None
            for step in plan.decoders:
                value = step.function(data)
                if value is not None:
                    break
            if step.position is None or value is None:
                return value
            if unused:
                unused.discard(step.position)
            if (rest := as_continue(value)) is None:
                return value
            data = rest.data
            following = chain.plan_from(step.position + 1, rest.key)
            if following is None:
                return data
            plan = following
    except MissingDependencyError:
        raise
    except UnsafeCodecError as error:
        raise UnsafeCodecError(
            f"{place_in(sample, field)} was not decoded: {error}. If you trust the source of the shard, allow it with "
            f"wds_decode(unsafe=True). Otherwise name the fields to decode with only=, or give the extension a decoder "
            f"of your own; pkl=bytes leaves every pkl field as it is"
        ) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise DecodeError(
            f"{place_in(sample, field)} cannot be decoded by {step.name}: {cause}. The data is {_glimpse(data)}. "
            f'on_error="warn" or "skip" skips such samples'
        ) from error


def place_in(sample: Sample, field: str) -> str:
    """Name a field of a sample, and its shard where it has one."""
    where = f" in shard {redact(str(sample['__url__']))!r}" if "__url__" in sample else ""
    which = f"sample {sample['__key__']!r}" if "__key__" in sample else "a sample without a key"
    return f"field {field!r} of {which}{where}"


def _glimpse(data: bytes) -> str:
    return f"{data!r}" if len(data) <= 16 else f"{len(data)} bytes that begin with {data[:16]!r}"


def _refuse(_data: bytes) -> Any:
    raise UnsafeCodecError("it is a pickle, and decoding a pickle can run any code")
