"""Pack samples: encode and check them, and build their tar members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from wds_datapipes.codecs import describe_value
from wds_datapipes.codecs.encoding import EncoderChain, FieldEncoder
from wds_datapipes.errors import EncodeError
from wds_datapipes.hints import WRITE_LAST_DOT, WRITE_NO_RULE, WRITE_PICKLE
from wds_datapipes.io.read_limits import DEFAULT_LIMITS
from wds_datapipes.samples.fields import PADDING_MARK
from wds_datapipes.samples.keys import META_STARTS, KeyRule, check_key_rule, first_dot, is_meta, last_dot
from wds_datapipes.tar.header_writer import NAME_BYTES, PADDING, TOO_LARGE, HeaderWriter
from wds_datapipes.tar.headers import BLOCK
from wds_datapipes.types import Sample

Encoder: TypeAlias = "bool | Mapping[str, FieldEncoder] | Callable[[Sample], Sample] | None"
"""``True`` to encode as ``wds_encode`` does; a mapping to pass it keyword arguments; a function from a sample to one
with bytes; ``False`` or ``None`` if all values are bytes."""

#: The advice for keys with dots that shall stay as they are.
KEEP_DOTS = (WRITE_LAST_DOT, ", and read the shards with it")
#: The maximum number of checked field names to cache.
MAX_FIELDS = 4096


def refuse_padding(key: str, sample: object) -> None:
    """Reject a sample that only pads a batch, because it would be indistinguishable from data once written.

    Raises:
        EncodeError: the sample is padding.
    """
    if isinstance(sample, Mapping) and sample.get(PADDING_MARK):
        raise EncodeError(
            f"The sample {key!r} only pads a batch, as its field {PADDING_MARK!r} says, and would be written "
            f'twice. Read the samples with IndexedSamples(remainder="keep")'
        )


def key_of(sample: Sample) -> str:
    """Return the key of a sample.

    Raises:
        EncodeError: the sample has no key, or is not a sample.
    """
    try:
        key = sample["__key__"]
    except (TypeError, LookupError):
        fields = f" with {' '.join(map(str, sample))}" if hasattr(sample, "keys") else ""
        advice = "Add a key, as in {'__key__': f'{number:06d}', **sample}"
        if not fields:
            advice = "Write samples as .group_samples() yields them, before stages such as .to_tuple() and .batch()"
        raise EncodeError(
            f"A sample must be a dict with __key__ and its fields, not {describe_value(sample)}{fields}. {advice}"
        ) from None
    if not isinstance(key, str):
        raise EncodeError(
            f"__key__ must be a str, but {key!r} is {describe_value(key)}. Use, for example, f'{{number:06d}}'"
        )
    return key


class PackedSample(NamedTuple):
    """A sample as tar blocks, checked but not yet written."""

    key: str
    #: For each field: the header, the data and the padding.
    parts: list[bytes]
    #: The total size of the parts, in bytes.
    size: int
    #: The total size of the data, in bytes.
    payload: int
    #: For each field: its name, the offset of its data from the start of the sample, and the size of its data.
    fields: list[tuple[str, int, int]]


class TarSamplePacker:
    """Packs samples into tar blocks, which do not depend on their offset in an archive.

    Args:
        headers: writes the headers.
        encoder: encodes values to bytes.
        allow_pickle: allow codecs whose data can run code when it is decoded.
        keep_meta: also write the values of keys that begin with ``__``, except ``__key__``.
        key_rule: the rule with which names are read back; ``None`` disables the checks.
    """

    def __init__(
        self, headers: HeaderWriter, encoder: Encoder, *, allow_pickle: bool, keep_meta: bool, key_rule: KeyRule | None
    ) -> None:
        if key_rule is not None:
            check_key_rule(key_rule)
        self._headers = headers
        self._chain: EncoderChain | None = None
        self._encode: Callable[[Sample], Sample] | None = None
        if encoder is True or isinstance(encoder, Mapping):
            self._chain = EncoderChain({} if encoder is True else encoder, allow_pickle=allow_pickle, hint=WRITE_PICKLE)
        elif callable(encoder):
            self._encode = encoder
        elif encoder:
            raise TypeError(f"encoder must be a bool, a dict of encoders by extension, or a function, not {encoder!r}")
        self._keep_meta = keep_meta
        self._rule = key_rule
        #: Maps checked fields to the suffix of their member names, or to b"" if their bytes need processing.
        self._suffixes: dict[str, bytes] = {}

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample and build its headers.

        Raises:
            EncodeError: a value cannot be encoded, or the sample would be read back differently.
            UnsafeInputError: a field needs ``allow_pickle``.
            MissingDependencyError: a field needs a package that is not installed.
        """
        encoded = sample if self._encode is None else self._encode(sample)
        key = key_of(encoded)
        if self._rule is not None:
            self._check_key(key, self._rule)
            if key[:2] in META_STARTS:
                self._check_marks(key, encoded)
        if not self._keep_meta:
            refuse_padding(key, sample)
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
                # The parts of many samples are joined at once.
                parts += self._headers.plain(raw_key + suffix, size)
                at += BLOCK
            else:
                if self._rule is not None:
                    _check_limits(f"{key}.{field}", size)
                try:
                    header = self._headers.header(f"{key}.{field}", size)
                except UnicodeEncodeError as error:
                    raise EncodeError(f"The name {f'{key}.{field}'!r} cannot be written: {error}") from error
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
            raise EncodeError(f"The sample {key!r} has no field to write")
        return PackedSample(key, parts, at, payload, fields)

    def _suffix(self, key: str, field: str) -> bytes:
        """Check a field; return the suffix of its member names, or b"" if its bytes need processing."""
        if not isinstance(field, str):
            raise EncodeError(f"Field names must be str, but {field!r} is {describe_value(field)}")
        if self._rule is not None and (field[:2] != "__" or self._keep_meta):
            self._check_field(key, field, self._rule)
        is_plain = field[:2] != "__" and field.isascii() and not (self._chain and f".{field}".endswith(".gz"))
        if len(self._suffixes) > MAX_FIELDS:
            self._suffixes.clear()
        suffix = self._suffixes[field] = f".{field}".encode("ascii") if is_plain else b""
        return suffix

    def _data(self, sample: Sample, field: str) -> bytes:
        """Encode a value that is not bytes or belongs to a compressed field."""
        value = sample[field]
        if field[:2] == "__" and isinstance(value, str):
            return value.encode("utf-8")
        if self._chain is not None and field[:2] != "__":
            return bytes(self._chain.convert_field(sample, field))
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise EncodeError(
            f"Field {field!r} of sample {sample['__key__']!r} is {describe_value(value)}, not bytes. Encode it first, "
            f"for example with wds_encode or WriteOptions(encoder=True)"
        )

    def _check_key(self, key: str, rule: KeyRule) -> None:
        """Raise an error if a key would be read back differently."""
        if fault := fault_of_key(key, rule):
            raise EncodeError(
                f"{fault}. Choose another key",
                *((f", such as {without_dots(key)!r}; to keep it, ", *KEEP_DOTS) if has_dots(key, rule) else ()),
                "; to skip the check, ",
                WRITE_NO_RULE,
            )

    def _check_marks(self, key: str, fields: Iterable[object]) -> None:
        """Raise an error for fields whose member names would be those of metadata."""
        for field in map(str, fields):
            if (field[:2] != "__" or (self._keep_meta and field != "__key__")) and is_meta(f"{key}.{field}"):
                raise EncodeError(
                    f"The field {field!r} of sample {key!r} cannot be written: the name {f'{key}.{field}'!r} begins "
                    f"and ends with two underscores, so the file would belong to no sample. Choose another key"
                )

    def _check_field(self, key: str, field: str, rule: KeyRule) -> None:
        """Raise an error if a field would be read back differently."""
        found = rule(f"k.{field}")
        if not field or found != ("k", field) or "\0" in field or field != field.lower():
            read = "nothing" if not field or found is None else f"{found[1].lower()!r} of {found[0]!r}"
            raise EncodeError(
                f"The field {field!r} of sample {key!r} cannot be written: it would be read back as {read}. Field "
                f"names are lower case and have no slash"
            )


def fault_of_key(key: str, rule: KeyRule) -> str:
    """Return why a key cannot be written, which is that it would be read back differently; "" if it can.

    >>> fault_of_key("a", first_dot), fault_of_key("a.b", last_dot)
    ('', '')
    """
    if rule is first_dot and key.isalnum():  # the usual case
        return ""
    name = f"{key}.x"
    found = None if is_meta(name) else rule(name)
    if found == (key, "x") and "\0" not in key:
        return ""
    read = "belong to no sample" if found is None else f"belong to the key {found[0]!r}"
    why = "a key ends at the first dot after its last slash" if rule is first_dot else "by key_rule"
    return f"The key {key!r} cannot be written: its files would {read} ({why})"


def has_dots(key: str, rule: KeyRule) -> bool:
    """Whether only its dots keep a key from being written, so that `last_dot` permits it."""
    return rule is first_dot and not fault_of_key(key, last_dot)


def without_dots(key: str) -> str:
    """Return a key like another one, but with no dot after its last slash.

    >>> without_dots("v1.0/scan-1.25mm")
    'v1.0/scan-1-25mm'
    """
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '-')}"


def _check_limits(name: str, size: int) -> None:
    """Raise an error if a member would be beyond the limits that readers have by default."""
    length = len(name.encode("utf-8", "surrogatepass"))
    for limit, found, what in (("name_bytes", length, "its name"), ("member_bytes", size, "its data")):
        most = getattr(DEFAULT_LIMITS, limit)
        if found > most:
            raise EncodeError(
                f"The file {name[:100]!r} cannot be written: {what} has {found:,} bytes, and readers accept at most "
                f"{most:,}. Write less; or, to skip the check, ",
                WRITE_NO_RULE,
                f", and read with limits=ReadLimits({limit}={found})",
            )
