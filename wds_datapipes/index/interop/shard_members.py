"""The members of a shard, to verify the index of another program."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from wds_datapipes.errors import UnsupportedSidecarError, WrongSidecarError
from wds_datapipes.index.shard_index import ShardFacts
from wds_datapipes.io.openers import redact
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.scanner import Scan, scan_shard

__all__ = ["ShardMember", "ShardMembers"]


class ShardMember(NamedTuple):
    """A file of a shard: its name, where its first header and its data begin, and its size."""

    name: str
    start: int
    offset: int
    size: int


class ShardMembers:
    """The files of a shard, as its headers list them.

    Args:
        url: the shard.
        end_marker: whether it has to have one.
        storage_options: passed to a remote file system.

    Attributes:
        found: the files, in their order.
        scan: what else was found out.

    Raises:
        ShardError: the shard cannot be read.
        UnsupportedSidecarError: it is compressed, so that other programs read it without an index.
    """

    def __init__(
        self, url: str, *, end_marker: EndMarker = "required", storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._archive = redact(url)
        self.found: list[ShardMember] = []
        self.scan: Scan = scan_shard(url, self._add, end_marker=end_marker, storage_options=storage_options)
        self._places = {member.offset: member for member in self.found}
        if self.scan.compression is not None:
            raise UnsupportedSidecarError(
                f"{self._archive} is compressed with {self.scan.compression}, and the places of its samples are of no "
                f"use to the program that this index is for. Unpack the shard"
            )

    @property
    def facts(self) -> ShardFacts:
        """The facts that an index records about the shard."""
        scan = self.scan
        return ShardFacts(scan.bytes, scan.sha256, scan.mtime_ns, scan.etag, scan.compression)

    def at(self, offset: int, size: int, where: str) -> ShardMember:
        """Return the file whose data begins at an offset.

        Raises:
            WrongSidecarError: there is none, or it has another size.
        """
        member = self._places.get(offset)
        if member is None:
            raise WrongSidecarError(
                f"{where} says that data of {self._archive} begin at byte {offset}, where no member's do"
                f"{self._near(offset)}. Build the index again"
            )
        if member.size != size:
            raise WrongSidecarError(
                f"{where} says that {size} bytes are at byte {offset} of {self._archive}, and the member "
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
        return f" (those of {member.name!r} begin at {member.offset})"
