"""Compressed shards, recognised by their first bytes and read as they come."""

from __future__ import annotations

import bz2
import contextlib
import importlib
import io
import lzma
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast

from wds_datapipes.core.openers import redact
from wds_datapipes.core.optional import require
from wds_datapipes.errors import CorruptShard, TruncatedShard

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BUFFER_BYTES", "compression_name", "decompressed"]

#: The size of the buffer between a shard's bytes and who reads them.
BUFFER_BYTES = 256 << 10
#: How much compressed data is taken at once.
INPUT_BYTES = 64 << 10
#: How much compressed data zstandard gets at once: it returns all that comes of it, however much that is.
ZSTD_INPUT_BYTES = 16 << 10
#: As many first bytes as the longest mark below.
HEAD_BYTES = 10


class Unit(Protocol):
    """The decompressor of one part that stands for itself: a gzip member, a bz2 or xz stream, a zstd frame."""

    @property
    def eof(self) -> bool:
        """Whether the part was read to its end, and its checksums are right."""

    @property
    def needs_input(self) -> bool:
        """Whether nothing more comes out before something goes in."""

    @property
    def unused_data(self) -> bytes:
        """What went in behind the end."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Put compressed bytes in, and take at most ``max_length`` uncompressed ones out where that is possible."""


class GzipUnit:
    """One gzip member."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(wbits=31)  # 16: with gzip's header and checksum; 15: any window
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._object.decompress(self._object.unconsumed_tail + data, max_length)
        self.needs_input = len(out) < max_length and not self._object.unconsumed_tail
        return out


class ZstandardUnit:
    """One zstd frame, by the package zstandard."""

    needs_input = True

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:  # noqa: ARG002  zstandard knows no limit
        return bytes(self._frame.decompress(data))


class Compression(NamedTuple):
    """How one kind of compression is recognised and undone."""

    name: str
    starts: Callable[[bytes], bool]
    #: Makes what begins a `Unit`.
    unit: Callable[[], Unit]
    errors: tuple[type[Exception], ...]
    input_bytes: int = INPUT_BYTES


def starts_bz2(head: bytes) -> bool:
    """A block size, and then a block or the end mark: ``BZh9.txt`` may well be the first member of a plain tar."""
    return head[:3] == b"BZh" and head[3:4].isdigit() and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")


def starts_zstd(head: bytes) -> bool:
    """A frame of data, or one to be skipped: parallel zstd tools begin with the latter."""
    return head[:4] == b"\x28\xb5\x2f\xfd" or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5)


def zstd() -> Compression:
    """Zstd by the standard library, which has it from Python 3.14 on, or by the package zstandard."""
    with contextlib.suppress(ImportError):
        native = importlib.import_module("compression.zstd")
        return Compression("zstd", starts_zstd, native.ZstdDecompressor, (native.ZstdError,))
    zstandard = require("zstandard", extra="zst", purpose="read shards compressed with zstd")
    frames = zstandard.ZstdDecompressor()
    return Compression(
        "zstd",
        starts_zstd,
        lambda: ZstandardUnit(frames.decompressobj()),
        (zstandard.ZstdError,),
        ZSTD_INPUT_BYTES,
    )


GZIP = Compression("gzip", lambda head: head[:3] == b"\x1f\x8b\x08", GzipUnit, (zlib.error,))
BZIP2 = Compression("bz2", starts_bz2, bz2.BZ2Decompressor, (OSError, ValueError))
XZ = Compression("xz", lambda head: head[:6] == b"\xfd7zXZ\0", lzma.LZMADecompressor, (lzma.LZMAError,))


def recognised(head: bytes) -> Compression | None:
    """The compression whose mark the first bytes are."""
    for compression in (GZIP, BZIP2, XZ):
        if compression.starts(head):
            return compression
    return zstd() if starts_zstd(head) else None


def decompressed(stream: BinaryIO, *, url: str) -> BinaryIO:
    """Read a stream through what undoes its compression, if it has one; its first bytes tell, its name does not.

    gzip, bz2 and xz, and zstd with the extra ``zst``, each of one part or of many in a row, with zeros between them
    and behind them.

    Args:
        stream: what `open_url` returned. It is closed with the result, and when this raises.
        url: the shard's name in messages.

    Returns:
        A stream with a buffer; a plain local file as it is, since the tar reader asks for much at once by itself and a
        buffer in between would copy all data once more. That of a plain stream seeks if the stream does.

    Raises:
        MissingDependency: the data are zstd and the package for it is not installed.

    Reading it raises ``TruncatedShard`` where the compressed data end too early, ``CorruptShard`` where they are
    damaged or followed by something else, and whatever the stream itself raises.
    """
    if isinstance(stream, io.FileIO) and stream.seekable():
        head = stream.read(HEAD_BYTES)
        stream.seek(-len(head), io.SEEK_CUR)
        if recognised(head) is None:
            return stream
    source = buffered(stream)
    try:
        # One look is enough where the first read brings as much, so a plain stream costs no more than its buffer.
        head = source.peek(HEAD_BYTES)[:HEAD_BYTES]
        if len(head) < HEAD_BYTES:
            head = source.read(HEAD_BYTES)
            if source.seekable():
                source.seek(-len(head), io.SEEK_CUR)
            else:
                source = buffered(Rejoined(head, source))
        if compression := recognised(head):
            source = buffered(Decompressor(source, compression, url))
    except BaseException:
        source.close()
        raise
    return source


def compression_name(stream: BinaryIO) -> str | None:
    """How a stream that `decompressed` returned is compressed: ``"gzip"``, ``"bz2"``, ``"xz"``, ``"zstd"`` or not."""
    raw = getattr(stream, "raw", None)
    return raw.name_of_compression if isinstance(raw, Decompressor) else None


def buffered(stream: object) -> io.BufferedReader:
    """The buffer of every shard; it asks no more of a stream than ``readinto``."""
    return io.BufferedReader(cast(io.RawIOBase, stream), BUFFER_BYTES)


class Rejoined(io.RawIOBase):
    """A stream whose first bytes were taken, with these put back."""

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

    def __init__(self, source: io.BufferedReader, compression: Compression, url: str) -> None:
        self._source = source
        self._compression = compression
        self._url = url
        self._unit = compression.unit()
        #: Compressed bytes that were read and not used yet.
        self._input = b""
        #: Uncompressed bytes that did not fit into the buffer that was asked for.
        self._output = memoryview(b"")
        self._produced = 0

    @property
    def name_of_compression(self) -> str:
        return self._compression.name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        out = self._output or memoryview(self._decompress(len(view)))
        size = min(len(view), len(out))
        view[:size] = out[:size]
        self._output = out[size:]
        self._produced += size
        return size

    def _decompress(self, limit: int) -> bytes:
        """The next uncompressed bytes, none at the end."""
        while True:
            if self._unit.eof and not self._next_unit():
                return b""
            data = b""
            if self._unit.needs_input:
                data = self._take()
                if not data:
                    raise TruncatedShard(
                        f"The {self._compression.name} data of {self._where()} end too early. The file was cut off, or "
                        "is still being written: fetch or write it again"
                    )
            try:
                out = self._unit.decompress(data, limit)
            except self._compression.errors as error:
                raise CorruptShard(
                    f"The {self._compression.name} data of {self._where()} are damaged: {error}. Fetch or write the "
                    "file again"
                ) from error
            if out:
                return out

    def _take(self) -> bytes:
        """Compressed bytes, none at the end."""
        data = self._input or self._source.read1(self._compression.input_bytes)
        self._input = b""
        return data

    def _next_unit(self) -> bool:
        """Begin the next part, if there is one."""
        rest = self._unit.unused_data.lstrip(b"\0")
        while len(rest) < HEAD_BYTES:
            more = self._source.read1(self._compression.input_bytes)
            if not more:
                break
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not self._compression.starts(rest):
            raise CorruptShard(
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
