"""Formats of record shards: their names, and how each splits bytes into records."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from wds_datapipes.errors import SpecError
from wds_datapipes.extras import require
from wds_datapipes.io.compression.formats import COMPRESSIONS
from wds_datapipes.io.openers import redact
from wds_datapipes.io.urls import without_query

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
    """Split JSON lines in UTF-8. The last line needs no line break if its value is complete."""
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
            if not is_whole:
                return  # it may be truncated
            value = error
        yield end, value
        at = end


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
