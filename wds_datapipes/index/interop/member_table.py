"""The members of a shard, for verifying an index of another program."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from wds_datapipes.errors import StaleSidecarError, UnsupportedSidecarError
from wds_datapipes.index.shard_index import ShardFacts
from wds_datapipes.io.openers import redact
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.scanner import Scan, scan_shard

__all__ = ["MemberTable", "ShardMember"]


class ShardMember(NamedTuple):
    """A file of a shard: its name, the offsets of its first header and of its data, and the size of the data."""

    name: str
    start: int
    offset: int
    size: int


class MemberTable:
    """The files of a shard, read from its headers.

    Args:
        url: the shard.
        end_marker: whether the archive must have an end marker.
        storage_options: passed to a remote file system.

    Attributes:
        found: the files, in order.
        scan: the other results of the scan.

    Raises:
        ShardError: the shard cannot be read.
        UnsupportedSidecarError: the shard is compressed, so an index for it is useless.
    """

    def __init__(
        self, url: str, *, end_marker: EndMarker = "required", storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._archive = redact(url)
        self.found: list[ShardMember] = []
        self.scan: Scan = scan_shard(url, self._add, end_marker=end_marker, storage_options=storage_options)
        self._by_offset = {member.offset: member for member in self.found}
        if self.scan.compression is not None:
            raise UnsupportedSidecarError(
                f"{self._archive} is compressed with {self.scan.compression}, so the program that this index is for "
                f"cannot use the offsets of its samples. Decompress the shard"
            )

    @property
    def facts(self) -> ShardFacts:
        """The facts that an index records about the shard."""
        scan = self.scan
        return ShardFacts(scan.bytes, scan.sha256, scan.mtime_ns, scan.etag, scan.compression)

    def member_at(self, offset: int, size: int, source: str) -> ShardMember:
        """Return the file whose data begins at an offset; ``source`` is the source of the offset, for messages.

        Raises:
            StaleSidecarError: there is no such file, or it has another size.
        """
        member = self._by_offset.get(offset)
        if member is None:
            raise StaleSidecarError(
                f"{source} says that data of {self._archive} begins at byte {offset}, but no member does"
                f"{self._near(offset)}. Build the index again"
            )
        if member.size != size:
            raise StaleSidecarError(
                f"{source} says that {size} bytes are at byte {offset} of {self._archive}, but the member "
                f"{member.name!r} there has {member.size}. Build the index again"
            )
        return member

    def _add(self, name: str, start: int, offset: int, size: int) -> None:
        self.found.append(ShardMember(name, start, offset, size))

    def _near(self, offset: int) -> str:
        at = bisect_right(self.found, offset, key=lambda member: member.start) - 1
        if at < 0:
            return ""
        member = self.found[at]
        return f" (the data of {member.name!r} begins at {member.offset})"
