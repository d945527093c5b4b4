"""Tar writer: writes samples to the members of one shard."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_datapipes.errors import UnwritableSampleError
from wds_datapipes.index.build import written_index
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

#: How much is collected before it is written, in bytes; data of that size are written without being copied.
FLUSH_BYTES = 256 << 10
DIRECT_BYTES = 32 << 10
#: What an index calls the kinds of compression.
COMPRESSIONS = {"bz2": "bz2", "gz": "gzip", "xz": "xz", "zst": "zstd"}


class TarWriter:
    """Writes samples to one shard, which appears under its name when it is complete.

    It is a context manager: at its end the shard is finished, and when an error or Ctrl-C ends it, nothing is left,
    neither under the name nor under a temporary one. A local file gets its name when all of it is on the disk; where
    two writers write the same one at a time, it is that of the writer that finishes last, and whole. What is
    written to a command, to standard output or to an open stream cannot be taken back; it then lacks its end marker,
    and a command is killed before it sees the end of its input.

    The same samples give the same bytes, on any day and any machine, compressed or not: headers are plain ustar, with a
    PAX header only before names that do not fit (long ones, and others than ASCII) and sizes from 8 GiB.

    Args:
        target: a path, a URL of a file system that fsspec knows, ``pipe:COMMAND``, ``-`` (standard output) or an open
            binary stream, which stays open.
        user: the name of the files' owner, whose number is 0.
        group: the name of their group, whose number is 0.
        mode: their permissions.
        mtime: when they were changed, in seconds since 1970, without a fraction.
        compress: ``"gz"``, ``"bz2"``, ``"xz"`` or ``"zst"``; ``True`` is ``"gz"``, ``False`` is none, and ``None`` goes
            by the name: ``.tar.gz``, ``.tgz`` and so on.
        encoder: ``True`` encodes values as ``wds_encode`` does; a dict is its keywords, such as
            ``{"jpg": {"quality": 90}}``; a function gets the sample and returns one of bytes; with ``False`` or
            ``None``, all values have to be bytes.
        keep_meta: write the values of keys that begin with ``__`` too, but for ``__key__``; these are str or bytes.
        unsafe: allow codecs whose data can run code when it is decoded, as for ``wds_encode``.
        key_rule: how the shard will be read. Names that this rule would read back as others are refused, and so is a
            key that was written before. ``None`` writes any names, and any key again.
        storage_options: passed to the file system of a URL.
        digest: compute the SHA-256 of the shard for `info`, which takes as long as writing large fields does.
        index: write the index of the shard beside it, once it is finished; `ShardIndex` tells what that is. With a
            ``digest``, the index has it.

    Attributes:
        samples: how many samples were written.
        size: the size of the archive so far, before it is compressed, in bytes, without its end marker.
        info: the `ShardInfo` of the finished shard, and ``None`` before that.

    Raises:
        ShardWriteError: the shard cannot be written, at any time.
        CommandError: the command has failed.

    Examples:
        >>> with TarWriter("a.tar") as shard:
        ...     for number in range(2):
        ...         _ = shard.write({"__key__": f"{number:03d}", "txt": "a cat", "cls": number})
        >>> shard.info.samples, shard.info.bytes
        (2, 5120)
        >>> [member.name for member in ShardList("a.tar").load_wds_shards()]
        ['000.txt', '000.cls', '001.txt', '001.cls']
    """

    #: True until there is something to close: ``__del__`` also runs when the arguments do not fit ``__init__``.
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
            raise ValueError("index=True needs the name of a file, to write the index next to it, and a key_rule")
        self._index_place = index_url(name) if index else ""
        self._compression = COMPRESSIONS.get(compression_kind(compress, name) or "")
        self._storage_options = storage_options
        self._keys: set[str] = set()
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._written = 0
        self._digest = HashingWriter() if digest else None
        self.samples = self.size = 0
        self._layout: list[tuple[str, int, list[tuple[str, int, int]]]] = []
        self.info: ShardInfo | None = None
        self._target = open_target(target, storage_options)
        self._owner = os.getpid()
        self._closed = False

    def write(self, sample: Sample) -> int:
        """Write a sample, its fields in their order.

        A sample that is refused leaves nothing in the shard, which can be written on. After any other error the shard
        is discarded.

        Returns:
            The bytes of all fields together, without headers.

        Raises:
            EncodeError: a value cannot be encoded.
            UnwritableSampleError: the sample would be read back as another.
            UnsafeCodecError: a field needs ``unsafe``.
            MissingDependencyError: a field needs a package that is not installed.
            ShardWriteError: the disk is full, or the store has failed.
            CommandError: the command has failed.
        """
        return self.append(self.pack(sample))

    def pack(self, sample: Sample) -> PackedSample:
        """Encode and check a sample, and make its headers; nothing is written."""
        return self._packer.pack(sample)

    def append(self, packed: PackedSample) -> int:
        """Write a sample that `pack` has returned, and return the bytes of its fields."""
        if self._closed:
            raise ValueError(f"the shard {self._target.url!r} is closed, and takes no more samples")
        key, parts, size, payload, fields = packed
        if self._key_rule is not None:
            if key in self._keys:
                raise UnwritableSampleError(
                    f"The sample {key!r} was written to {self._target.url!r} before, and samples of one key could not "
                    f"be told apart. Number them, or pass key_rule=None if that is meant"
                )
            self._keys.add(key)
        try:
            if size < DIRECT_BYTES:
                self._waiting += parts
                self._waiting_bytes += size
            else:
                self._append_large(parts)
            if self._waiting_bytes >= FLUSH_BYTES:
                self._flush()
        except BaseException:
            self.discard()
            raise
        self._layout.append((key, self.size, fields))
        self.size += size
        self.samples += 1
        return payload

    def close(self) -> None:
        """Finish the shard, and give it its name; `info` then describes it.

        Raises:
            ShardWriteError: that failed, and nothing is left.
            MissingSidecarError: the shard is finished, and its index cannot be written.
            CommandError: the command has ended with an error.
        """
        if self._closed:
            return
        try:
            self._waiting.append(END)
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
        if self._index_place and self._key_rule is not None:
            index = written_index(
                self.layout, self.info, end=self.size, compression=self._compression, key_rule=self._key_rule
            )
            write_index(index, self._index_place, storage_options=self._storage_options)

    def discard(self) -> None:
        """Remove the shard, unless it is finished."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            if os.getpid() == self._owner:  # and not in a forked process, which has a copy of the writer
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
            self.discard()  # first, as a warning may be an error
            text = f"the shard {self._target.url!r} was not closed, so nothing of it was kept"
            warn_user(text, ResourceWarning)

    @property
    def layout(self) -> list[PlacedSample]:
        """The position of each written sample: its key, its first header, and the data of its fields."""
        return [
            PlacedSample(key, begin, tuple(PlacedField(field, begin + at, size) for field, at, size in fields))
            for key, begin, fields in self._layout
        ]

    def _append_large(self, parts: list[bytes]) -> None:
        """Write what is large without copying it."""
        begin = 0
        for at, part in enumerate(parts):
            if len(part) >= DIRECT_BYTES:
                self._waiting += parts[begin:at]
                self._flush()
                self._put(part)
                begin = at + 1
        self._waiting += parts[begin:]
        self._waiting_bytes = sum(map(len, self._waiting))

    def _flush(self) -> None:
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._put(data)

    def _put(self, data: bytes) -> None:
        self._send(data if self._compressor is None else self._compressor.compress(data))

    def _send(self, data: bytes) -> None:
        if data:
            if self._digest is not None:
                self._digest.take(data)
            self._target.write(data)
            self._written += len(data)


#: How much is handed to the thread at once, in bytes: what is less is hashed by the caller, before a thread has begun.
BATCH_BYTES = 1 << 20


class HashingWriter:
    """Computes the SHA-256 of written data in a thread.

    A thread hashes what was collected while the next is collected and written. So it holds as much as was collected
    last, or one value if that is larger.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pool: ThreadPoolExecutor | None = None
        self._hashed: Future[None] | None = None
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def take(self, data: bytes) -> None:
        """Add data, to be hashed before `hexdigest` returns."""
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
        """End the thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown()

    def _wait(self) -> None:
        if self._hashed is not None:
            self._hashed.result()
            self._hashed = None

    def _update(self, batch: list[bytes]) -> None:
        for data in batch:
            self._hash.update(data)
