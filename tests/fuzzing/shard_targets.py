"""Archives: plain and compressed ones."""

from __future__ import annotations

import atexit
import bz2
import contextlib
import gzip
import io
import lzma
import os
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from forward_streams import forward
from fuzz_loop import Finding, Target

from wds_datapipes.errors import DuplicateKeyError, ShardError
from wds_datapipes.index import IndexOptions
from wds_datapipes.index.format.builder import build_index
from wds_datapipes.io.compression.decompress import compression_name, decompress_stream
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import TarOptions, load_wds_shards, read_shards
from wds_datapipes.tar.reader import read_members

END = bytes(1024)
#: Words of tar and PAX headers.
TOKENS = [b"ustar\x0000", b"ustar  \0", b"././@PaxHeader", b"././@LongLink", b"path=", b"size=", b"hdrcharset=BINARY"]
TOKENS += [b"12 path=a.b\n", b"11 size=16\n", b"27 GNU.sparse.realsize=10\n", b"22 GNU.sparse.major=1\n"]
TOKENS += [b"%011o\0" % size for size in (511, 512, 513, 10**6, 8**11 - 1)]
TOKENS += [b"\x80\0\0\0\0\0\0\0", b"\xff" * 12, b"\x1f\x8b\x08", b"BZh91AY&SY", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"]


def with_checksums(archive: bytes) -> bytes:
    """Correct the checksums of all headers of an archive that can be located."""
    content = bytearray(archive)
    at = 0
    while at + 512 <= len(content):
        block = content[at : at + 512]
        if any(block):
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            content[at : at + 512] = block
            digits = bytes(block[124:136]).partition(b"\0")[0].strip(b" ")
            size = int(digits, 8) if digits.isdigit() and not set(digits) & set(b"89") else 0
            at += size + -size % 512 if block[156] not in b"123456" else 0
        at += 512
    return bytes(content)


@cache
def scratch() -> Path:
    """Create a folder for this process, in memory if there is such a file system."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.TemporaryDirectory(prefix="wds-fuzz-", dir=shared)
    atexit.register(folder.cleanup)
    return Path(folder.name)


def archives() -> list[bytes]:
    """Create archives of each kind."""
    found = [END, b"", bytes(512), header("a.txt", 5, magic=b"ustar  \0")[:512]]
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        names = ["d/a.jpg", "d/a.cls", "b.seg.png", "B.TXT", "x" * 70 + "/" + "y" * 60 + ".txt", "é.txt", "README"]
        if kind != tarfile.USTAR_FORMAT:
            names.append("n" * 300 + ".json")
        found.append(archive(names, kind))
    others = (b"5", b"2", b"1", b"6", b"3", b"7")  # folders, links, a pipe, a device and a contiguous file
    found.append(b"".join(header(f"a.{number}", 0, kind) for number, kind in enumerate(others)) + END)
    found.append(header("x", 16, b"g") + padded(b"16 comment=abcd\n") + header("a.txt", 3) + padded(b"one") + END)
    found.append(header("x", 12, b"x") + padded(b"12 path=a.b\n") + header("z", 3) + padded(b"one") + END)
    found.append(header("a.txt", 3) + padded(b"one") + END + header("b.txt", 3) + padded(b"two") + END)
    found.append(header("a.bin", 1 << 15) + bytes(1 << 15) + header("b.txt", 3) + padded(b"two") + END)
    return found


def archive(names: list[str], kind: int) -> bytes:
    """Write an archive with tarfile."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = number * 200
            member.mtime = number / 2
            tar.addfile(member, io.BytesIO(bytes([65 + number]) * member.size))
    return buffer.getvalue()[: -(len(buffer.getvalue()) % 10240) or None].rstrip(b"\0") + bytes(2048)


def header(name: str, size: int, kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytes:
    """Create a crafted header."""
    block = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"%011o\0" % size + b"%011o\0" % 0
    return with_checksums((block + b" " * 8 + kind + bytes(100) + magic).ljust(512, b"\0"))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


class Outcome:
    """The result of reading."""

    def __init__(self, members: Iterator[Any]) -> None:
        self.found: list[Any] = []
        self.error: Exception | None = None
        try:
            self.found.extend(members)
        except (ShardError, DuplicateKeyError) as error:
            self.error = error

    @property
    def kind(self) -> str:
        return type(self.error).__name__

    @property
    def is_too_large(self) -> bool:
        """Whether a member is larger than memory; each stream determines this differently."""
        return "more than memory holds" in str(self.error)


def read_plain(data: bytes) -> None:
    """Read an archive from memory, in small pieces, from a file, and by its headers alone: the results must agree."""
    options = data[0] if data else 0
    content = data[1:] if options & 1 else with_checksums(data[1:])
    rules: dict[str, Any] = {"ignore_zeros": bool(options & 2), "end_marker": "optional" if options & 4 else "required"}
    whole = Outcome(read_members(io.BytesIO(content), shard="x", **rules))
    step = (1, 7, 511, 512, 4096)[options // 8 % 5] if len(content) < 1 << 14 else 4096
    bits = Outcome(read_members(forward(content, step, 512), shard="x", **rules))
    if not whole.is_too_large and not bits.is_too_large:
        same("bit by bit", (whole.found, whole.kind), (bits.found, bits.kind))
    path = scratch() / "shard.tar"
    path.write_bytes(content)
    url = str(path)
    loaded = Outcome(load_wds_shards([url], TarOptions(**rules)))
    compressed = _is_compressed(content)
    if not compressed and not whole.is_too_large and not loaded.is_too_large:
        same("from a file", (shown(whole), whole.kind), (shown(loaded), loaded.kind))
    samples = Outcome(
        group_samples(read_shards([url], TarOptions(**rules)), on_duplicate="first", on_repeated_key="ignore")
    )
    indexed(url, samples, rules, content, compressed)


def shown(outcome: Outcome) -> list[Any]:
    return [member[1:] for member in outcome.found]


def same(where: str, expected: object, found: object) -> None:
    if expected != found:
        raise Finding(f"{where}: {expected!r:.1000} is not {found!r:.1000}")


def indexed(url: str, samples: Outcome, rules: dict[str, Any], content: bytes, compressed: bool) -> None:
    """Compare the index of a shard with its samples."""
    try:
        index = build_index(url, IndexOptions(on_duplicate="first", **rules), on_repeated_key="ignore")
    except ShardError as error:
        if not samples.is_too_large:
            same("the error of the index", samples.kind, type(error).__name__)
        return
    same("an error beside an index", "NoneType", samples.kind)
    same("the keys of the index", [sample["__key__"] for sample in samples.found], index.keys)
    for sample, place in zip(samples.found, index, strict=True):
        fields = {
            field: value for field, value in sample.items() if field not in ("__key__", "__url__", "__local_path__")
        }
        # The sample omits a field with the name of one that the reader adds.
        entries = {entry.field: entry for entry in place.entries if entry.field in fields}
        same("the fields of the index", list(fields), list(entries))
        for field, entry in entries.items() if not compressed else ():
            data = content[entry.offset : entry.offset + entry.size]
            same("the data at the place in the index", fields[field], data)


def _is_compressed(content: bytes) -> bool:
    with contextlib.suppress(ShardError), decompress_stream(io.BytesIO(content), url="x") as stream:
        return compression_name(stream) is not None
    return False


def read_compressed(data: bytes) -> None:
    """Read a shard that may be compressed, from a file and in small pieces; its expansion is limited."""
    path = scratch() / "shard.tar.any"
    path.write_bytes(data[1:])
    rules: dict[str, Any] = {"ignore_zeros": True, "end_marker": "optional"}
    loaded = Outcome((name, len(data)) for _, name, data, _ in load_wds_shards([str(path)], TarOptions(**rules)))
    step = (1, 3, 64, 512, 4096)[(data[0] if data else 0) % 5]
    stream = decompress_stream(forward(data[1:], max(step, len(data) >> 10), 512), url="x")
    with stream:
        bits = Outcome((name, len(data)) for _, name, data, _ in read_members(stream, shard="x", **rules))
    same("bit by bit", (loaded.found, loaded.kind), (bits.found, bits.kind))


def compressed_seeds() -> list[bytes]:
    plain = archive(["a.txt", "a.cls", "b.txt"], tarfile.USTAR_FORMAT)
    half = len(plain) // 2
    squeeze = zstandard.ZstdCompressor(level=1).compress
    kinds: list[Any] = [lambda each: gzip.compress(each, 1, mtime=0), bz2.compress, lzma.compress, squeeze]
    found = [plain]
    for kind in kinds:
        found += [kind(plain), kind(plain[:half]) + kind(plain[half:]), kind(plain) + bytes(100), kind(b"")]
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    return [bytes([number % 5]) + each for number, each in enumerate([*found, skippable + squeeze(plain)])]


def plain_seeds() -> list[bytes]:
    return [bytes([8 * number]) + each for number, each in enumerate(archives())]


TARGETS = [
    Target("tar", read_plain, plain_seeds, 150, TOKENS),
    Target("compressed", read_compressed, cache(compressed_seeds), 50, TOKENS),
]
