"""Encode samples: select an encoder for each field by its name, and report fields that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from wds_datapipes.codecs import CODECS, IMAGE_FORMATS, UNSAFE, describe_value, find_codec
from wds_datapipes.codecs.extensions import name_of, split_extensions
from wds_datapipes.codecs.field_chain import GZIP_MAGIC, FieldChain, FieldPlan, FieldStep, name_field, to_gzip
from wds_datapipes.errors import EncodeError, MissingDependencyError, UnsafeInputError, cause_of
from wds_datapipes.hints import ALLOW_PICKLE, Hint
from wds_datapipes.types import Sample

FieldEncoder: TypeAlias = "Callable[[Any], bytes] | Mapping[str, Any]"
"""A function from a value to bytes; or, for images, options of the format such as ``{"quality": 90}``."""

#: Types that encoders keep unchanged.
BYTES = (bytes, bytearray, memoryview)


class EncoderChain(FieldChain):
    """Selects encoders by the names of fields.

    Args:
        by_extension: functions or options by extension, used before the basic encoders.
        only: names of the fields to encode, as a space-separated string or several strings.
        allow_pickle: allow codecs whose data can run code when it is decoded.
        hint: advice to set ``allow_pickle``.
    """

    stage, error = "wds_encode", EncodeError

    def __init__(
        self,
        by_extension: Mapping[str, FieldEncoder],
        *,
        only: str | Iterable[str] | None = None,
        allow_pickle: bool = False,
        hint: Hint = ALLOW_PICKLE,
    ) -> None:
        super().__init__(only, allow_pickle)
        self._hint = hint
        self._steps: list[tuple[str, FieldStep]] = []
        for keyword, encoder in sorted(by_extension.items(), key=lambda item: -item[0].count(".")):
            [extension] = split_extensions([keyword])
            if isinstance(encoder, Mapping):
                self._steps.append((extension, _image_step(extension, encoder)))
            elif callable(encoder):
                # `find_steps` adds the name later, because the module's name must not become part of the pipeline's
                # fingerprint.
                self._steps.append((extension, FieldStep("", encoder)))
            else:
                raise TypeError(
                    f"the encoder of {extension} must be a function of a value, or a dict of options of an image "
                    f"format, not {encoder!r}"
                )

    def find_steps(self, name: str, _start: int) -> tuple[FieldStep, ...]:
        """Return the encoder for fields of this name."""
        lower = f".{name}".lower()
        for extension, step in self._steps:
            if lower.endswith(f".{extension}"):
                return (step if step.name else step._replace(name=name_of(step.function)),)
        extension = lower.rpartition(".")[2]
        codec = find_codec(extension, trusted=self.allow_pickle)
        if extension in UNSAFE and not self.allow_pickle:
            return (FieldStep(f"the {extension} codec", _refuse),)
        if codec is not None:
            return (FieldStep(f"the {extension} codec", codec.encode, codec.takes),)
        if extension in IMAGE_FORMATS:
            return (_image_step(extension, {}),)
        return (FieldStep("any codec", _unknown_field_error),)

    def apply(self, sample: Sample, field: str, plan: FieldPlan) -> bytes:
        """Encode the value of a field."""
        value, (step,) = sample[field], plan.steps
        if isinstance(value, BYTES):
            if plan.gzips and bytes(value)[:3] != GZIP_MAGIC:
                raise EncodeError(
                    f"{name_field(sample, field)} holds uncompressed bytes, which could not be read back, because "
                    f"bytes are written unchanged. Compress them with gzip.compress(data, mtime=0), pass the value "
                    f"instead of its bytes, or remove .gz from the field's name"
                )
            return value if type(value) is bytes else bytes(value)
        try:
            data = step.function(value)
            if not isinstance(data, BYTES):
                raise TypeError(f"it returned {describe_value(data)}, not bytes")
            data = bytes(data)
        except MissingDependencyError:
            raise
        except UnsafeInputError as error:
            raise UnsafeInputError(
                f"{name_field(sample, field)} was not encoded: {error}. If all readers trust the shard, ",
                self._hint,
                "; otherwise choose a format without code, such as json, msgpack or npz",
            ) from error
        except Exception as error:
            takes = f"It takes {step.takes}; bytes" if step.takes else "Bytes"
            raise EncodeError(
                f"{name_field(sample, field)} holds {describe_value(value)}, which cannot be encoded by {step.name}: ",
                cause_of(error),
                f". {takes} are written unchanged",
            ) from error
        for _ in plan.gzips:
            data = to_gzip(data)
        return data


def _image_step(extension: str, options: Mapping[str, Any]) -> FieldStep:
    last = extension.rpartition(".")[2]
    if last not in IMAGE_FORMATS:
        raise TypeError(
            f"options are for images ({' '.join(IMAGE_FORMATS)}), not for {extension!r}: pass a function from a value "
            f"to bytes"
        )
    from wds_datapipes.codecs.images import ImageEncoder

    encoder = ImageEncoder(last, options)
    return FieldStep(f"the {last} codec", encoder.encode, encoder.takes)


def _refuse(_value: Any) -> bytes:
    raise UnsafeInputError("it would be a pickle, and decoding a pickle can run arbitrary code")


def _unknown_field_error(_value: Any) -> bytes:
    known = " ".join(sorted({*CODECS, *IMAGE_FORMATS}))
    raise LookupError(
        f"there are only codecs for {known}. Pass bytes, or a function from the value to bytes with the extension as "
        f"keyword"
    )
