"""Shard file: writes packed samples to one shard, which appears under its name when it is complete."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, Protocol

from wds_datapipes.errors import EncodeError
from wds_datapipes.index.build import index_from_layout
from wds_datapipes.index.file_format import index_url, write_index
from wds_datapipes.index.options import IndexOptions
from wds_datapipes.io.compression.formats import find_compression
from wds_datapipes.io.sinks import Sink, open_target
from wds_datapipes.redaction import redact
from wds_datapipes.shards.record_formats import RecordFormat
from wds_datapipes.tar.header_writer import END
from wds_datapipes.types import PlacedField, PlacedSample, Sample, ShardInfo
from wds_datapipes.user_warnings import warn_user
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.sample_packer import PackedSample

if TYPE_CHECKING:
    from typing_extensions import Self


#: The size of the write buffer, and the size from which data is written without copying it, in bytes.
FLUSH_BYTES = 256 << 10
DIRECT_BYTES = 32 << 10


class Packer(Protocol):
    """Turns samples into the bytes of a format, which do not depend on their offset."""

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample.

        Raises:
            EncodeError: it cannot be encoded, or would be read back differently.
        """


class ShardFile:
    """Writes samples to one shard in any format; `TarWriter` describes its behavior.

    Args:
        target: a path, a URL, ``pipe:COMMAND``, ``-`` or an open binary stream.
        options: how it is written.
        records: the format of a shard of records; ``None`` is tar.
        packer: turns samples into the bytes of the format, if several shards share it.
    """

    #: True until there is something to close: ``__del__`` also runs if ``__init__`` fails.
    _closed = True

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | Sink,
        options: WriteOptions,
        records: RecordFormat | None = None,
        packer: Packer | None = None,
    ) -> None:
        name = name_of_target(target)
        if options.index and not name:
            raise ValueError("index=True needs a file name, to write the index next to it")
        self._index_url = index_url(name) if options.index else ""
        self._options = options
        self._packer = options.packer(records) if packer is None else packer
        self._end = END if records is None else b""
        self._compression = find_compression(options.compress, name)
        self._compressor = None if self._compression is None else self._compression.compressor()
        self._keys: set[str] = set()
        self._buffer: list[bytes] = []
        self._buffered_bytes = self._written = 0
        self._has_large = False
        self._digest = HashingWriter() if options.digest else None
        self.samples = self.size = 0
        self._layout: list[tuple[str, int, list[tuple[str, int, int]]]] = []
        self.info: ShardInfo | None = None
        self._target = open_target(target, options.storage_options)
        self._owner = os.getpid()
        self._closed = False

    def write(self, sample: Sample) -> int:
        """Write a sample, with its fields in order.

        A refused sample leaves the shard unchanged, and writing can continue. After any other error, the shard is
        discarded.

        Returns:
            The total size of the fields in bytes, without headers.

        Raises:
            EncodeError: a value cannot be encoded, or the sample would be read back differently.
            UnsafeInputError: a field needs ``allow_pickle``.
            MissingDependencyError: a field needs a package that is not installed.
            ShardWriteError: the disk is full, or the store or the command has failed.
        """
        return self.append(self.pack(sample))

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample, without writing anything."""
        return self._packer.pack(sample)

    def append(self, packed: PackedSample) -> int:
        """Write a sample returned by `pack`, and return the size of its fields."""
        if self._closed:
            raise ValueError(f"the shard {redact(self._target.url)!r} is closed")
        key, parts, size, payload, fields = packed
        if self._options.key_rule is not None:
            if key in self._keys:
                raise EncodeError(
                    f"The key {key!r} was already written to {self._target.url!r}, and samples with the same key are "
                    f"ambiguous. Number them, or pass key_rule=None if that is intended"
                )
            self._keys.add(key)
        try:
            self._buffer += parts
            self._buffered_bytes += size
            self._has_large |= size >= DIRECT_BYTES
            if self._buffered_bytes >= FLUSH_BYTES:
                self._flush()
        except BaseException:
            self.discard()
            raise
        self._layout.append((key, self.size, fields))
        self.size += size
        self.samples += 1
        return payload

    def close(self) -> None:
        """Finish the shard, give it its name, set ``info``, and write the index.

        Raises:
            ShardWriteError: the shard cannot be finished and was removed, or the command has failed.
            MissingSidecarError: the shard is finished, but its index cannot be written.
        """
        if self._closed:
            return
        try:
            self._buffer.append(self._end)
            self._flush()
            if self._compressor is not None:
                self._send([self._compressor.flush()])
            self._target.finish()
        except BaseException:
            self.discard()
            raise
        self._closed = True
        digest = ""
        if self._digest is not None:
            digest = self._digest.hexdigest()
            self._digest.close()
        self.info = ShardInfo(self._target.url, self.samples, self._written, digest)
        if self._index_url and self._options.key_rule is not None:
            index = index_from_layout(
                self.layout,
                self.info,
                end=self.size,
                compression=self._compression and self._compression.name,
                options=IndexOptions(key_rule=self._options.key_rule),
            )
            write_index(index, self._index_url, storage_options=self._options.storage_options)

    def discard(self) -> None:
        """Remove the shard, unless it is finished."""
        if not self._closed:
            self._closed = True
            self._buffer.clear()
            if os.getpid() == self._owner:  # not in a forked process with a copy of the writer
                self._target.discard()
                if self._digest is not None:
                    self._digest.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if not self._closed and os.getpid() == self._owner:
            self.discard()  # first, since the warning may be raised as an error
            text = f"the shard {redact(self._target.url)!r} was not closed, and was discarded"
            warn_user(text, ResourceWarning)

    @property
    def layout(self) -> list[PlacedSample]:
        """Where each written sample is, with its key, its first header, and the data of its fields."""
        return [
            PlacedSample(key, begin, tuple(PlacedField(field, begin + at, size) for field, at, size in fields))
            for key, begin, fields in self._layout
        ]

    def _flush(self) -> None:
        chunks = join_small(self._buffer) if self._has_large else [b"".join(self._buffer)]
        self._buffer = []
        self._buffered_bytes = 0
        self._has_large = False
        self._send(chunks if self._compressor is None else [self._compressor.compress(chunk) for chunk in chunks])

    def _send(self, chunks: list[bytes]) -> None:
        if self._digest is not None:
            for chunk in chunks:
                self._digest.add(chunk)
        self._target.write(*chunks)
        self._written += sum(map(len, chunks))


def name_of_target(target: str | os.PathLike[str] | BinaryIO | Sink) -> str:
    """Return the path or URL of a target; empty for a stream."""
    return os.fspath(target) if isinstance(target, str | os.PathLike) else str(getattr(target, "url", ""))


def join_small(parts: list[bytes]) -> list[bytes]:
    """Join neighbouring small parts, and leave large ones as they are, so that their data is not copied."""
    chunks: list[bytes] = []
    begin = 0
    for at, part in enumerate(parts):
        if len(part) >= DIRECT_BYTES:
            chunks += b"".join(parts[begin:at]), part
            begin = at + 1
    chunks.append(b"".join(parts[begin:]))
    return chunks


#: How much data is passed to the thread at once, in bytes; less than that in total is hashed by the caller.
BATCH_BYTES = 1 << 20


class HashingWriter:
    """Computes the SHA-256 of written data in a thread.

    The thread hashes one batch while the next is collected and written.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._hashed: Future[None] | None = None
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def add(self, data: bytes) -> None:
        """Add data."""
        self._batch.append(data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= BATCH_BYTES:
            self._wait()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1)
            self._hashed = self._pool.submit(self._update, self._batch)
            self._batch, self._batch_bytes = [], 0

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal digits."""
        self._wait()
        self._update(self._batch)
        self._batch, self._batch_bytes = [], 0
        return self._hash.hexdigest()

    def close(self) -> None:
        """Stop the thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown()

    def _wait(self) -> None:
        if self._hashed is not None:
            self._hashed.result()
            self._hashed = None

    def _update(self, batch: list[bytes]) -> None:
        for data in batch:
            self._hash.update(data)
