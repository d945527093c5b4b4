"""Record reader: reads a stream of concatenated records one by one, with the offset of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from wds_datapipes.errors import (
    CorruptShardError,
    DecodeError,
    MissingFieldError,
    ReadLimitError,
    ShardError,
    TruncatedShardError,
)
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import ReadLimits, limit_error
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.records.formats import BLANK, BadRecord, RecordFormat
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.types import MemberTuple, Shard

#: How much is read at once, in bytes; doubled until the largest record fits.
FILL_BYTES = 256 << 10
#: The values that records of a binary format may have. Bytes of other formats decode to others, such as small integers.
FRAMED = (dict, list, tuple, BadRecord)
#: The field that has the key by default; a record without it has its offset as its key.
KEY = "__key__"


def read_records(
    stream: BinaryIO,
    *,
    shard: Shard,
    record_format: RecordFormat,
    key: str = KEY,
    fields: Sequence[str] | None = None,
    start: int = 0,
    limits: ReadLimits,
    policy: ErrorPolicy,
) -> Iterator[MemberTuple]:
    """Yield the records of a shard as ``(shard, key, record, offset)``, and read the stream to its end.

    Args:
        stream: an uncompressed shard, or a part of one; it is not closed.
        shard: the shard.
        record_format: its format.
        key: the field whose value is the key.
        fields: the names of the values of records that are lists.
        start: the offset of the stream in the shard, in bytes.
        limits: the limits on the size of a record.
        policy: handles errors of a single record; all others are raised.

    Raises:
        TruncatedShardError: the shard ends inside a record, or is empty.
        CorruptShardError: a record is damaged, so that its end is unknown.
        ReadLimitError: a record is too large, or nests its values too deeply.
    """
    archive = redact(shard.url)
    buffer = ReadBuffer(stream, archive, start)
    most = limits.most("member_bytes")
    size, number = FILL_BYTES, -1
    while True:
        error = buffer.fill_until_error(size)
        window, begin, at = buffer.window, buffer.offset, 0
        is_end = error is None and len(window) < size
        for end, value in record_format.split(window, is_end):
            if value is BLANK:
                at = end
                continue
            number += 1
            policy.tried += 1
            offset = begin + at
            if end - at > most:
                found = f"{_place(archive, number, offset, start)} has {end - at} bytes"
                raise limit_error(limits, "member_bytes", found)
            if end < 0 or (record_format.is_binary and not isinstance(value, FRAMED)):
                raise _fatal_error(value, record_format.title, _place(archive, number, offset, start))
            at = end
            shard.has_begun = True
            try:
                record: Any = _as_fields(value, fields)  # where members have bytes
                name = _key_of(record, key, offset)
            except (DecodeError, MissingFieldError) as fault:
                located = type(fault)(f"{_place(archive, number, offset, start)} {fault}")
                if not policy.handle(located, url=shard.url):
                    return
            else:
                yield shard, name, record, offset
        buffer.at = at
        if error is not None:
            try:
                raise error  # after the records that were read completely
            finally:
                del error  # avoid a reference cycle: its frames would keep their files open
        if is_end:
            if begin == len(window) == 0:
                raise TruncatedShardError(
                    f"{archive} is empty, and a shard has at least one record. Write or fetch the file again, or leave "
                    "it out"
                )
            if at < len(window):
                raise TruncatedShardError(
                    f"{_place(archive, number + 1, begin + at, start)} is incomplete: the shard ends after "
                    f"{len(window) - at} bytes of it. Write or fetch the file again"
                )
            return
        if at == 0:
            if len(window) > most:
                found = f"{_place(archive, number + 1, begin, start)} has {len(window)} bytes or more"
                raise limit_error(limits, "member_bytes", found)
            size = max(min(2 * size, most + 1), size + 1)


def _as_fields(value: Any, fields: Sequence[str] | None) -> dict[str, Any]:
    """Return a record as a dictionary of its fields.

    Raises:
        DecodeError: it is none; the message lacks the location.
    """
    if type(value) is dict and {str}.issuperset(map(type, value)):
        return value
    if isinstance(value, BadRecord):
        raise DecodeError(f"cannot be decoded: {value.reason}. Write it again, or pass on_error to skip it")
    if isinstance(value, list | tuple):
        if fields is None:
            raise DecodeError(
                f"is a list of {len(value)} values, not a map of fields. Pass fields= with a name for each value"
            )
        if len(fields) != len(value):
            raise DecodeError(f"is a list of {len(value)} values, but fields= has {len(fields)} names")
        return dict(zip(fields, value, strict=True))
    if type(value) is not dict:
        raise DecodeError(f"is of type {type(value).__name__}, not a map of fields")
    name = next(name for name in value if type(name) is not str)
    raise DecodeError(f"has the field {name!r} of type {type(name).__name__}, and the names of fields must be text")


def _key_of(record: Mapping[str, Any], key: str, offset: int) -> str:
    """Return the key of a record.

    Raises:
        MissingFieldError: it has no field ``key``.
        DecodeError: the key is neither text nor an integer.
    """
    found = record.get(key)
    if type(found) is str and found:
        return found
    if type(found) is int:
        return str(found)
    if key in record:
        raise DecodeError(f"has the key {found!r:.60} in the field {key!r}, and a key must be a text or an integer")
    if key != KEY:
        raise MissingFieldError(
            f"has no field {key!r} for its key, but only {', '.join(map(repr, record)) or 'nothing'}. Pass key= with "
            "the name of another field, or leave it out to have byte offsets as keys"
        )
    return f"{offset:012d}"


def _fatal_error(value: Any, title: str, place: str) -> ShardError:
    """Return the error for a record after which the shard cannot be read on."""
    if isinstance(value, BadRecord) and value.is_nested:
        return ReadLimitError(
            f"{place} nests its values too deeply to be decoded. If the shard is valid, write it with flat records"
        )
    if isinstance(value, BadRecord):
        found = f"cannot be decoded: {value.reason}"
    else:
        found = f"is the value {value!r:.40}, not a map or a list"
    return CorruptShardError(
        f"{place} {found}. The file is damaged or does not hold {title}: write or fetch it again, or pass the "
        "right format="
    )


def _place(archive: str, number: int, offset: int, start: int) -> str:
    """Return the location of a record, with its number if the shard was read from its beginning."""
    return f"{archive}: record {number} (byte {offset})" if start == 0 else f"{archive}: the record at byte {offset}"
