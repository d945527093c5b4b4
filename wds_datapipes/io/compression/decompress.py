"""Decompression of shards on reading, detected by their first bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, cast

from wds_datapipes.errors import CorruptShardError, TruncatedShardError
from wds_datapipes.io.compression.formats import DAMAGED, HEAD_BYTES, TOO_MUCH_MEMORY, Compression, detect_compression
from wds_datapipes.io.openers import redact
from wds_datapipes.io.prefetch import PrefetchedStream
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error, trailing_zeros_error
from wds_datapipes.io.streams import RawStream, move_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: The size of the buffer between a shard's stream and its reader.
BUFFER_BYTES = 256 << 10
#: At most this many bytes are decompressed at once, except by zstandard.
STEP_BYTES = 16 << 20
#: At least this many compressed bytes may be read without output: bz2 has blocks of up to 900,000 bytes.
LARGEST_BLOCK = 4 << 20


def decompress_stream(stream: BinaryIO, *, url: str, limits: ReadLimits = DEFAULT_LIMITS) -> BinaryIO:
    """Decompress a stream if its first bytes identify a compression format; its name does not matter.

    Supports gzip, bz2, xz and, with the extra ``zst``, zstd. A stream may consist of several concatenated members or
    frames, with zero padding between and after them.

    Args:
        stream: the stream from `open_url`. It is closed with the result or if this function raises.
        url: the shard's name in errors.
        limits: the limits on its expansion.

    Returns:
        A buffered stream, which can seek if the stream is uncompressed and can seek. An uncompressed local file or a
        prefetched shard is returned as it is, since a buffer would copy all data once more.

    Raises:
        MissingDependencyError: the data are zstd, and the package for it is not installed.

    Reading the result raises ``TruncatedShardError`` if the compressed data end too early, ``CorruptShardError`` if
    they are damaged or followed by other data, ``ReadLimitError`` if they exceed the limits, and the stream's errors.
    """
    if isinstance(stream, io.FileIO) and stream.seekable():
        head = stream.read(HEAD_BYTES)
        stream.seek(-len(head), io.SEEK_CUR)
        if detect_compression(head) is None:
            return stream
    source = cast(io.BufferedReader, stream) if isinstance(stream, PrefetchedStream) else buffer_stream(stream)
    try:
        # Peeking suffices if the first read returns enough bytes, so an uncompressed stream costs only its buffer.
        head = source.peek(HEAD_BYTES)[:HEAD_BYTES]
        if len(head) < HEAD_BYTES:
            head = source.read(HEAD_BYTES)
            if source.seekable():
                source.seek(-len(head), io.SEEK_CUR)
            else:
                source = buffer_stream(_Rejoined(head, source))
        if compression := detect_compression(head):
            source = buffer_stream(Decompressor(source, compression, url, limits))
    except BaseException:
        source.close()
        raise
    return source


def compression_name(stream: BinaryIO) -> str | None:
    """Return the name of the compression of a stream from `decompress_stream`, such as ``"gzip"``, or None."""
    raw = getattr(stream, "raw", None)
    return raw.kind if isinstance(raw, Decompressor) else None


def buffer_stream(stream: object) -> io.BufferedReader:
    """Buffer a stream, which only needs the method ``readinto``."""
    return io.BufferedReader(cast(io.RawIOBase, stream), BUFFER_BYTES)


class _Rejoined(RawStream):
    """A stream with the bytes that were already read put back at its start."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head = memoryview(head)
        self._rest = rest

    def readinto(self, buffer: Buffer, /) -> int:
        if not self._head:
            return self._rest.readinto1(buffer)
        size, self._head = move_bytes(self._head, buffer)
        return size

    def _release(self) -> None:
        self._rest.close()


class Decompressor(RawStream):
    """Raw stream of the decompressed bytes of a compressed stream."""

    def __init__(self, source: io.BufferedReader, compression: Compression, url: str, limits: ReadLimits) -> None:
        self._source = source
        #: The name of the compression, such as ``gzip``.
        self.kind = compression.name
        self._compression = compression
        self._url = url
        self._limits = limits
        self._unit = compression.unit(limits)
        #: Compressed bytes that were read but not used yet.
        self._input = b""
        #: Decompressed bytes that did not fit into the buffer of the last read.
        self._output = memoryview(b"")
        self._produced = 0
        #: Number of compressed bytes read, now and at the last output.
        self._consumed = self._consumed_at_output = 0
        self._max_without_output = max(limits.most("gap_bytes"), LARGEST_BLOCK)
        #: The number of decompressed bytes at which the expansion is checked next.
        self._next_check = limits.most_expanded(0)

    def readinto(self, buffer: Buffer, /) -> int:  # noqa: D102
        out = self._output or memoryview(self._decompress(min(memoryview(buffer).nbytes, STEP_BYTES)))
        size, self._output = move_bytes(out, buffer)
        self._produced += size
        if self._produced > self._next_check:
            self._check_expansion()
        return size

    def _check_expansion(self) -> None:
        self._next_check = self._limits.most_expanded(self._consumed)
        if self._produced > self._next_check:
            ratio = self._produced / self._consumed
            found = f"The {self.kind} data of {self._location()} expand {ratio:.0f} times"
            raise limit_error(self._limits, "expansion", found)

    def _decompress(self, limit: int) -> bytes:
        """Return the next decompressed bytes; ``b""`` at the end."""
        while True:
            if self._unit.eof and not self._next_unit():
                return b""
            data = b""
            if self._unit.needs_input:
                data, self._input = self._input or self._read(), b""
                if not data:
                    raise TruncatedShardError(
                        f"The {self.kind} data of {self._location()} end too early. The file is truncated "
                        "or still being written: fetch or write it again"
                    )
            try:
                out: bytes = self._unit.decompress(data, limit)
            except DAMAGED as error:
                if any(words in str(error) for words in TOO_MUCH_MEMORY):
                    found = f"The {self.kind} data of {self._location()} need a larger window or dictionary"
                    raise limit_error(self._limits, "window_bytes", found) from error
                raise CorruptShardError(
                    f"The {self.kind} data of {self._location()} are damaged: {error}. Fetch or write the file again"
                ) from error
            if out:
                self._consumed_at_output = self._consumed
                return out

    def _read(self) -> bytes:
        """Read compressed bytes from the source."""
        data = self._source.read1(self._compression.input_bytes)
        self._consumed += len(data)
        count = self._consumed - self._consumed_at_output
        if count > self._max_without_output:
            found = f"The {self.kind} data of {self._location()} have {count} bytes without any content"
            raise limit_error(self._limits, "gap_bytes", found)
        return data

    def _next_unit(self) -> bool:
        """Start the next member or frame; return False at the end of the stream."""
        more = self._unit.unused_data
        rest = more.lstrip(b"\0")
        zeros = len(more) - len(rest)
        while len(rest) < HEAD_BYTES and (more := self._read()):
            zeros += len(rest) + len(more)
            rest = (rest + more).lstrip(b"\0")
            zeros -= len(rest)
        if not rest:
            if zeros > self._limits.most("tail_bytes"):
                raise trailing_zeros_error(
                    self._limits, redact(self._url), f"its {self.kind} data of {self._produced} bytes"
                )
            return False
        if not self._compression.magic.match(rest):
            raise CorruptShardError(
                f"The {self.kind} data of {self._location()} are followed by other data, which start with "
                f"{rest[:HEAD_BYTES]!r}. Fetch or write the file again"
            )
        self._unit = self._compression.unit(self._limits)
        self._input = rest
        return True

    def _location(self) -> str:
        return f"{redact(self._url)} (after {self._produced} uncompressed bytes)"

    def _release(self) -> None:
        self._source.close()
