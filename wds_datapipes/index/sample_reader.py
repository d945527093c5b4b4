"""Sample reader: random access to the samples of a shard by its index."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import ExitStack
from threading import Lock
from typing import Any, BinaryIO

from wds_datapipes.errors import ChangedShardError, ShardOpenError
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.local import local_path, open_local
from wds_datapipes.io.openers import open_parts, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.range_sources import RangeSource
from wds_datapipes.samples.keys import KeyRule, is_meta
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.reader import read_members
from wds_datapipes.tar.scanner import open_archive_ranges
from wds_datapipes.types import Sample

__all__ = ["SampleReader", "has_random_access"]


class SampleReader:
    """Reads samples of one shard in any order, each with one read at its offset. It is thread-safe.

    Args:
        url: the shard.
        index: its index.
        key_rule: the rule that the index was built with.
        storage_options: passed to a remote file system.
        limits: the limits for the shard.

    Examples:
        >>> from wds_datapipes.index.build import build_index
        >>> from wds_datapipes.samples.keys import first_dot
        >>> from wds_datapipes.testing import build_shard
        >>> url = build_shard("a.tar", [{"__key__": "x", "txt": "one"}, {"__key__": "y", "txt": "two"}])
        >>> SampleReader(url, build_index(url), key_rule=first_dot).read(1)
        {'__key__': 'y', '__url__': 'a.tar', 'txt': b'two'}
    """

    def __init__(
        self,
        url: str,
        index: ShardIndex,
        *,
        key_rule: KeyRule,
        storage_options: Mapping[str, Any] | None = None,
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        self.url, self.index, self._name, self._path = url, index, redact(url), local_path(url)
        self._key_rule, self._storage_options, self._limits = key_rule, storage_options, limits
        self._lock = Lock()
        self._parts: RangeSource | None = None

    def read(self, number: int) -> Sample:
        """Return a sample, with its fields as bytes.

        Raises:
            ShardError: the sample cannot be read, or the shard has changed since it was indexed.
        """
        key, offset, end, entries = self.index[number]
        sample: Sample = {"__key__": key, "__url__": self.url}
        data = io.BytesIO(self._read_range(offset, end))
        for _, name, value, _ in read_members(
            data, shard=self.url, archive=self._name, start=offset, stop=end, limits=self._limits
        ):
            parts = None if is_meta(name) else self._key_rule(name)
            if parts is not None and parts[0] == key:
                sample.setdefault(parts[1].lower(), value)
        if any(len(sample.get(entry.field, b"")) != entry.size for entry in entries):
            raise ChangedShardError(
                f"{self._name} has changed since it was indexed: the sample {key!r} is no longer at byte {offset}"
            )
        return sample

    def read_field(self, number: int, field: str) -> bytes | None:
        """Return the data of a field of a sample, or None if there is no such field.

        Raises:
            ShardError: the field cannot be read.
        """
        for entry in self.index[number].entries:
            if entry.field == field:
                return self._read_range(entry.offset, entry.offset + entry.size)
        return None

    def close(self) -> None:
        """Close the shard."""
        if self._parts is not None:
            self._parts.close()

    def _read_range(self, start: int, end: int) -> bytes:
        with ExitStack() as opened:
            stream: BinaryIO
            if self._path is not None:
                stream = opened.enter_context(open_local(self._path, name=self.url))
                stream.seek(start)
            else:
                opened.enter_context(self._lock)
                self._parts = self._parts or open_parts(self.url, storage_options=self._storage_options)
                if self._parts is None:
                    raise ShardOpenError(f"{self._name} can only be read sequentially")
                stream = opened.enter_context(self._parts.part(start, end))
            data = ReadBuffer(stream, self._name, start).take(end - start)
        if len(data) != end - start:
            raise ChangedShardError(f"{self._name} has changed since it was indexed: it ends before byte {end}")
        return data


def has_random_access(url: str, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether samples of a shard can be read by their offsets: it is neither compressed nor a pipe or the like.

    Raises:
        ShardOpenError: there is no such shard, or it is not readable.
    """
    stream = open_archive_ranges(url, storage_options=storage_options)
    if stream is not None:
        stream.close()
    return stream is not None
