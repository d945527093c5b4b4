"""Record packer: encodes and checks samples as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wds_datapipes.codecs import describe_value
from wds_datapipes.codecs.plain_values import encode_cbor, encode_json, encode_msgpack
from wds_datapipes.errors import EncodeError, MissingDependencyError
from wds_datapipes.shards.record_formats import RecordFormat
from wds_datapipes.types import Sample
from wds_datapipes.writing.sample_packer import Encoder, PackedSample, refuse_padding


def _encode_json_line(record: Sample) -> bytes:
    return encode_json(record) + b"\n"


#: How each format encodes a record.
ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "jsonl": _encode_json_line,
    "msgpack": encode_msgpack,
    "cbor": encode_cbor,
}


class RecordPacker:
    """Packs samples into records.

    Args:
        record_format: their format.
        encoder: a function from a sample to one with values that the format supports; otherwise values are written as
            they are.
        keep_meta: also write the values of keys that begin with ``__``.
    """

    def __init__(self, record_format: RecordFormat, encoder: Encoder, *, keep_meta: bool) -> None:
        if isinstance(encoder, Mapping):
            raise ValueError(
                f"encoder must be a function of a sample for {record_format.title}, whose values keep their types, not "
                f"{encoder!r}"
            )
        self._format = record_format
        self._convert = encoder if callable(encoder) else None
        self._keep_meta = keep_meta
        self._encode = ENCODERS[record_format.name]

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample.

        Raises:
            EncodeError: a value cannot be encoded, or the sample would be read back differently.
            MissingDependencyError: the format needs a package that is not installed.
        """
        given = sample if self._convert is None else self._convert(sample)
        try:
            key = given["__key__"]
        except (TypeError, KeyError):
            raise EncodeError(
                f"A sample must be a dict with __key__ and its fields, not {describe_value(given)}"
            ) from None
        if not isinstance(key, str) or not key:
            raise EncodeError(
                f"__key__ must be a str that is not empty, but {key!r} is {describe_value(key)}. Use, for example, "
                "f'{number:06d}'"
            )
        if not self._keep_meta:
            refuse_padding(key, sample)
        record = {name: value for name, value in given.items() if self._is_written(name)}
        try:
            data = self._encode(record)
        except MissingDependencyError:
            raise
        except Exception as error:
            raise self._field_error(record) or EncodeError(
                f"The sample {key!r} cannot be written: {type(error).__name__}: {error}"
            ) from error
        return PackedSample(key, [data], len(data), len(data), [])

    def _is_written(self, field: object) -> bool:
        if not isinstance(field, str):
            raise EncodeError(f"Field names must be str, but {field!r} is {describe_value(field)}")
        return field[:2] != "__" or field == "__key__" or self._keep_meta

    def _field_error(self, record: Sample) -> EncodeError | None:
        """Return the error for the first field whose value alone cannot be encoded."""
        for field, value in record.items():
            try:
                self._encode({field: value})
            except Exception as error:  # noqa: BLE001, PERF203  as above; for the first only
                advice = "Convert it first, with .map(), or with encoder= a function of a sample"
                if self._format.name == "jsonl" and isinstance(value, bytes | bytearray | memoryview):
                    advice = "JSON has no bytes: write msgpack or CBOR records, or encode them as text, as with base64"
                return EncodeError(
                    f"Field {field!r} of sample {record['__key__']!r} is {describe_value(value)}, which "
                    f"{self._format.title} cannot hold: {type(error).__name__}: {error}. {advice}"
                )
        return None
