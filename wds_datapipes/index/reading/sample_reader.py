"""Sample reader: random access to the samples of a shard by its index."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import islice
from tarfile import HeaderError, TarInfo
from threading import Lock
from typing import Any, BinaryIO, TypeAlias

from wds_datapipes.errors import ChangedShardError, WdsError
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.reading.read_plan import ReadPlan, plan_reading
from wds_datapipes.index.reading.shard_ranges import ShardRanges
from wds_datapipes.index.shard_index import ShardIndex
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.on_error.policy import note
from wds_datapipes.samples.keys import KeyRule, is_meta
from wds_datapipes.tar.headers import BLOCK, NAME_BYTES
from wds_datapipes.tar.reader import read_members
from wds_datapipes.tar.scanner import open_archive_ranges
from wds_datapipes.types import Sample

__all__ = ["SampleReader", "Submit", "has_random_access"]

#: About how many bytes are read at once. Fields from ``LONG_BYTES`` are read alone, so that they are not copied again.
MAX_READ_BYTES, LONG_BYTES = 256 << 10, 32 << 10
#: About how many bytes of a remote shard are requested at once.
MAX_REQUEST_BYTES = 2 << 20

Submit: TypeAlias = Callable[[Callable[[], bytes]], Future[bytes]]
"""Calls a function in another thread."""


class SampleReader:
    """Reads samples of one shard in any order, by their offsets. It is thread-safe.

    Args:
        url: the shard.
        index: its index.
        key_rule: the rule that the index was built with.
        storage_options: passed to a remote file system.
        limits: the limits for the shard.
        copy: an open local copy of the shard, which is read instead, and closed.
        copy_path: its path.

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
        copy: BinaryIO | None = None,
        copy_path: str | None = None,
    ) -> None:
        self.url, self.index, self._name = url, index, redact(url)
        self._key_rule, self._limits = key_rule, limits
        self._ranges = ShardRanges(url, storage_options, copy=copy, copy_path=copy_path)
        self._lock = Lock()
        self._is_checked = False

    @property
    def bytes_read(self) -> int:
        """How many bytes have been read."""
        return self._ranges.bytes_read

    def read(self, number: int) -> Sample:
        """Return a sample, with its fields as bytes.

        Raises:
            ShardError: the sample cannot be read, or the shard has changed since it was indexed.
        """
        key, offset, end, entries = self.index[number]
        sample: Sample = {"__key__": key, "__url__": self.url}
        data = io.BytesIO(self._ranges.read(offset, end))
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
                return self._ranges.read(entry.offset, entry.offset + entry.size)
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
        read, starts, stops = self._ranges.read, plan.starts, plan.stops
        return self._samples(plan, lambda number: read(starts[number], stops[number]))

    def read_ahead(self, numbers: Numbers, fields: Collection[str] | None, submit: Submit) -> Iterator[Sample]:
        """Begin to read samples, and yield them; all of their data is held until the end.

        Data that is close together is read at once, whatever the order of the samples.

        Args:
            numbers: the numbers of the samples.
            fields: the fields to read; None for all.
            submit: calls a function that reads in another thread.

        Raises:
            ShardError: a sample cannot be read, or the shard has changed since it was indexed.
        """
        plan = plan_reading(self.index, numbers, fields, max_bytes=MAX_REQUEST_BYTES, in_order=False)

        def read(start: int, stop: int) -> bytes:
            with self._lock:
                self._open_and_check(plan)
            return self._ranges.read(start, stop)

        begun = [submit(partial(read, *each)) for each in zip(plan.starts, plan.stops, strict=True)]
        return self._samples(plan, lambda number: begun[number].result())

    def _samples(self, plan: ReadPlan, read: Callable[[int], bytes]) -> Iterator[Sample]:
        """Yield the samples of a plan; ``read`` returns the data of a range."""
        members = zip(plan.names, plan.ranges, plan.begins, plan.ends, strict=True)
        empty: Sample = {"__key__": "", "__url__": self.url}
        if self._ranges.path is not None:
            empty["__local_path__"] = self._ranges.path
        current, data = -1, b""
        for key, count in zip(plan.keys, plan.counts, strict=True):
            sample = empty.copy()
            sample["__key__"] = key
            for name, number, begin, end in islice(members, count):
                if number != current:
                    try:
                        current, data = number, read(number)
                    except (WdsError, OSError) as error:
                        at = plan.starts[number] + begin
                        note(error, f"It was read for {name!r} of the sample {key!r}, at byte {at} of {self._name}.")
                        raise
                sample[name] = data[begin:end]
            yield sample

    def _open_and_check(self, plan: ReadPlan) -> None:
        """Open a shard and compare it with its index, unless that was done before.

        Raises:
            ChangedShardError: it has another size, or there is no such member.
        """
        if self._is_checked or not plan.names:
            return
        size, expected = self._ranges.keep_open(), self.index.facts.bytes
        if None not in (size, expected) and size != expected:
            raise self._changed(f"it has {size} bytes instead of {expected}")
        field, size = plan.names[0], plan.ends[0] - plan.begins[0]
        offset = plan.starts[plan.ranges[0]] + plan.begins[0]
        try:
            header = TarInfo.frombuf(self._ranges.read(offset - BLOCK, offset), "utf-8", "surrogateescape")
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
        self._ranges.close()
        self._is_checked = False


def has_random_access(url: str, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether samples of a shard can be read by their offsets: it is neither compressed nor a pipe or the like.

    Raises:
        ShardOpenError: there is no such shard, or it is not readable.
    """
    stream = open_archive_ranges(url, storage_options=storage_options)
    if stream is not None:
        stream.close()
    return stream is not None
