"""Decode samples: select a decoder for each field by its name, and report fields that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial as partial_call
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from wds_datapipes.codecs import UNSAFE, find_codec
from wds_datapipes.codecs.extensions import ByExtension, FieldName, as_continue, find_decoder, handle_extension, name_of
from wds_datapipes.codecs.field_chain import FieldChain, FieldPlan, FieldStep, gunzip, name_field
from wds_datapipes.errors import DecodeError, MissingDependencyError, UnsafeInputError, cause_of
from wds_datapipes.hints import ALLOW_PICKLE, SKIP
from wds_datapipes.io.magic_numbers import BEGINNING, describe_kind
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.samples.fields import FROM_TORCHDATA
from wds_datapipes.types import Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from wds_datapipes.codecs.images import ImageDecoder


KEEP = FieldStep("no decoder", bytes)
GUNZIP = FieldStep("gzip", gunzip)

Decoder: TypeAlias = "str | ByExtension | Callable[[str, bytes], Any]"
"""An image spec, ``"torch_video"``, ``"torch_audio"`` or the name of a registered decoder; an `ImageDecoder` or the
result of `handle_extension`; or a function of a field's name and bytes that returns the value, ``None`` to leave the
field to the next decoder, or a `Continue` with data for the next decoders."""


class DecoderChain(FieldChain):
    """Selects decoders by the names of fields.

    Args:
        decoders: tried in order, before the basic decoders; the first value that is not ``None`` is used.
        by_extension: functions ``bytes -> value`` by extension, tried before all other decoders.
        only: names of the fields to decode, as a space-separated string or several strings.
        partial: keep values that are not bytes unchanged instead of raising an error.
        allow_pickle: allow codecs that can run code.
        limits: the limits on decompressed fields.
        stage: the name of the stage in messages.
        basic: whether to try the basic decoders last; without them, all other fields stay unchanged.
    """

    error = DecodeError

    def __init__(
        self,
        decoders: Iterable[Decoder],
        by_extension: Mapping[str, Callable[[bytes], Any]],
        *,
        only: str | Iterable[str] | None = None,
        partial: bool = False,
        allow_pickle: bool = False,
        limits: ReadLimits = DEFAULT_LIMITS,
        stage: str = "wds_decode",
        basic: bool = True,
    ) -> None:
        super().__init__(only, allow_pickle)
        self.stage = stage
        self.basic = basic
        chain: list[ByExtension | Callable[[str, bytes], Any]] = [
            handle_extension(extension, function)
            for extension, function in sorted(by_extension.items(), key=lambda item: -item[0].count("."))
        ]
        for decoder in decoders:
            if not isinstance(decoder, str) and not callable(decoder):
                raise TypeError(f"a decoder must be a name or a function of a field's name and bytes, not {decoder!r}")
            chain.append(find_decoder(decoder) if isinstance(decoder, str) else decoder)
        self.decoders = tuple(
            decoder.with_limits(limits) if isinstance(decoder, ByExtension) else decoder for decoder in chain
        )
        self.partial = partial
        self.limits = limits

    def find_steps(self, name: str, start: int) -> tuple[FieldStep, ...]:
        """Return the decoders for fields of this name, in order."""
        steps: list[FieldStep] = []
        for position, decoder in enumerate(self.decoders[start:], start):
            if not isinstance(decoder, ByExtension):
                steps.append(FieldStep(name_of(decoder), partial_call(decoder, FieldName(name)), position=position))
            elif decoder.takes(name):
                steps.append(FieldStep(repr(decoder), decoder.decode, position=position))
        if self.basic:
            steps.append(self._basic_step(name.rpartition(".")[2].lower()))
        elif steps:
            steps.append(KEEP)
        return tuple(steps)

    def apply(self, sample: Sample, field: str, plan: FieldPlan) -> Any:
        """Decode the bytes of a field."""
        data = sample[field]
        if type(data) is not bytes:
            if self.partial and not isinstance(data, (bytes, bytearray, memoryview)):
                return data
            data = _as_bytes(sample, field)
        step = GUNZIP
        try:
            while True:
                step = GUNZIP
                for _ in plan.gzips:
                    data = gunzip(data, limits=self.limits)
                value = None
                for step in plan.steps:
                    value = step.function(data)
                    if value is not None:
                        break
                if step.position is None or value is None:
                    return value
                if (rest := as_continue(value)) is None:
                    return value
                data = rest.data
                following = self.make_plan(rest.key, step.position + 1)
                if following is None:
                    return data
                plan = following
        except MissingDependencyError:
            raise
        except UnsafeInputError as error:
            raise UnsafeInputError(
                f"{name_field(sample, field)} was not decoded: {error}. If you trust the source of the shard, ",
                ALLOW_PICKLE,
                f" to {self.stage}. Otherwise select the fields to decode with only=, or pass a "
                f"decoder for the extension; pkl=bytes keeps pkl fields as bytes",
            ) from error
        except Exception as error:
            raise _decode_error(sample, field, step.name, data, error) from error

    def has_decoder(self, field: str) -> bool:
        """Whether fields of this name are decoded, and do not stay bytes."""
        plan = self.plan(field)
        return plan is not None and plan.steps != (KEEP,)

    def find_image_decoder(self, field: str) -> ImageDecoder | None:
        """Return the first decoder for fields of this name, if it decodes images to arrays or tensors."""
        plan = self.plans[field] if field in self.plans else self.plan(field)
        if plan is None or plan.steps[0].position is None:
            return None
        from wds_datapipes.codecs.images import ImageDecoder

        decoder = self.decoders[plan.steps[0].position]
        return decoder if isinstance(decoder, ImageDecoder) and decoder.result.container != "pil" else None

    def read_pixels(self, sample: Sample, field: str, decoder: ImageDecoder, rng: Random) -> NDArray[Any]:
        """Return the pixels of an image field, using the decoder that `find_image_decoder` returned for it."""
        data = _as_bytes(sample, field)
        plan = self.plan(field)
        name = GUNZIP.name
        try:
            for _ in plan.gzips if plan else ():
                data = gunzip(data, limits=self.limits)
            name = repr(decoder)
            return decoder.read_pixels(data, rng)
        except MissingDependencyError:
            raise
        except Exception as error:
            raise _decode_error(sample, field, name, data, error) from error

    def with_rng(self, make_rng: Callable[[], Random]) -> DecoderChain:
        """Return a chain whose random decoders use a new generator for each field."""
        chain = copy(self)
        chain.decoders = tuple(
            decoder.with_rng(make_rng) if isinstance(decoder, ByExtension) else decoder for decoder in self.decoders
        )
        chain.plans = {}
        return chain

    def _basic_step(self, extension: str) -> FieldStep:
        codec = find_codec(extension, trusted=self.allow_pickle)
        if codec is None:
            return KEEP
        function: Callable[..., Any] = _refuse if extension in UNSAFE and not self.allow_pickle else codec.decode
        if extension == "npz":  # compressed internally
            function = partial_call(function, limits=self.limits)
        return FieldStep(f"the {extension} codec", function)


def _as_bytes(sample: Sample, field: str) -> bytes:
    data = sample[field]
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    advice = "If it is already decoded, pass partial=True to wds_decode to keep it, or select fields with only="
    if field[:1] == "." and hasattr(data, "read"):
        advice = FROM_TORCHDATA
    raise DecodeError(f"{name_field(sample, field)} is of type {type(data).__name__}, not bytes. {advice}")


def _decode_error(sample: Sample, field: str, decoder: str, data: bytes, error: Exception) -> DecodeError:
    shown = f"{data!r}" if len(data) <= 16 else f"{len(data)} bytes starting with {data[:16]!r}"
    if kind := describe_kind(data[:BEGINNING], may_be_text=True):
        shown = f"{shown}: {kind.removeprefix('It is ')}"
    return DecodeError(
        f"{name_field(sample, field)} cannot be decoded by {decoder}: ",
        cause_of(error),
        f". The data is {shown}. If all such fields "
        f"are like this, pass another decoder for them, as in .wds_decode({_other_decoder(field, data)}); if only some "
        "samples are damaged, ",
        SKIP,
    )


def _other_decoder(field: str, data: bytes) -> str:
    r"""Return an argument that keeps a field as text, if it is the text of a number, or as bytes.

    >>> _other_decoder("cls", b"cat\n"), _other_decoder("seg.png", b"cat")
    ('cls=bytes.decode', 'png=bytes')
    """
    extension = field.rpartition(".")[2]
    return f"{extension}=bytes{'.decode' if find_codec(extension) is find_codec('cls') and data.isascii() else ''}"


def _refuse(_data: bytes) -> Any:
    raise UnsafeInputError("it is a pickle, and decoding a pickle can run arbitrary code")
