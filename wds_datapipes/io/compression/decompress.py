"""Decompression of shards on reading, detected by their first bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, cast

from wds_datapipes.errors import CorruptShardError, TruncatedShardError
from wds_datapipes.io.compression.formats import HEAD_BYTES, Compression, detect_compression
from wds_datapipes.io.openers import redact
from wds_datapipes.io.read_limits import DEFAULT_LIMITS, ReadLimits, limit_error, padded_too_far

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BUFFER_BYTES", "compression_name", "decompress_stream"]

#: The size of the buffer between a shard's bytes and who reads them.
BUFFER_BYTES = 256 << 10
#: No more than this is decompressed at once, but by zstandard.
STEP_BYTES = 16 << 20
#: So much may be read in any case before something comes of it: bz2 has blocks of up to 900,000 bytes.
LARGEST_BLOCK = 4 << 20


def decompress_stream(stream: BinaryIO, *, url: str, limits: ReadLimits = DEFAULT_LIMITS) -> BinaryIO:
    """Decompress a stream, if its first bytes say that it is compressed; its name does not matter.

    gzip, bz2 and xz, and zstd with the extra ``zst``, each of one part or of many in a row, with zeros between them
    and after them.

    Args:
        stream: what `open_url` returned. It is closed with the result, and when this raises.
        url: the shard's name in messages.
        limits: what it may expand to.

    Returns:
        A stream with a buffer; a plain local file as it is, since the tar reader asks for much at once by itself and a
        buffer in between would copy all data once more. That of a plain stream seeks if the stream does.

    Raises:
        MissingDependencyError: the data are zstd and the package for it is not installed.

    Reading it raises ``TruncatedShardError`` if the compressed data end too early, ``CorruptShardError`` if they are
    damaged or followed by something else, ``ReadLimitError`` if they expand too far or to nothing for too long, and
    whatever the stream itself raises.
    """
    if isinstance(stream, io.FileIO) and stream.seekable():
        head = stream.read(HEAD_BYTES)
        stream.seek(-len(head), io.SEEK_CUR)
        if detect_compression(head) is None:
            return stream
    source = buffer_stream(stream)
    try:
        # One look is enough where the first read brings as much, so a plain stream costs no more than its buffer.
        head = source.peek(HEAD_BYTES)[:HEAD_BYTES]
        if len(head) < HEAD_BYTES:
            head = source.read(HEAD_BYTES)
            if source.seekable():
                source.seek(-len(head), io.SEEK_CUR)
            else:
                source = buffer_stream(Rejoined(head, source))
        if compression := detect_compression(head):
            source = buffer_stream(Decompressor(source, compression, url, limits))
    except BaseException:
        source.close()
        raise
    return source


def compression_name(stream: BinaryIO) -> str | None:
    """The compression of a stream from `decompress_stream`: ``"gzip"``, ``"bz2"``, ``"xz"``, ``"zstd"`` or not."""
    raw = getattr(stream, "raw", None)
    return raw.name_of_compression if isinstance(raw, Decompressor) else None


def buffer_stream(stream: object) -> io.BufferedReader:
    """Buffer the stream of a shard, which needs ``readinto`` alone."""
    return io.BufferedReader(cast(io.RawIOBase, stream), BUFFER_BYTES)


class Rejoined(io.RawIOBase):
    """A stream with its first bytes, which were read already, put back."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        if not self._head:
            return self._rest.readinto1(buffer)
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._head))
        view[:size] = self._head[:size]
        self._head = self._head[size:]
        return size

    def close(self) -> None:
        self._rest.close()
        super().close()


class Decompressor(io.RawIOBase):
    """The uncompressed bytes of a compressed stream."""

    def __init__(self, source: io.BufferedReader, compression: Compression, url: str, limits: ReadLimits) -> None:
        self._source = source
        self._compression = compression
        self._url = url
        self._limits = limits
        self._unit = compression.unit()
        #: Compressed bytes that were read and not used yet.
        self._input = b""
        #: Uncompressed bytes that did not fit into the buffer that was asked for.
        self._output = memoryview(b"")
        self._produced = 0
        #: How many compressed bytes were read, and how many of them when something came out last.
        self._taken = self._taken_before = 0
        self._most_in_vain = max(limits.most("gap_bytes"), LARGEST_BLOCK)
        #: Up to where the output needs no look at the limits.
        self._looked_at = limits.most_expanded(0)

    @property
    def name_of_compression(self) -> str:
        return self._compression.name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        out = self._output or memoryview(self._decompress(min(len(view), STEP_BYTES)))
        size = min(len(view), len(out))
        view[:size] = out[:size]
        self._output = out[size:]
        self._produced += size
        if self._produced > self._looked_at:
            self._check_expansion()
        return size

    def _check_expansion(self) -> None:
        self._looked_at = self._limits.most_expanded(self._taken)
        if self._produced > self._looked_at:
            found = (
                f"The {self._compression.name} data of {self._where()} expand {self._produced / self._taken:.0f} times"
            )
            raise limit_error(self._limits, "expansion", found)

    def _decompress(self, limit: int) -> bytes:
        """The next uncompressed bytes, none at the end."""
        while True:
            if self._unit.eof and not self._next_unit():
                return b""
            data = b""
            if self._unit.needs_input:
                data = self._take()
                if not data:
                    raise TruncatedShardError(
                        f"The {self._compression.name} data of {self._where()} end too early. The file was cut off, or "
                        "is still being written: fetch or write it again"
                    )
            try:
                out = self._unit.decompress(data, limit)
            except self._compression.errors as error:
                raise CorruptShardError(
                    f"The {self._compression.name} data of {self._where()} are damaged: {error}. Fetch or write the "
                    "file again"
                ) from error
            if out:
                self._taken_before = self._taken
                return out

    def _take(self) -> bytes:
        """Compressed bytes, none at the end."""
        data = self._input or self._read()
        self._input = b""
        return data

    def _read(self) -> bytes:
        """Compressed bytes that were not read before."""
        data = self._source.read1(self._compression.input_bytes)
        self._taken += len(data)
        in_vain = self._taken - self._taken_before
        if in_vain > self._most_in_vain:
            found = (
                f"The {self._compression.name} data of {self._where()} have {in_vain} bytes that decompress to nothing"
            )
            raise limit_error(self._limits, "gap_bytes", found)
        return data

    def _next_unit(self) -> bool:
        """Begin the next part, if there is one."""
        more = self._unit.unused_data
        rest = more.lstrip(b"\0")
        zeros = len(more) - len(rest)
        while len(rest) < HEAD_BYTES and (more := self._read()):
            zeros += len(rest) + len(more)
            rest = (rest + more).lstrip(b"\0")
            zeros -= len(rest)
        if not rest:
            if zeros > self._limits.most("tail_bytes"):
                raise padded_too_far(
                    self._limits, redact(self._url), f"its {self._compression.name} data of {self._produced} bytes"
                )
            return False
        if not self._compression.starts(rest):
            raise CorruptShardError(
                f"The {self._compression.name} data of {self._where()} are followed by something else, which begins "
                f"with {rest[:HEAD_BYTES]!r}. Fetch or write the file again"
            )
        self._unit = self._compression.unit()
        self._input = rest
        return True

    def _where(self) -> str:
        return f"{redact(self._url)} (after {self._produced} uncompressed bytes)"

    def close(self) -> None:
        self._source.close()
        super().close()
