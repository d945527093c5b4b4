"""Encoding of samples: chooses an encoder for each field, and reports the fields that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS, UNSAFE, find_codec
from wds_datapipes.codecs.codec import describe_value
from wds_datapipes.codecs.decoding import MAX_PLANS, place_in
from wds_datapipes.codecs.extensions import name_of, split_extensions
from wds_datapipes.codecs.gzip_fields import is_gzip, to_gzip
from wds_datapipes.errors import EncodeError, MissingDependencyError, UnsafeCodecError
from wds_datapipes.on_error.policy import ErrorPolicy, OnError, check_on_error
from wds_datapipes.samples.fields import no_sample
from wds_datapipes.types import Sample

__all__ = ["EncoderChain", "FieldEncoder", "encode_samples", "wds_encode"]

FieldEncoder: TypeAlias = "Callable[[Any], bytes] | Mapping[str, Any]"
"""A function from a value to bytes; or, for the extension of an image, options of its format: ``{"quality": 90}``."""

#: What all encoders leave alone.
BYTES = (bytes, bytearray, memoryview)


def wds_encode(
    source: Iterable[Sample],
    /,
    *,
    only: str | Iterable[str] | None = None,
    unsafe: bool = False,
    on_error: OnError = "raise",
    **by_extension: FieldEncoder,
) -> Iterator[Sample]:
    r"""Encode the fields of samples, as described in `SampleEncoder`.

    >>> list(wds_encode([{"__key__": "a", "cls": 7, "txt": "a cat", "bin": b"x", "pts": [1, 2]}], pts=bytes))
    [{'__key__': 'a', 'cls': b'7', 'txt': b'a cat', 'bin': b'x', 'pts': b'\x01\x02'}]
    """
    check_on_error(on_error)
    return encode_samples(source, EncoderChain(by_extension, only=only, unsafe=unsafe), on_error)


class _Step(NamedTuple):
    #: What to call it in a message.
    name: str
    encode: Callable[[Any], bytes]
    #: What it takes, where that is known.
    takes: str = ""


class _Plan(NamedTuple):
    """The encoding of the fields of one name, unless they are bytes."""

    step: _Step
    #: How often the name ends in ``.gz``.
    gzips: int


class EncoderChain:
    """Chooses encoders by the names of fields.

    Args:
        by_extension: extension -> function or options; they come before the basic table.
        only: names of the fields to encode, as a string with blanks between them or as several strings.
        unsafe: allow codecs whose data can run code when it is decoded.
    """

    def __init__(
        self,
        by_extension: Mapping[str, FieldEncoder],
        *,
        only: str | Iterable[str] | None = None,
        unsafe: bool = False,
    ) -> None:
        self.by_extension = by_extension
        self._steps: list[tuple[str, _Step]] = []
        # Of "png" and "seg.png", the one that says more comes first.
        for keyword in sorted(by_extension, key=lambda extension: -extension.count(".")):
            [extension] = split_extensions([keyword])
            encoder = by_extension[keyword]
            if isinstance(encoder, Mapping):
                self._steps.append((extension, _image_step(extension, encoder)))
            elif callable(encoder):
                self._steps.append((extension, _Step(name_of(encoder), encoder)))
            else:
                raise TypeError(
                    f"what encodes {extension} is a function of a value, or a dict of options of an image format, "
                    f"and not {encoder!r}"
                )
        self.only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self.unsafe = unsafe
        self._plans: dict[str, _Plan | None] = {}

    def encode(self, sample: Sample) -> Sample:
        """Return a new sample with bytes in all fields that are to be encoded.

        Raises:
            EncodeError: a value is not what the field's name says, or nothing encodes such fields.
            UnsafeCodecError: a field needs ``unsafe``.
            MissingDependencyError: a field needs a package that is not installed.
        """
        return {field: self.encode_field(sample, field) for field in sample}

    def encode_field(self, sample: Sample, field: str) -> Any:
        """Return the bytes of one field, or its value if it is left as it is; the errors are those of `encode`."""
        try:
            plan = self._plans[field]
        except KeyError:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[field] = self._plan(field)
        return sample[field] if plan is None else _encode_field(sample, field, plan)

    def _plan(self, field: str) -> _Plan | None:
        """Return the plan for the fields of one name; ``None`` leaves them as they are."""
        if not isinstance(field, str):
            raise EncodeError(f"the names of fields are str, and {field!r} is {describe_value(field)}")
        if field.startswith("__") or (self.only is not None and field not in self.only):
            return None
        name, gzips = f".{field}".lower(), 0
        while name.endswith(".gz"):
            name, gzips = name[:-3], gzips + 1
        for extension, step in self._steps:
            if name.endswith(f".{extension}"):
                return _Plan(step, gzips)
        extension = name.rpartition(".")[2]
        if extension in UNSAFE and not self.unsafe:
            return _Plan(_Step(f"the {extension} codec", _refuse), gzips)
        codec = find_codec(extension, trusted=self.unsafe)
        if codec is not None:
            return _Plan(_Step(f"the {extension} codec", codec.encode, codec.takes), gzips)
        if extension in IMAGE_FORMATS:
            return _Plan(_image_step(extension, {}), gzips)
        return _Plan(_Step("any codec", _unknown_field_error), gzips)


def encode_samples(source: Iterable[Sample], chain: EncoderChain, on_error: OnError = "raise") -> Iterator[Sample]:
    """Encode samples by a chain, and skip those with a field that fails, if the policy says so."""
    policy = ErrorPolicy(on_error, "wds_encode")
    for sample in policy.counted(source):
        if not isinstance(sample, dict):
            raise no_sample("wds_encode", sample)
        try:
            encoded = chain.encode(sample)
        except EncodeError as error:
            if policy.goes_on(error, sample):
                continue
            break
        yield encoded
    policy.finish()


def _encode_field(sample: Sample, field: str, plan: _Plan) -> bytes:
    value = sample[field]
    if isinstance(value, BYTES):
        data = value if type(value) is bytes else bytes(value)
        if plan.gzips and not is_gzip(data):
            raise EncodeError(
                f"{place_in(sample, field)} holds bytes that are not compressed, and bytes are written as they are: "
                f"they could not be read back. Compress them by gzip.compress(data, mtime=0), give the value that they "
                f"are encoded from, or leave .gz out of the field's name"
            )
        return data
    try:
        data = plan.step.encode(value)
        if not isinstance(data, BYTES):
            raise TypeError(f"it returned {describe_value(data)}, and not bytes")
        data = bytes(data)
    except MissingDependencyError:
        raise
    except UnsafeCodecError as error:
        raise UnsafeCodecError(
            f"{place_in(sample, field)} was not encoded: {error}. If those who read the shard will trust it, allow it "
            f"with unsafe=True; otherwise choose a format that is only data, such as json, msgpack or npz"
        ) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).rstrip('.')}"
        takes = f"It takes {plan.step.takes}; bytes" if plan.step.takes else "Bytes"
        raise EncodeError(
            f"{place_in(sample, field)} holds {describe_value(value)}, which cannot be encoded by {plan.step.name}: "
            f"{cause}. {takes} are written as they are"
        ) from error
    for _ in range(plan.gzips):
        data = to_gzip(data)
    return data


def _image_step(extension: str, options: Mapping[str, Any]) -> _Step:
    last = extension.rpartition(".")[2]
    if last not in IMAGE_FORMATS:
        raise TypeError(
            f"options are for images, {' '.join(IMAGE_FORMATS)}, and {extension!r} is none of them: give a function "
            f"from a value to bytes"
        )
    from wds_datapipes.codecs.images import ImageEncoder

    encoder = ImageEncoder(last, options)
    return _Step(f"the {last} codec", encoder.encode, encoder.takes)


def _refuse(_value: Any) -> bytes:
    raise UnsafeCodecError("it would be a pickle, and decoding a pickle can run any code")


def _unknown_field_error(_value: Any) -> bytes:
    known = " ".join(sorted({*CODECS, *IMAGE_FORMATS}))
    raise LookupError(
        f"there are codecs for {known}. Give bytes, or a function from the value to bytes with the extension as keyword"
    )
