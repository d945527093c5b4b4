"""Record writer: writes samples to the records of one shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from wds_datapipes.codecs import describe_value
from wds_datapipes.codecs.plain_values import encode_cbor, encode_json, encode_msgpack
from wds_datapipes.errors import EncodeError, MissingDependencyError
from wds_datapipes.io.compression.formats import Compress
from wds_datapipes.io.sinks import Sink
from wds_datapipes.records.formats import FORMATS, FormatName, RecordFormat, find_format
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.types import Sample
from wds_datapipes.writing.sample_packer import Encoder, PackedSample, refuse_padding
from wds_datapipes.writing.shard_file import ShardFile, name_of_target

__all__ = ["RecordPacker", "RecordWriter"]


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


class RecordWriter(ShardFile):
    """Writes samples to one record shard, which appears under its name when it is complete.

    It behaves as `TarWriter` does. ``load_wds_records`` reads the samples back as they were, except that tuples become
    lists, and, in JSON lines, the keys of nested maps become text.

    Args:
        target: a path, a URL of a file system that fsspec supports, ``pipe:COMMAND``, ``-`` (standard output) or an
            open binary stream, which stays open.
        format: ``"jsonl"``, ``"msgpack"`` or ``"cbor"``; by default, the name tells, as for ``load_wds_records``.
        compress: as for `TarWriter`.
        encoder: a function from a sample to one with values that the format supports: None, bool, int, float, str,
            lists and dicts of these, and bytes, except in JSON lines. Otherwise values are written as they are.
        keep_meta: also write the values of keys that begin with ``__``; ``__key__`` is always written.
        key_rule: ``None`` allows repeated keys.
        storage_options: passed to the file system of a URL.
        digest: compute the SHA-256 of the shard for ``info``.

    Attributes:
        samples: the number of samples written.
        size: the size of the shard so far, in bytes before compression.
        info: the `ShardInfo` of the finished shard, ``None`` before that.

    Raises:
        SpecError: the name does not tell the format, and ``format`` is not given.
        ShardWriteError: the shard cannot be written, or the command has failed.

    Examples:
        >>> with RecordWriter("a.jsonl") as shard:
        ...     _ = shard.write({"__key__": "000", "text": "a cat", "tokens": [4, 9]})
        >>> [(sample["__key__"], sample["tokens"]) for sample in ShardList("a.jsonl").load_wds_records()]
        [('000', [4, 9])]
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | Sink,
        *,
        format: FormatName | None = None,  # noqa: A002  as for load_wds_records
        compress: Compress = None,
        encoder: Encoder = None,
        keep_meta: bool = False,
        key_rule: KeyRule | None = first_dot,
        storage_options: Mapping[str, Any] | None = None,
        digest: bool = False,
    ) -> None:
        if format is not None and format not in FORMATS:
            raise ValueError(f"format must be None or one of {', '.join(map(repr, FORMATS))}, not {format!r}")
        record_format = find_format(name_of_target(target), format)
        super().__init__(
            target,
            RecordPacker(record_format, encoder, keep_meta=keep_meta),
            b"",
            checks_keys=key_rule is not None,
            compress=compress,
            storage_options=storage_options,
            digest=digest,
        )
