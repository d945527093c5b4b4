"""Scan the headers of a tar shard, seeking past the data if possible."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wds_datapipes.errors import ChangedShardError, StaleSidecarError
from wds_datapipes.io.compression.decompress import compression_name, decompress_stream
from wds_datapipes.io.compression.formats import HEAD_BYTES, detect_compression
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.remote_file import FileFacts, file_facts, open_ranges
from wds_datapipes.io.streams import RawStream, name_read_errors
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import MemberTuple, Shard

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ShardScan:
    """The files of a shard, read from its headers. Iterate over it once, or call `finish`.

    The data is skipped if the shard is an uncompressed archive that supports range reads and no digest is requested.

    Yields:
        MemberTuple: each file, with its name, the offset of its data and its size in place of the data.

    Args:
        url: the shard.
        digest: compute the SHA-256 of the file, which reads all of it.
        ignore_zeros: continue after an end marker to read concatenated archives.
        end_marker: ``"optional"`` accepts an archive without the two blocks of zeros at its end, and ``"final"``
            ignores data that follow them.
        storage_options: passed to a remote file system.
        limits: the limits for the shard.

    Attributes:
        shard: the shard. After the last file, it is complete and ends where the end marker of the archive begins.
        facts: after the last file, the size of the file, its ``sha256``, ``mtime_ns``, ``etag`` and ``compression``.

    Raises:
        ShardError: the shard cannot be read to its end; the same errors as when reading it.
        StaleSidecarError: the shard changed during the scan.
    """

    def __init__(
        self,
        url: str,
        *,
        digest: bool = False,
        ignore_zeros: bool = False,
        end_marker: EndMarker = "required",
        storage_options: Mapping[str, Any] | None = None,
        limits: ReadLimits = DEFAULT_LIMITS,
    ) -> None:
        self.shard = Shard(url)
        self.facts: dict[str, Any] = {}
        self._digest, self.storage_options = digest, storage_options
        self._options: dict[str, Any] = {"ignore_zeros": ignore_zeros, "end_marker": end_marker, "limits": limits}

    def __iter__(self) -> Generator[MemberTuple, None, None]:
        url, archive = self.shard.url, redact(self.shard.url)
        before = file_facts(url, storage_options=self.storage_options)
        with name_read_errors(archive), ExitStack() as opened:
            try:
                counted = None
                stream = None if self._digest else open_archive_ranges(url, storage_options=self.storage_options)
                if stream is not None:
                    opened.enter_context(stream)
                else:
                    source = opened.enter_context(open_url(url, storage_options=self.storage_options))
                    counted = Counted(source, self._digest)
                    plain = decompress_stream(cast(BinaryIO, counted), url=url, limits=self._options["limits"])
                    stream = opened.enter_context(plain)
                end = yield from read_members(
                    stream, shard=self.shard, archive=archive, headers_only=True, **self._options
                )
                compression = compression_name(stream)
                size = before.bytes if counted is None else counted.finish()
            except ChangedShardError as error:
                raise _changed_error(archive) from error
        if before != FileFacts() and (
            before != file_facts(url, storage_options=self.storage_options) or before.bytes not in (None, size)
        ):
            raise _changed_error(archive)
        sha256 = None if counted is None or counted.hash is None else counted.hash.hexdigest()
        self.facts = {"bytes": size or 0, "sha256": sha256, "compression": compression}
        self.facts |= {"mtime_ns": before.mtime_ns, "etag": before.etag}
        self.shard.is_complete, self.shard.end = True, end


def _changed_error(archive: str) -> StaleSidecarError:
    return StaleSidecarError(f"{archive} changed while its headers were read. Rebuild its index")


def open_archive_ranges(url: str, *, storage_options: Mapping[str, Any] | None = None) -> BinaryIO | None:
    """Open a shard for random access; return None if it is compressed or can only be read from the beginning.

    Raises:
        ShardOpenError: the shard does not exist, or access is denied.
    """
    with ExitStack() as opened:
        stream = open_ranges(url, storage_options=storage_options)
        if stream is None:
            return None
        opened.enter_context(stream)
        if detect_compression(stream.read(HEAD_BYTES)) is not None:
            return None
        stream.seek(0)
        opened.pop_all()
        return stream


class Counted(RawStream):
    """A stream that counts its bytes and computes their digest."""

    def __init__(self, stream: BinaryIO, digest: bool) -> None:
        self._stream = stream
        self.hash = hashlib.sha256() if digest else None
        self.count = 0

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        size = cast(io.RawIOBase, self._stream).readinto(view) or 0
        self.count += size
        if self.hash is not None:
            self.hash.update(view[:size])
        return size

    def finish(self) -> int:
        """Read the rest of the stream, and return the total number of bytes."""
        while self.readinto(bytearray(1 << 20)):
            pass
        return self.count
