"""Packing samples into blocks of a tar archive: encodes and checks fields, and makes their headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from wds_datapipes.codecs.codec import describe_value
from wds_datapipes.codecs.encoding import EncoderChain, FieldEncoder
from wds_datapipes.errors import EncodeError, UnwritableSampleError
from wds_datapipes.samples.keys import KeyRule, first_dot, is_meta
from wds_datapipes.tar.header_writer import NAME_BYTES, PADDING, TOO_LARGE, HeaderWriter
from wds_datapipes.tar.headers import BLOCK
from wds_datapipes.types import Sample

__all__ = ["Encoder", "PackedSample", "SamplePacker"]

Encoder: TypeAlias = "bool | Mapping[str, FieldEncoder] | Callable[[Sample], Sample] | None"
"""``True``: as ``wds_encode`` does; a mapping: with these keywords; a function from a sample to one of bytes; ``False``
or ``None``: all values are bytes already."""

#: How many names of fields are remembered as fit to be written.
MAX_FIELDS = 4096


class PackedSample(NamedTuple):
    """A sample as blocks of the archive: checked, and not written yet."""

    key: str
    #: Headers, data and what fills up the last block, in turn.
    parts: list[bytes]
    #: Of all these, in bytes.
    size: int
    #: The bytes of all data.
    payload: int
    #: The field, the offset of its data from the begin of the sample, and their size.
    fields: list[tuple[str, int, int]]


class SamplePacker:
    """Makes tar blocks of samples; they do not depend on their offset in an archive.

    Args:
        headers: what makes the headers.
        encoder: what makes bytes of values.
        unsafe: allow codecs whose data can run code when it is decoded.
        keep_meta: whether values of keys that begin with ``__`` are files too, but for ``__key__``.
        key_rule: what names have to be read back by; with ``None``, they are not checked.
    """

    def __init__(
        self, headers: HeaderWriter, encoder: Encoder, *, unsafe: bool, keep_meta: bool, key_rule: KeyRule | None
    ) -> None:
        if key_rule is not None and not callable(key_rule):
            raise TypeError(f"key_rule is first_dot, last_dot or another function of a name, or None, not {key_rule!r}")
        self._headers = headers
        self._chain: EncoderChain | None = None
        self._encode: Callable[[Sample], Sample] | None = None
        if encoder is True or isinstance(encoder, Mapping):
            self._chain = EncoderChain({} if encoder is True else encoder, unsafe=unsafe)
        elif callable(encoder):
            self._encode = encoder
        elif encoder:
            raise TypeError(f"encoder is True, False, a dict of encoders by extension or a function, not {encoder!r}")
        self._keep_meta = keep_meta
        self._rule = key_rule
        #: Fields that were checked -> how names end whose bytes are written as they are.
        self._suffixes: dict[str, bytes] = {}

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample, and make its headers.

        Raises:
            EncodeError: a value cannot be encoded.
            UnwritableSampleError: the sample would be read back as another.
            UnsafeCodecError: a field needs ``unsafe``.
            MissingDependencyError: a field needs a package that is not installed.
        """
        encoded = sample if self._encode is None else self._encode(sample)
        try:
            key = encoded["__key__"]
        except (TypeError, KeyError):
            raise UnwritableSampleError(
                f"A sample to be written is a dict with __key__ and its fields, and this is {describe_value(sample)}"
                f"{' with ' + ' '.join(map(str, encoded)) if hasattr(encoded, 'keys') else ''}"
            ) from None
        if not isinstance(key, str):
            raise UnwritableSampleError(
                f"__key__ is a str, and {key!r} is {describe_value(key)}. Make it one: f'{{number:06d}}'"
            )
        if self._rule is not None:
            self._check_key(key, self._rule)
            if key[:2] == "__":
                self._check_marks(key, encoded)
        raw_key = key.encode("ascii") if key.isascii() else b""
        parts: list[bytes] = []
        fields: list[tuple[str, int, int]] = []
        at = payload = 0
        for field, value in encoded.items():
            suffix = self._suffixes.get(field)
            if suffix is None:
                suffix = self._suffix(key, field)
            if type(value) is bytes and suffix:
                data = value
            elif field[:2] == "__" and not (self._keep_meta and field != "__key__"):
                continue
            else:
                data = self._data(encoded, field)
            size = len(data)
            if raw_key and suffix and len(raw_key) + len(suffix) <= NAME_BYTES and size < TOO_LARGE:
                # In parts, which are put together once, with those of many samples.
                parts += self._headers.plain(raw_key + suffix, size)
                at += BLOCK
            else:
                try:
                    header = self._headers.header(f"{key}.{field}", size)
                except UnicodeEncodeError as error:
                    raise UnwritableSampleError(f"The name {f'{key}.{field}'!r} cannot be written: {error}") from error
                parts.append(header)
                at += len(header)
            fields.append((field, at, size))
            at += size
            parts.append(data)
            if size % BLOCK:
                parts.append(PADDING[size % BLOCK])
                at += -size % BLOCK
            payload += size
        if not parts:
            raise UnwritableSampleError(f"The sample {key!r} has no field to write, and could not be read back")
        return PackedSample(key, parts, at, payload, fields)

    def _suffix(self, key: str, field: str) -> bytes:
        """Check a field, and return the suffix of its names; nothing if its bytes cannot be written as they are."""
        if not isinstance(field, str):
            raise UnwritableSampleError(f"The names of fields are str, and {field!r} is {describe_value(field)}")
        if self._rule is not None and (field[:2] != "__" or self._keep_meta):
            self._check_field(key, field, self._rule)
        is_plain = field[:2] != "__" and field.isascii() and not (self._chain and f".{field}".endswith(".gz"))
        if len(self._suffixes) > MAX_FIELDS:
            self._suffixes.clear()
        suffix = self._suffixes[field] = f".{field}".encode("ascii") if is_plain else b""
        return suffix

    def _data(self, sample: Sample, field: str) -> bytes:
        """Encode a value that is not bytes, or whose field is compressed."""
        value = sample[field]
        if field[:2] == "__" and isinstance(value, str):
            return value.encode("utf-8")
        if self._chain is not None and field[:2] != "__":
            return bytes(self._chain.encode_field(sample, field))
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise EncodeError(
            f"field {field!r} of sample {sample['__key__']!r} holds {describe_value(value)}, and not bytes. Encode it "
            f"first, as wds_encode or encoder=True does"
        )

    def _check_key(self, key: str, rule: KeyRule) -> None:
        """Raise for a key that could not be read back."""
        if rule is first_dot and key.isalnum():  # as most are
            return
        name = f"{key}.x"
        found = None if is_meta(name) else rule(name)
        if found == (key, "x") and "\0" not in key:
            return
        read = "belong to no sample" if found is None else f"be read back as of {found[0]!r}"
        why = "a key ends at the first dot after its last slash" if rule is first_dot else "as key_rule says"
        raise UnwritableSampleError(
            f"The key {key!r} cannot be written: its files would {read} ({why}). Choose another key; or pass "
            f"key_rule=last_dot, and read the shard with it; or key_rule=None, which checks nothing"
        )

    def _check_marks(self, key: str, fields: Iterable[object]) -> None:
        """Raise for fields whose names would be those of meta members."""
        for field in map(str, fields):
            if (field[:2] != "__" or (self._keep_meta and field != "__key__")) and is_meta(f"{key}.{field}"):
                raise UnwritableSampleError(
                    f"The field {field!r} of sample {key!r} cannot be written: the name {f'{key}.{field}'!r} begins "
                    f"and ends with two underscores, and files that do are in no sample. Choose another key"
                )

    def _check_field(self, key: str, field: str, rule: KeyRule) -> None:
        """Raise for a field that could not be read back."""
        found = rule(f"k.{field}")
        if not field or found != ("k", field) or "\0" in field or field != field.lower():
            read = "nothing" if not field or found is None else f"{found[1].lower()!r} of {found[0]!r}"
            raise UnwritableSampleError(
                f"The field {field!r} of sample {key!r} cannot be written: it would be read back as {read}. Names of "
                f"fields are lower case, and have no slash"
            )
