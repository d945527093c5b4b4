"""Read record shards, by their formats: yield the records one by one, with their offsets."""

from __future__ import annotations

import io
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, TypeAlias

from wds_datapipes.errors import (
    CorruptShardError,
    DecodeError,
    MissingFieldError,
    ReadLimitError,
    ShardError,
    SpecError,
    TruncatedShardError,
    plural,
)
from wds_datapipes.extras import require
from wds_datapipes.io.compression.formats import COMPRESSIONS
from wds_datapipes.io.magic_numbers import BEGINNING, describe_kind
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import limit_error
from wds_datapipes.io.urls import without_query
from wds_datapipes.on_error.policy import ErrorPolicy
from wds_datapipes.shards.loading import StreamOptions
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.types import MemberTuple, Shard

#: The number of bytes to read at once; doubled until the largest record fits.
FILL_BYTES = 256 << 10
#: The default field for the key. The key of a record without this field is its offset.
KEY = "__key__"


@dataclass(frozen=True)
class RecordOptions(StreamOptions):
    """Options for reading record shards; `RecordLoader` describes each option.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an invalid value.
    """

    stage: ClassVar[str] = "load_wds_records"
    counts_shards: ClassVar[bool] = False

    format: FormatName | None = None
    key: str = KEY
    fields: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.format
        if given is not None and not (isinstance(given, str) and given in FORMATS):
            raise ValueError(f"format must be None or one of {', '.join(map(repr, FORMATS))}, not {self.format!r}")
        if not isinstance(self.key, str):
            raise TypeError(f"key must be the name of a field, not {self.key!r}")
        if self.fields is not None:
            if not all(isinstance(name, str) for name in self.fields):
                raise TypeError(f"fields must be names of fields, not {self.fields!r}")
            if len({*self.fields}) < len(self.fields):
                raise ValueError(f"fields must be different names, not {self.fields!r}")

    def items(self, stream: BinaryIO, shard: Shard, start: int, policy: ErrorPolicy) -> Iterator[MemberTuple]:
        """Yield the records of a shard, as tuples of the shard, a key, a dictionary of fields and an offset.

        Raises:
            TruncatedShardError: the shard ends inside a record, or is empty.
            CorruptShardError: a record is damaged, so that its end is unknown.
            ReadLimitError: a record is too large, or nests its values too deeply.
        """
        record_format, archive = find_format(shard.url, self.format), redact(shard.url)
        buffer = ReadBuffer(stream, archive, start)
        most = self.limits.most("member_bytes")
        size, number = FILL_BYTES, -1

        def place(number: int, offset: int) -> str:
            """Return the location of a record, with its number if the shard was read from the beginning."""
            return f"{archive}: the record at byte {offset}" if start else f"{archive}: record {number} (byte {offset})"

        while True:
            error = buffer.fill_until_error(size)
            window, begin, at = buffer.window, buffer.offset, 0
            is_end = error is None and len(window) < size
            for end, value in _split(record_format, window, is_end):
                if value is BLANK:
                    at = end
                    continue
                number += 1
                policy.tried += 1
                offset = begin + at
                if end - at > most:
                    raise limit_error(self.limits, "member_bytes", f"{place(number, offset)} has {end - at} bytes")
                if end < 0:
                    kind = "" if offset else describe_kind(window[:BEGINNING])
                    raise _fatal_error(value, record_format.title, place(number, offset), kind)
                at = end
                shard.has_begun = True
                try:
                    record: Any = self._as_fields(value)  # instead of the bytes of members
                    name = self._key_of(record, offset)
                except (DecodeError, MissingFieldError) as fault:
                    kind = "" if offset else describe_kind(window[:BEGINNING], may_be_text=True)
                    if kind:
                        raise CorruptShardError(
                            f"{archive} does not hold {record_format.title}. {kind}. Write or fetch the file again"
                        ) from None
                    if not policy.handle(type(fault)(f"{place(number, offset)} {fault}"), url=shard.url):
                        return
                else:
                    yield shard, name, record, offset
            buffer.at = at
            if error is not None:
                try:
                    raise error  # after the complete records
                finally:
                    del error  # avoid a reference cycle, which would keep files of its frames open
            if is_end and buffer.left:
                kind = "" if buffer.offset else describe_kind(window[:BEGINNING], may_be_text=True)
                raise TruncatedShardError(
                    f"{place(number + 1, buffer.offset)} is incomplete: the shard ends after {buffer.left} bytes of "
                    f"it. {f'{kind}. ' if kind else ''}Write or fetch the file again"
                )
            if is_end and buffer.offset == 0:
                raise TruncatedShardError(
                    f"{archive} is empty, but a shard has at least one record. Write or fetch the file again, or "
                    "remove it from the list"
                )
            if is_end:
                return
            if at == 0:
                if len(window) > most:
                    found = f"{place(number + 1, begin)} has {len(window)} bytes or more"
                    raise limit_error(self.limits, "member_bytes", found)
                size = max(min(2 * size, most + 1), size + 1)

    def _as_fields(self, value: Any) -> dict[str, Any]:
        """Return a record as a dictionary of its fields.

        Raises:
            DecodeError: the value is not a record; the message lacks the location.
        """
        if type(value) is dict and {str}.issuperset(map(type, value)):
            return value
        if isinstance(value, Exception):
            raise DecodeError(f"cannot be decoded: {value}. Write it again, or pass on_error to skip it")
        if isinstance(value, list | tuple):
            names = self.fields or ()
            if len(names) != len(value):
                raise DecodeError(
                    f"is a list of {plural(len(value), 'value')}, but fields= has {plural(len(names), 'name')}. Pass "
                    "fields= with a name for each value"
                )
            return dict(zip(names, value, strict=True))
        if type(value) is not dict:
            raise DecodeError(f"is of type {type(value).__name__}, not a map of fields")
        name = next(name for name in value if type(name) is not str)
        raise DecodeError(f"has the field {name!r} of type {type(name).__name__}, but the names of fields must be text")

    def _key_of(self, record: dict[str, Any], offset: int) -> str:
        """Return the key of a record.

        Raises:
            MissingFieldError: the record has no field ``key``.
            DecodeError: the key is neither text nor an integer.
        """
        found = record.get(self.key)
        if type(found) is str and found:
            return found
        if type(found) is int:
            return str(found)
        if self.key in record:
            raise DecodeError(
                f"has the key {found!r:.60} in the field {self.key!r}, but a key must be a string or an integer"
            )
        if self.key != KEY:
            raise MissingFieldError(
                f"has no field {self.key!r} for its key, but only {', '.join(map(repr, record)) or 'nothing'}. Pass "
                "key= with the name of another field, or omit it to use byte offsets as keys"
            )
        return f"{offset:012d}"


def _split(record_format: RecordFormat, window: bytes, is_end: bool) -> Iterator[tuple[int, Any]]:
    """Split a window into records; an error whose end is unknown has the end -1."""
    try:
        yield from record_format.split(window, is_end)
    except (ValueError, RecursionError) as error:
        yield -1, error


def _fatal_error(error: Exception, title: str, place: str, kind: str = "") -> ShardError:
    """Return the error for a record after which reading the shard cannot continue; ``kind`` says what the file is."""
    if isinstance(error, RecursionError):
        return ReadLimitError(
            f"{place} nests its values too deeply to be decoded. If the shard is valid, write it with flat records"
        )
    return CorruptShardError(
        f"{place} cannot be decoded: {str(error) or type(error).__name__}. {f'{kind}. ' if kind else ''}The file is "
        f"damaged or does not hold {title}: write or fetch it again, or pass the right format="
    )


FormatName: TypeAlias = Literal["jsonl", "msgpack", "cbor"]

#: The value of bytes between records, such as an empty line.
BLANK = object()
#: The largest length in msgpack. No other limit is needed to find the end of a record, because this creates no objects.
MSGPACK_LENGTH = 2**32 - 1
#: The extensions of compressed files.
COMPRESSED = tuple(f".{each.suffix}" for each in COMPRESSIONS)


class RecordFormat(NamedTuple):
    """A format of records.

    Attributes:
        name: its name as an argument.
        title: its name in messages.
        extensions: the extensions of its files, without compression.
        split: yields the end and the value of each complete record in a window of bytes that starts with a record. If
            there is no value, it yields `BLANK` or an error instead. It raises ValueError or RecursionError if the end
            of a bad record is unknown. Its second argument says whether the shard ends with the window.
    """

    name: FormatName
    title: str
    extensions: tuple[str, ...]
    split: Callable[[bytes, bool], Iterator[tuple[int, Any]]]


def split_json_lines(window: bytes, is_end: bool) -> Iterator[tuple[int, Any]]:
    """Split JSON lines in UTF-8. The last line needs no line break if its value is complete.

    A line may begin with a byte order mark, which editors write; joined files have several of them.
    """
    at = 0
    while at < len(window):
        end = window.find(b"\n", at) + 1 or len(window)
        is_whole = window[end - 1] == 0x0A
        if not is_whole and not is_end:
            return
        line = window[at:end]
        try:
            value = json.loads(str(line, "utf-8")) if not line.isspace() else BLANK
        except ValueError as error:
            value = _parse_marked(line, error)
            if value is error and not is_whole:
                return  # it may be truncated
        yield end, value
        at = end


def _parse_marked(line: bytes, error: ValueError) -> Any:
    """Return the value of a line that begins with a byte order mark, or the error of any other line."""
    if not line.startswith(BOM_UTF8):
        return error
    try:
        return json.loads(str(line, "utf-8-sig")) if line[len(BOM_UTF8) :].strip() else BLANK
    except ValueError:
        return error


def split_msgpack(window: bytes, is_end: bool) -> Iterator[tuple[int, Any]]:  # noqa: ARG001  a record has its own end
    """Split concatenated msgpack values. Each value is decoded only once it is complete, so no length is trusted."""
    msgpack = require("msgpack", extra="msgpack", purpose="read msgpack records")
    lengths = {f"max_{kind}_len": MSGPACK_LENGTH for kind in ("str", "bin", "array", "map", "ext")}
    ends = msgpack.Unpacker(max_buffer_size=len(window), **lengths)
    ends.feed(window)
    at = 0
    while True:
        try:
            ends.skip()
        except msgpack.OutOfData:
            return
        except msgpack.StackError as error:
            raise RecursionError from error
        end = ends.tell()
        try:
            value = msgpack.unpackb(window[at:end], strict_map_key=False)
        except (ValueError, TypeError) as error:  # text that is not UTF-8, or a key that cannot be hashed
            value = error
        yield end, _check_record(value)
        at = end


def split_cbor(window: bytes, is_end: bool) -> Iterator[tuple[int, Any]]:  # noqa: ARG001  a record has its own end
    """Split concatenated CBOR values (RFC 8742)."""
    cbor2 = require("cbor2", extra="cbor", purpose="read CBOR records")
    stream = io.BytesIO(window)
    decoder = cbor2.CBORDecoder(stream, read_size=1)  # leaves the stream at the end of a value
    while stream.tell() < len(window):
        try:
            value = decoder.decode()
        except cbor2.CBORDecodeEOF:
            return
        except Exception as error:  # for damaged data, it depends on the release of cbor2
            is_nested = isinstance(error, RecursionError) or "nesting depth" in str(error)
            raise (RecursionError if is_nested else ValueError)(f"{type(error).__name__}: {error}") from error
        yield stream.tell(), _check_record(value)


def _check_record(value: Any) -> Any:
    """Return a record; raise ValueError for a single value, such as the small integers of bytes in another format."""
    if not isinstance(value, dict | list | tuple | Exception):
        raise ValueError(f"it is the value {value!r:.40}")
    return value


JSON_LINES = RecordFormat("jsonl", "JSON lines", (".jsonl", ".ndjson", ".jsonlines"), split_json_lines)
MSGPACK = RecordFormat("msgpack", "msgpack records", (".msgpack", ".msgpacks", ".mps", ".mp"), split_msgpack)
CBOR = RecordFormat("cbor", "CBOR records", (".cbors", ".cbor"), split_cbor)

FORMATS: dict[str, RecordFormat] = {each.name: each for each in (JSON_LINES, MSGPACK, CBOR)}


def find_format(url: str, name: FormatName | None) -> RecordFormat:
    """Return the record format of a shard: the named one, or the one that its name indicates.

    >>> find_format("https://host/train-000.jsonl.zst?token=a.b", None).name
    'jsonl'

    Raises:
        SpecError: the format is not named, and the name of the shard does not indicate it.
    """
    if name is not None:
        return FORMATS[name]
    file = without_query(url).lower()
    for ending in COMPRESSED:
        file = file.removesuffix(ending)
    found = next((each for each in FORMATS.values() if file.endswith(each.extensions)), None)
    if found is None:
        known = ", ".join(ending for each in FORMATS.values() for ending in each.extensions)
        raise SpecError(
            f"The name of {redact(url)} does not indicate its record format: it ends in none of {known} (or these with "
            f'{", ".join(COMPRESSED)}). Pass format="jsonl", "msgpack" or "cbor"; tar shards are read with '
            "load_wds_shards()"
        )
    return found
