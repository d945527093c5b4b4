"""Index file format: a JSON header, followed by columns that are used in place.

8 bytes   the magic bytes ``WDSINDEX``
4 bytes   the length of the JSON text, little-endian
4 bytes   the CRC-32 of the JSON text, little-endian
JSON      ASCII text, padded with blanks to a multiple of 64 bytes
columns   each begins at a multiple of 64 bytes; zeros fill the gaps
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import Any
from zlib import crc32

import numpy as np

from wds_datapipes.arguments import checks_calls
from wds_datapipes.errors import CorruptSidecarError
from wds_datapipes.index.format.index_columns import COLUMNS
from wds_datapipes.index.format.shard_facts import ShardFacts
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.magic_numbers import BEGINNING, describe_kind
from wds_datapipes.io.openers import redact
from wds_datapipes.io.sidecars import read_sidecar, sidecar_name, write_sidecar

INDEX_SUFFIX = ".wdsidx"
MAGIC = b"WDSINDEX"
HEAD = struct.Struct("<8sII")
#: The alignment of columns, which is the size of a cache line.
ALIGNMENT = 64
#: The maximum size of the JSON text, which usually takes about 1,000 bytes.
MAX_HEADER_BYTES = 64 * 1024
FORMAT = "wds-datapipes shard index"
VERSION = 2
#: The types allowed for user columns.
USER_KIND = re.compile(r"\|b1|<i8|<f8|<U\d{1,3}")


def index_url(url: str, index_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the name of a shard's index: the name of the shard followed by ``.wdsidx``.

    >>> index_url("data/train-000000.tar")
    'data/train-000000.tar.wdsidx'
    """
    return sidecar_name(url, INDEX_SUFFIX, index_dir)


def index_urls(urls: Iterable[str], index_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the names of the indexes of shards.

    Raises:
        ValueError: two shards have the same index, for example because they have the same name and ``index_dir``.
    """
    targets = [index_url(url, index_dir) for url in urls]
    if len(set(targets)) < len(targets):
        target = redact(Counter(targets).most_common(1)[0][0])
        raise ValueError(f"Several shards would have the index {target}. Use separate folders for their indexes")
    return targets


@checks_calls
def write_index(index: ShardIndex, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Write an index to a file atomically, replacing an older one.

    Args:
        index: the index.
        url: the file, a path or a URL; `index_url` returns the standard name for a shard.
        storage_options: passed to a remote file system.

    Raises:
        MissingSidecarError: the file cannot be written.

    Examples:
        >>> from wds_datapipes.index import build_index
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}])
        >>> write_index(build_index(url), index_url(url))
        >>> read_index("a.tar.wdsidx")
        <ShardIndex of 1 sample, 1 member, 10240 bytes>
    """
    write_sidecar(url, index_bytes(index), storage_options)


@checks_calls
def read_index(url: str, *, storage_options: Mapping[str, Any] | None = None) -> ShardIndex:
    """Read an index from a file.

    The file is read as a whole, because the process would die if a mapped file were rewritten in place or its server
    failed. `check_index` checks whether the index still matches its shard.

    Args:
        url: the file, a path or a URL, such as ``"train-000000.tar.wdsidx"``.
        storage_options: passed to a remote file system.

    Raises:
        MissingSidecarError: there is no such file.
        CorruptSidecarError: the file is damaged or not an index.
    """
    return parse_index(read_sidecar(url, storage_options), name=redact(url))


def index_bytes(index: ShardIndex) -> bytes:
    """Serialize an index deterministically."""
    body = bytearray()
    columns = {}
    for name, values in index.columns.items():
        kind = COLUMNS.get(name) or values.dtype.newbyteorder("<").str
        column = np.ascontiguousarray(values, kind)
        columns[name] = [kind, len(body), len(column)]
        body += column.tobytes()
        body += bytes(-len(body) % ALIGNMENT)
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "shard": vars(index.facts),
        "columns": columns,
        "bytes": len(body),
        "crc32": crc32(body),
        "columns_by": index.columns_by,
    }
    text = json.dumps(facts).encode()
    text += b" " * (-(HEAD.size + len(text)) % ALIGNMENT)
    return HEAD.pack(MAGIC, len(text), crc32(text)) + text + body


def parse_index(content: bytes | mmap, *, name: str) -> ShardIndex:
    """Parse an index without copying its columns.

    Raises:
        CorruptSidecarError: the file is damaged or not an index.
    """
    view = memoryview(content)
    if view[:8] != MAGIC:
        kind = describe_kind(view[:BEGINNING].tobytes())
        raise CorruptSidecarError(
            f"{name} is not a shard index: it begins with {view[:8].tobytes()!r}, not {MAGIC!r}. {kind}".rstrip(". ")
        )
    try:
        facts, body = _header(view)
        if len(body) != facts["bytes"] or crc32(body) != facts["crc32"]:
            raise ValueError(
                f"its columns, {len(body)} bytes with the checksum {crc32(body):08x}, do not match its header"
            )
        columns = {each: _column(body, each, span) for each, span in facts["columns"].items()}
        shard = ShardFacts.from_json(facts["shard"])
        columns_by = facts["columns_by"]
        if type(columns_by) not in (str, type(None)):
            raise ValueError(f"its columns_by is {columns_by!r}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSidecarError(f"{name} is damaged: {error}. Delete it and build it again") from error
    return ShardIndex(shard, columns, columns_by=columns_by, name=name)


def _header(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return the parsed JSON header and the bytes after it."""
    if len(view) < HEAD.size:
        raise ValueError(f"it has only {len(view)} bytes")
    _, length, checksum = HEAD.unpack_from(view)
    if length > min(MAX_HEADER_BYTES, len(view) - HEAD.size):
        raise ValueError(f"its header has {length} bytes, but the file only {len(view)}")
    text = bytes(view[HEAD.size : HEAD.size + length])
    if crc32(text) != checksum:
        raise ValueError("its header has a wrong checksum")
    facts = json.loads(text)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError("its header has another format")
    if facts.get("version") != VERSION:
        raise ValueError(
            f"it has version {facts.get('version')!r} of the format, but this version of wds-datapipes reads {VERSION}"
        )
    return facts, view[HEAD.size + length :]


def _column(body: memoryview, name: str, span: Any) -> np.ndarray[Any, Any]:
    kind, offset, length = span
    is_known = isinstance(kind, str) and (name in COLUMNS or USER_KIND.fullmatch(kind) is not None)
    if COLUMNS.get(name, kind) != kind or not is_known or type(offset) is not int or type(length) is not int:
        raise ValueError(f"it has a column {name} at {span!r}")
    if offset % ALIGNMENT or min(offset, length) < 0 or offset + length * np.dtype(kind).itemsize > len(body):
        raise ValueError(f"its column {name} is outside of it, at {span!r}")
    return np.frombuffer(body, kind, length, offset)
