"""Compression of shards on writing. Deterministic: compressed headers contain neither time nor name."""

from __future__ import annotations

import bz2
import contextlib
import importlib
import lzma
import zlib
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, cast

from wds_datapipes.extras import require
from wds_datapipes.io.openers import redact, split_scheme

__all__ = ["Compress", "Compressor", "compression_kind", "find_compressor"]

Compress: TypeAlias = "bool | Literal['gz', 'bz2', 'xz', 'zst'] | None"
"""``None`` selects by the file name; ``True`` is gzip, and ``False`` disables compression."""

#: File name extension -> compression.
ENDINGS = {
    ".bz2": "bz2",
    ".gz": "gz",
    ".tbz": "bz2",
    ".tbz2": "bz2",
    ".tgz": "gz",
    ".txz": "xz",
    ".tzst": "zst",
    ".xz": "xz",
    ".zst": "zst",
}

#: Extensions of other formats: programs that choose by the name would fail to open such a shard.
FOREIGN_ENDINGS = (".7z", ".br", ".jar", ".lz", ".lz4", ".lzma", ".lzo", ".rar", ".sz", ".z", ".zip")


class Compressor(Protocol):
    """A compressor object, as in the standard library."""

    def compress(self, data: bytes, /) -> bytes:
        """Compress bytes, and return those that are ready."""

    def flush(self) -> bytes:
        """Finish compression, and return the remaining bytes."""


def find_compressor(compress: Compress, url: str) -> Compressor | None:
    """Return the compressor of a new shard, or ``None`` if it is not compressed.

    Args:
        compress: the requested compression.
        url: the name of the shard; ignored for a command or standard output.

    Raises:
        ValueError: ``compress`` is not a known compression, or the name has the extension of another format.
        MissingDependencyError: zstd is selected, and its package is not installed.
    """
    kind = compression_kind(compress, url)
    return None if kind is None else MAKERS[kind]()


def compression_kind(compress: Compress, url: str) -> str | None:
    """Return the compression of a new shard: ``"gz"``, ``"bz2"``, ``"xz"``, ``"zst"`` or ``None``.

    Raises:
        ValueError: ``compress`` is not a known compression, or the name has the extension of another format.
    """
    kind: object = "gz" if compress is True else compress
    if split_scheme(url)[0] not in ("pipe", "-") and url.lower().endswith(FOREIGN_ENDINGS):
        raise ValueError(
            f"{redact(url)!r} is not the name of a shard, which is a tar archive, plain or compressed. Use the "
            f"extension .tar, .tar.gz, .tar.bz2, .tar.xz or .tar.zst"
        )
    if kind is None and split_scheme(url)[0] not in ("pipe", "-"):
        kind = next((kind for ending, kind in ENDINGS.items() if url.lower().endswith(ending)), None)
    if kind is None or kind is False:
        return None
    if kind not in MAKERS:
        raise ValueError(f"compress must be True, False, None or one of {', '.join(MAKERS)}, not {compress!r}")
    return str(kind)


def _gzip() -> Compressor:
    return zlib.compressobj(6, zlib.DEFLATED, 31)  # 16: with gzip's header and checksum; 15: the largest window


def _zstd() -> Compressor:
    with contextlib.suppress(ImportError):
        return cast(Compressor, importlib.import_module("compression.zstd").ZstdCompressor())
    zstandard = require("zstandard", extra="zst", purpose="write shards compressed with zstd")
    return cast(Compressor, zstandard.ZstdCompressor().compressobj())


MAKERS: dict[str, Callable[[], Compressor]] = {
    "bz2": bz2.BZ2Compressor,
    "gz": _gzip,
    "xz": lzma.LZMACompressor,
    "zst": _zstd,
}
