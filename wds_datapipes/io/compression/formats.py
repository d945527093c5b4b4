"""Compression formats of shards: a table of their names, suffixes, magic bytes and codecs."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from wds_datapipes.extras import require
from wds_datapipes.io.openers import redact, split_scheme
from wds_datapipes.io.read_limits import ReadLimits

Compress: TypeAlias = "bool | Literal['gz', 'bz2', 'xz', 'zst'] | None"
"""``None`` selects by the file name, ``True`` is gzip, and ``False`` disables compression."""

#: Compressed bytes per call of a decompressor.
INPUT_BYTES = 64 << 10
#: Compressed bytes per call of zstandard, which returns the whole output: up to 32,768 times as many bytes.
ZSTD_INPUT_BYTES = 4 << 10
#: The smallest and the largest window of zstd.
ZSTD_LEAST_BYTES, ZSTD_MOST_BYTES = 1 << 10, 1 << 31
#: Length of the longest magic bytes below.
HEAD_BYTES = 10
#: The errors of decompressors for damaged data.
DAMAGED = (OSError, ValueError, zlib.error, lzma.LZMAError)
#: What xz and zstd say of data that need more memory than they may take.
TOO_MUCH_MEMORY = ("Memory usage limit", "too much memory")


class _GzipDecompressorUnit:
    """One gzip member."""

    def __init__(self, _limits: ReadLimits) -> None:
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


class _ZstdDecompressorUnit:
    """One zstd frame."""

    needs_input = True

    def __init__(self, limits: ReadLimits) -> None:
        zstandard = require("zstandard", extra="zst", purpose="read shards compressed with zstd")
        window = min(max(limits.most("window_bytes"), ZSTD_LEAST_BYTES), ZSTD_MOST_BYTES)
        self._frame = zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
        self._error = zstandard.ZstdError

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:  # noqa: ARG002  zstandard has no such limit
        try:
            return bytes(self._frame.decompress(data))
        except self._error as error:
            raise ValueError(str(error)) from error


def gzip_compressor() -> Any:
    """Return a compressor whose header contains neither time nor name."""
    return zlib.compressobj(6, zlib.DEFLATED, 31)  # as above


def zstd_compressor() -> Any:
    """Return a compressor of the package zstandard."""
    return require("zstandard", extra="zst", purpose="write shards compressed with zstd").ZstdCompressor().compressobj()


class Compression(NamedTuple):
    """A compression format of shards."""

    #: The name in indexes and messages.
    name: str
    #: The suffix of a compressed file, which is also the value of ``compress``.
    suffix: str
    #: The suffixes that replace ``.tar`` and the suffix.
    short: tuple[str, ...]
    #: Matches the first bytes.
    magic: re.Pattern[bytes]
    #: Creates the decompressor of one unit: a gzip member, a bz2 or xz stream, a zstd frame. It works like those of the
    #: standard library, and observes ``window_bytes``.
    unit: Callable[[ReadLimits], Any]
    #: Creates a compressor, as in the standard library.
    compressor: Callable[[], Any]
    input_bytes: int = INPUT_BYTES


#: Writing is deterministic. To add a format, add a row here and its suffix to `Compress`.
COMPRESSIONS = (
    # A block size and a block or end marker follow ``BZh``: a plain tar may start with a ``BZh9.txt``.
    Compression(
        "bz2",
        "bz2",
        (".tbz", ".tbz2"),
        re.compile(rb"BZh\d(?:1AY&SY|\x17\x72\x45\x38\x50\x90)"),
        lambda _limits: bz2.BZ2Decompressor(),
        bz2.BZ2Compressor,
    ),
    GZIP := Compression("gzip", "gz", (".tgz",), re.compile(rb"\x1f\x8b\x08"), _GzipDecompressorUnit, gzip_compressor),
    Compression(
        "xz",
        "xz",
        (".txz",),
        re.compile(rb"\xfd7zXZ\0"),
        lambda limits: lzma.LZMADecompressor(memlimit=limits.window_bytes),
        lzma.LZMACompressor,
    ),
    # A data frame, or a skippable frame, which parallel zstd tools write first.
    Compression(
        "zstd",
        "zst",
        (".tzst",),
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        _ZstdDecompressorUnit,
        zstd_compressor,
        ZSTD_INPUT_BYTES,
    ),
)

#: The suffixes of shards in a directory.
SHARD_SUFFIXES = (
    ".tar",
    *(f".tar.{each.suffix}" for each in COMPRESSIONS),
    *(short for each in COMPRESSIONS for short in each.short),
)
#: Braces that patterns of shards expand.
BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
#: Suffixes of other formats: programs that choose by name would fail to open a shard with one of them. Suffixes of
#: records may be followed by a compression suffix.
FOREIGN_SUFFIXES = (
    *(".7z", ".br", ".jar", ".lz", ".lz4", ".lzma", ".lzo", ".rar", ".sz", ".z", ".zip"),
    *(".cbor", ".cbors", ".jsonl", ".jsonlines", ".mp", ".mps", ".msgpack", ".msgpacks", ".ndjson"),
)


def detect_compression(head: bytes) -> Compression | None:
    """Return the compression format that the first bytes of a stream identify, or None."""
    return next((each for each in COMPRESSIONS if each.magic.match(head)), None)


def find_compression(compress: Compress, url: str) -> Compression | None:
    """Return the compression of a new shard, or None if it is not compressed.

    Args:
        compress: the requested compression.
        url: the name of the shard; ignored for a command or standard output.

    Raises:
        ValueError: ``compress`` is not a known compression, or the name is that of another format, of several shards
            or of a folder.
    """
    name = "" if split_scheme(url)[0] in ("pipe", "-") else url.lower()
    several = "braces name" if BRACES.search(name) else "* names" if "*" in name else ""
    if several:
        raise ValueError(
            f"{redact(url)!r} is the name of a shard to write, and its {several} several shards to read. Use a "
            "placeholder for the number, as in train-%06d.tar"
        )
    if name.endswith("/"):
        raise ValueError(
            f"{redact(url)!r} ends with a slash, so it names a folder. Name shards in it, as in "
            f"{redact(url)}train-%06d.tar"
        )
    plain = name
    for each in COMPRESSIONS:
        plain = plain.removesuffix(f".{each.suffix}")
    if plain.endswith(FOREIGN_SUFFIXES):
        suffixes = [".tar", *(f".tar.{each.suffix}" for each in COMPRESSIONS)]
        raise ValueError(
            f"{redact(url)!r} is not the name of a shard, which is a tar archive, plain or compressed. Use the "
            f"extension {', '.join(suffixes[:-1])} or {suffixes[-1]}"
        )
    if compress is None:
        return next((each for each in COMPRESSIONS if name.endswith((f".{each.suffix}", *each.short))), None)
    if compress is False:
        return None
    suffix = "gz" if compress is True else compress
    found = next((each for each in COMPRESSIONS if each.suffix == suffix), None)
    if found is None:
        known = ", ".join(each.suffix for each in COMPRESSIONS)
        raise ValueError(f"compress must be True, False, None or one of {known}, not {compress!r}")
    return found


def strip_shard_suffix(name: str) -> str:
    """Return the name of a tar archive without its suffix.

    >>> strip_shard_suffix("train-000.tar.zst"), strip_shard_suffix("a.tgz"), strip_shard_suffix("a.json")
    ('train-000', 'a', 'a.json')
    """
    suffix = max((each for each in SHARD_SUFFIXES if name.endswith(each)), key=len, default="")
    return name.removesuffix(suffix)
