"""Tar writer: writes samples to the members of one shard."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.errors import EncodeError
from wds_datapipes.index.build import index_from_layout
from wds_datapipes.index.file_format import index_url, write_index
from wds_datapipes.io.compression.compress import Compress, compression_kind, find_compressor
from wds_datapipes.io.sinks import Sink, open_target
from wds_datapipes.samples.keys import KeyRule, first_dot
from wds_datapipes.tar.header_writer import END, HeaderWriter
from wds_datapipes.types import PlacedField, PlacedSample, Sample, ShardInfo
from wds_datapipes.user_warnings import warn_user
from wds_datapipes.writing.sample_packer import Encoder, PackedSample, SamplePacker

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["HashingWriter", "TarWriter"]

#: The size of the write buffer, and the size from which data is written directly, in bytes.
FLUSH_BYTES = 256 << 10
DIRECT_BYTES = 32 << 10
#: The names of compressions in an index.
COMPRESSIONS = {"bz2": "bz2", "gz": "gzip", "xz": "xz", "zst": "zstd"}


class TarWriter:
    """Writes samples to one shard, which appears under its name when it is complete.

    It is a context manager: leaving it finishes the shard; an error or Ctrl-C removes it, including temporary files. A
    local file gets its name after all of it was synced to disk; if two writers write the same file, the one that
    finishes last wins. Data written to a command, to standard output or to an open stream cannot be removed; after an
    error it lacks the end marker, and a command is killed before it sees the end of its input.

    Output is deterministic: the same samples give the same bytes, compressed or not. Headers are plain ustar, with a
    PAX header only for names that do not fit (long or non-ASCII ones) and sizes of 8 GiB or more.

    Args:
        target: a path, a URL of a file system that fsspec supports, ``pipe:COMMAND``, ``-`` (standard output) or an
            open binary stream, which stays open.
        user: the name of the files' owner, whose ID is 0.
        group: the name of the files' group, whose ID is 0.
        mode: the permissions of the files.
        mtime: the modification time of the files, in whole seconds since 1970.
        compress: ``"gz"``, ``"bz2"``, ``"xz"`` or ``"zst"``; ``True`` is ``"gz"``, ``False`` is none, and ``None``
            selects by the name: ``.tar.gz``, ``.tgz`` and so on.
        encoder: ``True`` encodes values as ``wds_encode`` does; a dict gives its keyword arguments, such as
            ``{"jpg": {"quality": 90}}``; a function takes a sample and returns one with bytes; with ``False`` or
            ``None``, all values must be bytes.
        keep_meta: also write the values of keys that begin with ``__``, except ``__key__``; they must be str or bytes.
        unsafe: allow codecs whose data can run code when it is decoded, as for ``wds_encode``.
        key_rule: the rule that the shard will be read with. Names that it would split differently are refused, and so
            are repeated keys. ``None`` disables both checks.
        storage_options: passed to the file system of a URL.
        digest: compute the SHA-256 of the shard for `info`, which takes about as long as writing large fields.
        index: write the `ShardIndex` of the shard next to it when it is finished. With ``digest``, the index includes
            the digest.

    Attributes:
        samples: the number of samples written.
        size: the size of the archive so far, in bytes before compression, without the end marker.
        info: the `ShardInfo` of the finished shard, ``None`` before that.

    Raises:
        ShardWriteError: the shard cannot be written, or the command has failed.

    Examples:
        >>> with TarWriter("a.tar") as shard:
        ...     for number in range(2):
        ...         _ = shard.write({"__key__": f"{number:03d}", "txt": "a cat", "cls": number})
        >>> shard.info.samples, shard.info.bytes
        (2, 5120)
        >>> [member.name for member in ShardList("a.tar").load_wds_shards()]
        ['000.txt', '000.cls', '001.txt', '001.cls']
    """

    #: True until there is something to close: ``__del__`` also runs if ``__init__`` fails.
    _closed = True

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | Sink,
        *,
        user: str = "",
        group: str = "",
        mode: int = 0o644,
        mtime: float = 0,
        compress: Compress = None,
        encoder: Encoder = True,
        keep_meta: bool = False,
        unsafe: bool = False,
        key_rule: KeyRule | None = first_dot,
        storage_options: Mapping[str, Any] | None = None,
        digest: bool = False,
        index: bool = False,
    ) -> None:
        headers = HeaderWriter(user=user, group=group, mode=mode, mtime=mtime)
        self._packer = SamplePacker(headers, encoder, unsafe=unsafe, keep_meta=keep_meta, key_rule=key_rule)
        self._key_rule = key_rule
        name = os.fspath(target) if isinstance(target, str | os.PathLike) else str(getattr(target, "url", ""))
        self._compressor = find_compressor(compress, name)
        if index and (not name or key_rule is None):
            raise ValueError("index=True needs a file name, to write the index next to it, and a key_rule")
        self._index_url = index_url(name) if index else ""
        self._compression = COMPRESSIONS.get(compression_kind(compress, name) or "")
        self._storage_options = storage_options
        self._keys: set[str] = set()
        self._buffer: list[bytes] = []
        self._buffered_bytes = self._written = 0
        self._digest = HashingWriter() if digest else None
        self.samples = self.size = 0
        self._layout: list[tuple[str, int, list[tuple[str, int, int]]]] = []
        self.info: ShardInfo | None = None
        self._target = open_target(target, storage_options)
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
            UnsafeInputError: a field needs ``unsafe``.
            MissingDependencyError: a field needs a package that is not installed.
            ShardWriteError: the disk is full, or the store or the command has failed.
        """
        return self.append(self.pack(sample))

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample, and build its headers, without writing anything."""
        return self._packer.pack(sample)

    def append(self, packed: PackedSample) -> int:
        """Write a sample returned by `pack`, and return the size of its fields."""
        if self._closed:
            raise ValueError(f"the shard {self._target.url!r} is closed")
        key, parts, size, payload, fields = packed
        if self._key_rule is not None:
            if key in self._keys:
                raise EncodeError(
                    f"The key {key!r} was already written to {self._target.url!r}, and samples with the same key are "
                    f"ambiguous. Number them, or pass key_rule=None if that is intended"
                )
            self._keys.add(key)
        try:
            if size < DIRECT_BYTES:
                self._buffer += parts
                self._buffered_bytes += size
            else:
                self._append_large(parts)
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
        """Finish the shard, give it its name, and set `info`.

        Raises:
            ShardWriteError: the shard cannot be finished and was removed, or the command has failed.
            MissingSidecarError: the shard is finished, but its index cannot be written.
        """
        if self._closed:
            return
        try:
            self._buffer.append(END)
            self._flush()
            if self._compressor is not None:
                self._send(self._compressor.flush())
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
        if self._index_url and self._key_rule is not None:
            index = index_from_layout(
                self.layout, self.info, end=self.size, compression=self._compression, key_rule=self._key_rule
            )
            write_index(index, self._index_url, storage_options=self._storage_options)

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
            text = f"the shard {self._target.url!r} was not closed, and was discarded"
            warn_user(text, ResourceWarning)

    @property
    def layout(self) -> list[PlacedSample]:
        """The position of each written sample: its key, its first header, and the data of its fields."""
        return [
            PlacedSample(key, begin, tuple(PlacedField(field, begin + at, size) for field, at, size in fields))
            for key, begin, fields in self._layout
        ]

    def _append_large(self, parts: list[bytes]) -> None:
        """Write large parts without copying them."""
        begin = 0
        for at, part in enumerate(parts):
            if len(part) >= DIRECT_BYTES:
                self._buffer += parts[begin:at]
                self._flush()
                self._put(part)
                begin = at + 1
        self._buffer += parts[begin:]
        self._buffered_bytes = sum(map(len, self._buffer))

    def _flush(self) -> None:
        data = b"".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        self._put(data)

    def _put(self, data: bytes) -> None:
        self._send(data if self._compressor is None else self._compressor.compress(data))

    def _send(self, data: bytes) -> None:
        if data:
            if self._digest is not None:
                self._digest.add(data)
            self._target.write(data)
            self._written += len(data)


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
