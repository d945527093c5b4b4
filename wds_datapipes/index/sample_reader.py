"""Sample reader: random access to the samples of a shard by its index."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from tarfile import HeaderError, TarInfo
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from wds_datapipes.errors import ChangedShardError, ShardOpenError
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.local import local_path, open_local
from wds_datapipes.io.openers import open_parts, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.range_sources import RangeSource
from wds_datapipes.samples.keys import KeyRule, is_meta
from wds_datapipes.tar.buffer import ReadBuffer
from wds_datapipes.tar.headers import BLOCK, NAME_BYTES
from wds_datapipes.tar.reader import read_members
from wds_datapipes.tar.scanner import open_archive_ranges
from wds_datapipes.types import Sample

__all__ = ["SampleReader", "has_random_access"]

#: Data that is at most this far apart in a shard is read at once, up to this many bytes. Longer data is read alone.
GAP_BYTES, MAX_READ_BYTES, LONG_BYTES = 8 << 10, 256 << 10, 32 << 10


class SampleReader:
    """Reads samples of one shard in any order, by their offsets. It is thread-safe.

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
        self._file: BinaryIO | None = None  # opened by `read_many`
        self._is_checked = False
        #: How many bytes `read_many` has read.
        self.bytes_read = 0

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

    def read_many(self, numbers: Sequence[int], fields: Collection[str] | None = None) -> list[Sample]:
        """Return samples with their fields as bytes, and keep a local shard open until `close`.

        Data that is close together is read at once, without headers. Only the header of the first member that is ever
        read is compared with the index.

        Args:
            numbers: the numbers of the samples.
            fields: the fields to read; by default all.

        Raises:
            ShardError: a sample cannot be read, or the shard has changed since it was indexed.
        """
        samples: list[Sample] = [{} for _ in numbers]
        members = self._members(numbers, samples, fields)
        self._open_and_check(members)
        for start, end, group in _coalesce(sorted(members)):
            data = self._read_range(start, end)
            self.bytes_read += len(data)
            for offset, size, field, number in group:
                samples[number][field] = data[offset - start : offset - start + size]
        return samples

    def _members(
        self, numbers: Sequence[int], samples: list[Sample], fields: Collection[str] | None
    ) -> list[tuple[int, int, str, int]]:
        """Begin samples, and return the offset and the size of each of their fields, its name, and its sample."""
        columns, names = self.index.columns, self.index.fields
        if fields is not None and self.index.facts.lowercase:
            fields = [field.lower() for field in fields]
        wanted = [fields is None or name in fields for name in names]
        chosen = np.asarray(numbers)
        firsts, lasts = columns["sample_members"][chosen], columns["sample_members"][chosen + 1]
        counts = lasts - firsts
        # The members of all samples, one after the other.
        all_members = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        found = zip(
            columns["member_offsets"][all_members].tolist(),
            columns["member_sizes"][all_members].tolist(),
            columns["member_fields"][all_members].tolist(),
            np.repeat(np.arange(len(samples)), counts).tolist(),
            strict=True,
        )
        empty = {"__key__": "", "__url__": self.url} | ({} if self._path is None else {"__local_path__": self._path})
        for key, sample in zip(self.index.keys_of(chosen), samples, strict=True):
            sample.update(empty, __key__=key)
        members = []
        for offset, size, field, number in found:
            if wanted[field]:
                samples[number][names[field]] = b""  # in the order of the archive
                members.append((offset, size, names[field], number))
        return members

    def _open_and_check(self, members: list[tuple[int, int, str, int]]) -> None:
        """Open a shard and compare it with its index, unless that was done before.

        Raises:
            ChangedShardError: it has another size, or there is no such member.
        """
        if self._is_checked or not members:
            return
        if self._path is not None:
            self._file = open_local(self._path, name=self.url)
            weakref.finalize(self, self._file.close)
            size, expected = os.fstat(self._file.fileno()).st_size, self.index.facts.bytes
            if expected not in (None, size):
                raise self._changed(f"it has {size} bytes instead of {expected}")
        offset, size, field, _ = members[0]
        try:
            header = TarInfo.frombuf(self._read_range(offset - BLOCK, offset), "utf-8", "surrogateescape")
        except HeaderError as error:
            raise self._changed(f"there is no header at byte {offset - BLOCK} ({error})") from error
        # A long name is cut in this header, PAX records may replace the name and the size.
        is_cut = len(header.name.encode("utf-8", "surrogateescape")) >= NAME_BYTES or not field.isascii()
        if not (is_cut or header.name.lower().endswith(f".{field.lower()}")) or header.size not in (size, 0):
            raise self._changed(f"the member {header.name!r} of {header.size} bytes is at byte {offset}")
        self._is_checked = True

    def _changed(self, found: str) -> ChangedShardError:
        return ChangedShardError(
            f"{self._name} has changed since it was indexed: {found}. Build its index again with build_indexes"
        )

    def close(self) -> None:
        """Close the shard."""
        if self._parts is not None:
            self._parts.close()
        if self._file is not None:
            self._file.close()
        self._file, self._is_checked = None, False

    def _read_range(self, start: int, end: int) -> bytes:
        if self._file is not None:
            data = os.pread(self._file.fileno(), end - start, start)
            if len(data) == end - start:
                return data
        with ExitStack() as opened:  # also for the rest of a read that was interrupted
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


def _coalesce(
    members: list[tuple[int, int, str, int]],
) -> Iterator[tuple[int, int, list[tuple[int, int, str, int]]]]:
    """Yield ranges of a shard to read at once, each with the members in it."""
    group: list[tuple[int, int, str, int]] = []
    start = end = limit = 0
    for member in members:
        offset, size, _, _ = member
        if group and (size >= LONG_BYTES or offset > end + GAP_BYTES or offset + size > limit):
            yield start, end, group
            group = []
        if not group:
            start, limit = offset, offset + (size if size >= LONG_BYTES else MAX_READ_BYTES)
        end = offset + size
        group.append(member)
    if group:
        yield start, end, group
