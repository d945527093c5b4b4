"""Sample reader: random access to the samples of a shard by its index."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from tarfile import HeaderError, TarInfo
from threading import Lock
from typing import Any, BinaryIO

from wds_datapipes.errors import ChangedShardError, ShardOpenError
from wds_datapipes.index.permutation import Numbers
from wds_datapipes.index.read_plan import ReadPlan, plan_reading
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

#: About how many bytes are read at once. Fields from ``LONG_BYTES`` are read alone, so that they are not copied again.
MAX_READ_BYTES, LONG_BYTES = 256 << 10, 32 << 10


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
        self._file: BinaryIO | None = None  # opened by `stream`
        self._is_checked = False
        #: How many bytes `stream` has read.
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

    def stream(self, numbers: Numbers, fields: Collection[str] | None = None) -> Iterator[Sample]:
        """Yield samples with their fields as bytes, each read when it is due; a local shard stays open until `close`.

        Data that is close together, in the order of the samples, is read at once. At most `MAX_READ_BYTES` and a field
        are held. Only the header of the first member that is ever read is compared with the index.

        Args:
            numbers: the numbers of the samples.
            fields: the fields to read; by default all.

        Raises:
            ShardError: a sample cannot be read, or the shard has changed since it was indexed.
        """
        plan = plan_reading(self.index, numbers, fields, max_bytes=MAX_READ_BYTES, alone_from=LONG_BYTES)
        self._open_and_check(plan)
        return self._samples(plan, lambda number: self._read_range(plan.starts[number], plan.stops[number]))

    def _samples(self, plan: ReadPlan, read: Callable[[int], bytes]) -> Iterator[Sample]:
        """Yield the samples of a plan; ``read`` returns the data of a range."""
        members = zip(plan.names, plan.ranges, plan.begins, plan.ends, strict=True)
        empty: Sample = {"__key__": "", "__url__": self.url}
        if self._path is not None:
            empty["__local_path__"] = self._path
        current, data = -1, b""
        for key, count in zip(plan.keys, plan.counts, strict=True):
            sample = empty.copy()
            sample["__key__"] = key
            for name, number, begin, end in islice(members, count):
                if number != current:
                    current, data = number, read(number)
                    self.bytes_read += len(data)
                sample[name] = data[begin:end]
            yield sample

    def _open_and_check(self, plan: ReadPlan) -> None:
        """Open a shard and compare it with its index, unless that was done before.

        Raises:
            ChangedShardError: it has another size, or there is no such member.
        """
        if self._is_checked or not plan.names:
            return
        if self._path is not None:
            self._file = open_local(self._path, name=self.url)
            weakref.finalize(self, self._file.close)
            size, expected = os.fstat(self._file.fileno()).st_size, self.index.facts.bytes
            if expected not in (None, size):
                raise self._changed(f"it has {size} bytes instead of {expected}")
        field, size = plan.names[0], plan.ends[0] - plan.begins[0]
        offset = plan.starts[plan.ranges[0]] + plan.begins[0]
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
