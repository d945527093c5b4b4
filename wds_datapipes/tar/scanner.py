"""Tar scanner: reads the headers of a shard, and seeks past the data if possible."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from wds_datapipes.errors import ChangedShardError, ShardError, ShardReadError, StaleSidecarError
from wds_datapipes.io.compression.decompress import compression_name, decompress_stream
from wds_datapipes.io.compression.formats import HEAD_BYTES, detect_compression
from wds_datapipes.io.openers import open_url, redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits
from wds_datapipes.io.remote.range_reader import FileFacts, file_facts, open_ranges
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import MemberCallback, read_members

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Scan", "open_archive_ranges", "scan_shard"]


class Scan(NamedTuple):
    """The result of a scan.

    Attributes:
        end: the offset of the archive's end, without its end marker, in uncompressed bytes.
        bytes: the size of the file.
        sha256: its digest, if requested.
        mtime_ns: its modification time, if it is a local file or its store reports no ETag.
        etag: the version of the file in its store.
        compression: the compression of the file, if any.
    """

    end: int
    bytes: int
    sha256: str | None
    mtime_ns: int | None
    etag: str | None
    compression: str | None


def scan_shard(
    url: str,
    found: MemberCallback,
    *,
    digest: bool = False,
    ignore_zeros: bool = False,
    end_marker: EndMarker = "required",
    storage_options: Mapping[str, Any] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> Scan:
    """Read the headers of a shard, and report each file in it.

    Data are skipped if the shard is an uncompressed archive that supports range reads, and no digest is requested.

    Raises:
        ShardError: the shard cannot be read to its end; the same errors as when reading it.
        StaleSidecarError: the shard changed during the scan.
    """
    archive = redact(url)
    before = file_facts(url, storage_options=storage_options)
    with ExitStack() as opened:
        try:
            counted = None
            stream = None if digest else open_archive_ranges(url, storage_options=storage_options)
            if stream is not None:
                opened.enter_context(stream)
            else:
                options: dict[str, Any] = {} if storage_options is None else {"storage_options": storage_options}
                counted = Counted(opened.enter_context(open_url(url, **options)), digest)
                stream = opened.enter_context(decompress_stream(cast(BinaryIO, counted), url=url, limits=limits))
            end = _end_of(
                read_members(
                    stream,
                    shard=url,
                    archive=archive,
                    ignore_zeros=ignore_zeros,
                    end_marker=end_marker,
                    limits=limits,
                    on_header=found,
                )
            )
            compression = compression_name(stream)
            size = before.bytes if counted is None else counted.finish()
        except ChangedShardError as error:
            raise _changed_error(archive) from error
        except ShardError:
            raise
        except OSError as error:
            raise ShardReadError(f"{archive} could not be read to its end: {type(error).__name__}: {error}") from error
    if before != FileFacts() and (
        before != file_facts(url, storage_options=storage_options) or before.bytes not in (None, size)
    ):
        raise _changed_error(archive)
    sha256 = None if counted is None or counted.hash is None else counted.hash.hexdigest()
    return Scan(end, size or 0, sha256, before.mtime_ns, before.etag, compression)


def _changed_error(archive: str) -> StaleSidecarError:
    return StaleSidecarError(f"{archive} has changed while its headers were read. Build its index again")


def open_archive_ranges(url: str, *, storage_options: Mapping[str, Any] | None = None) -> BinaryIO | None:
    """Open a shard for random access; return None if it is compressed or can only be read from its beginning.

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


def _end_of(members: Generator[object, None, int]) -> int:
    """Exhaust a reader that yields nothing, and return the offset of the archive's end."""
    try:
        next(members)
    except StopIteration as ended:
        end: int = ended.value
        return end
    raise AssertionError("only headers are read")


class Counted(io.RawIOBase):
    """A stream that counts its bytes and computes their digest."""

    def __init__(self, stream: BinaryIO, digest: bool) -> None:
        self._stream = stream
        self.hash = hashlib.sha256() if digest else None
        self.count = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Read up to ``len(buffer)`` bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        size = cast(io.RawIOBase, self._stream).readinto(view) or 0
        self.count += size
        if self.hash is not None:
            self.hash.update(view[:size])
        return size

    def finish(self) -> int:
        """Read the rest of the stream, and return the number of bytes."""
        while self.readinto(bytearray(1 << 20)):
            pass
        return self.count
