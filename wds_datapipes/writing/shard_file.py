"""Write a single shard, which appears under its name once it is complete."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.errors import EncodeError, plural
from wds_datapipes.hints import WRITE_NO_RULE
from wds_datapipes.index.format.builder import index_members
from wds_datapipes.index.format.index_file import index_url, write_index
from wds_datapipes.index.format.options import IndexOptions
from wds_datapipes.index.format.shard_index import ShardIndex
from wds_datapipes.io.compression.formats import find_compression
from wds_datapipes.io.output.sink import Sink, open_target
from wds_datapipes.redaction import redact
from wds_datapipes.tar.header_writer import END
from wds_datapipes.types import Sample, Shard, ShardInfo
from wds_datapipes.writing.closable_writer import ClosableWriter
from wds_datapipes.writing.options import WriteOptions
from wds_datapipes.writing.packer import PackedSample, TarSamplePacker

if TYPE_CHECKING:
    from typing_extensions import Self


#: The size of the write buffer and the minimum size of data that is written without a copy, in bytes.
FLUSH_BYTES = 256 << 10
DIRECT_BYTES = 32 << 10


class ShardFile(ClosableWriter):
    """Writes samples to a single shard; `TarWriter` describes the behavior.

    Args:
        target: a path, a URL, ``pipe:COMMAND``, ``-`` or an open binary stream.
        options: how to write it.
        packer: turns samples into bytes; several shards may share it.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | Sink,
        options: WriteOptions,
        packer: TarSamplePacker | None = None,
    ) -> None:
        name = name_of_target(target)
        if options.index and not name:
            raise ValueError("index=True needs a file name, to write the index next to the file")
        self._index_url = index_url(name) if options.index else ""
        self._options = options
        self._packer = options.packer() if packer is None else packer
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
        self.expect_close()

    def write(self, sample: Sample) -> int:
        """Write a sample, with its fields in order.

        A rejected sample leaves the shard unchanged, and writing can continue. Any other error discards the shard.

        Returns:
            The total size of the fields in bytes, without headers.

        Raises:
            EncodeError: a value cannot be encoded, or the sample would be read back differently.
            UnsafeInputError: a field needs ``allow_pickle``.
            MissingDependencyError: a field needs a package that is not installed.
            ShardWriteError: the disk is full, or the store or the command failed.
        """
        return self.append(self.pack(sample))

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample without writing anything."""
        return self._packer.pack(sample)

    def append(self, packed: PackedSample) -> int:
        """Write a result of `pack`; return the size of its fields."""
        if self._closed:
            raise ValueError(f"the shard {redact(self._target.url)!r} is closed")
        key, parts, size, payload, fields = packed
        if self._options.key_rule is not None:
            if key in self._keys:
                raise EncodeError(
                    f"The key {key!r} was already written to {self._target.url!r}, and samples with the same key are "
                    "ambiguous. Number them, or ",
                    WRITE_NO_RULE,
                    " if this is intended",
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
        if self._index_url:
            self._layout.append((key, self.size, fields))
        self.size += size
        self.samples += 1
        return payload

    def close(self) -> None:
        """Finish the shard: rename it to its name, set ``info``, and write the index.

        Raises:
            ShardWriteError: the shard cannot be finished and was removed, or the command failed.
            MissingSidecarError: the shard is finished, but its index cannot be written.
        """
        if self._closed:
            return
        try:
            self._buffer.append(END)
            self._flush()
            if self._compressor is not None:
                self._send([self._compressor.flush()])
            self._target.finish()
        except BaseException:
            self.discard()
            raise
        self._closed = True
        digest = "" if self._digest is None else self._digest.hexdigest()
        self.info = ShardInfo(self._target.url, self.samples, self._written, digest)
        if self._index_url:
            write_index(self._index(digest), self._index_url, storage_options=self._options.storage_options)

    def _index(self, digest: str) -> ShardIndex:
        """Return the index of the finished shard.

        It records no modification time, so that the same samples give the same index. It is valid as long as its file
        is newer than the shard.
        """
        shard = Shard(self._target.url or "The shard", end=self.size, is_complete=True)
        members: Any = (
            (shard, name, (name, begin + at, size), begin)
            for key, begin, fields in self._layout
            for field, at, size in fields
            for name in [f"{key}.{field}"]
        )
        assert self._options.key_rule is not None  # noqa: S101  index=True needs one
        index = index_members(members, shard, IndexOptions(key_rule=self._options.key_rule))
        compression = self._compression and self._compression.name
        index.facts = replace(index.facts, bytes=self._written, sha256=digest or None, compression=compression)
        return index

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

    def describe_loss(self) -> str:
        """Describe the shard that is not finished."""
        if self._closed:
            return ""
        return f"The shard {redact(self._target.url)!r} with {plural(self.samples, 'sample')} was"

    def _flush(self) -> None:
        chunks = join_small(self._buffer) if self._has_large else [b"".join(self._buffer)]
        self._buffer = []
        self._buffered_bytes = 0
        self._has_large = False
        self._send(chunks if self._compressor is None else [self._compressor.compress(chunk) for chunk in chunks])

    def _send(self, chunks: list[bytes]) -> None:
        if self._digest is not None:
            self._digest.add(chunks)
        self._target.write(*chunks)
        self._written += sum(map(len, chunks))


def name_of_target(target: str | os.PathLike[str] | BinaryIO | Sink) -> str:
    """Return the path or URL of a target, or "" for a stream."""
    return os.fspath(target) if isinstance(target, str | os.PathLike) else str(getattr(target, "url", ""))


def join_small(parts: list[bytes]) -> list[bytes]:
    """Join adjacent small parts; leave large ones as they are, so that their data is not copied."""
    chunks: list[bytes] = []
    begin = 0
    for at, part in enumerate(parts):
        if len(part) >= DIRECT_BYTES:
            chunks += b"".join(parts[begin:at]), part
            begin = at + 1
    chunks.append(b"".join(parts[begin:]))
    return chunks


class HashingWriter:
    """Computes the SHA-256 of written data in a thread that hashes one part while the next is collected."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._hashed: list[Future[None]] = []

    def add(self, chunks: list[bytes]) -> None:
        """Add data, once the data before is hashed."""
        wait(self._hashed)
        self._hashed = [self._thread.submit(self._hash.update, chunk) for chunk in chunks]

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal digits and stop the thread."""
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Stop the thread, once all data are hashed."""
        self._thread.shutdown()
