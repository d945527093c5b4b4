"""Headers that are odd but valid: what tarfile and GNU tar read, the reader reads alike."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from wds_datapipes import ReadLimits
from wds_datapipes.errors import CorruptShardError, ReadLimitError, TruncatedShardError
from wds_datapipes.hints import END_MARKER, FINAL, IGNORE_ZEROS
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members

END = bytes(1024)


def header(
    name: bytes = b"a.txt",
    size: bytes = b"00000000005\0",
    kind: bytes = b"0",
    *,
    magic: bytes = b"ustar\x0000",
    checksum: str = "{:06o}\0 ",
    **fields: bytes,
) -> bytes:
    """Return a header whose number fields are as given; ``fields`` are the bytes from an offset, as ``at_345``."""
    block = bytearray(512)
    parts = {0: name, 100: b"0000644\0", 124: size, 136: b"00000000000\0", 156: kind, 257: magic, 148: b" " * 8}
    for start, content in {**parts, **{int(key[3:]): value for key, value in fields.items()}}.items():
        block[start : start + len(content)] = content
    block[148:156] = checksum.format(sum(block)).encode()
    return bytes(block)


def with_content(head: bytes, content: bytes = b"hello") -> bytes:
    return head + content + bytes(-len(content) % 512)


def extension(kind: bytes, content: bytes, **options: Any) -> bytes:
    return with_content(header(b"././@LongLink", b"%011o\0" % len(content), kind, **options), content)


def records(**values: bytes) -> bytes:
    written = b""
    for key, value in values.items():
        rest = b" %b=%b\n" % (key.replace("_", ".").encode(), value)
        size = next(size for size in range(len(rest), len(rest) + 9) if size == len(str(size)) + len(rest))
        written += b"%d%b" % (size, rest)
    return written


A, B = with_content(header()), with_content(header(b"b.txt"))
EMPTY = b"00000000000\0"
GNU: dict[str, Any] = {"magic": b"ustar  \0"}

ODD = {
    "size in spaces": with_content(header(size=b"          5 ")),
    "size before zeros": with_content(header(size=b"         5\0\0")),
    "size after a tab": with_content(header(size=b"\t00000005 \0\0")),
    "size that fills its field": with_content(header(size=b"000000000005")),
    "size in base 256": with_content(header(size=b"\x80" + bytes(10) + b"\x05")),
    "size before other bytes": with_content(header(size=b"0000005\0junk")),
    "negative time": with_content(header(at_136=b"\xff" * 12)),
    "no magic": with_content(header(magic=bytes(8))),
    "no magic and no kind": with_content(header(kind=b"\0", magic=bytes(8))),
    "magic of GNU": with_content(header(**GNU)),
    "unknown magic": with_content(header(magic=b"USTAR\x0000")),
    "no version": with_content(header(magic=b"ustar\0\0\0")),
    "prefix": with_content(header(at_345=b"folder")),
    "checksum before a space": with_content(header(checksum="{:06o} \0")),
    "checksum of seven digits": with_content(header(checksum="{:07o}\0")),
    "checksum of eight digits": with_content(header(checksum="{:08o}")),
    "checksum after spaces": with_content(header(checksum=" {:5o}\0 ")),
    "contiguous": with_content(header(kind=b"7")),
    "hard link with a size": A + header(b"c.bin", b"%011o\0" % 5, b"1", at_157=b"a.txt"),
    "folder with a size": header(b"d/", b"%011o\0" % 5, b"5"),
    "old folder": header(b"d/", EMPTY, b"\0", magic=bytes(8)),
    "volume label": header(b"label", EMPTY, b"V", **GNU),
    "PAX path": extension(b"x", records(path=b"x/y.txt")) + A,
    "PAX size": extension(b"x", records(size=b"0005")) + with_content(header(size=EMPTY)),
    "PAX without records": extension(b"x", b"") + A,
    "PAX padded with zeros": extension(b"x", records(path=b"x") + bytes(7)) + A,
    "binary attribute": extension(b"x", records(SCHILY_xattr_user=b"\0\xff\n=1")) + A,
    "global comment": extension(b"g", records(comment=b"abc")) + A,
    "PAX of Solaris": extension(b"X", records(path=b"s.txt")) + A,
    "long name": extension(b"L", b"x" * 150 + b".txt\0", **GNU) + A,
    "long name without a zero": extension(b"L", b"x.txt", **GNU) + A,
    "name that fills its field": with_content(header(b"n" * 96 + b".txt")),
    "name in Latin-1": with_content(header(b"\xe9.txt")),
}


def read(archive: bytes, **options: Any) -> list[tuple[str, bytes]]:
    return [(member[1], member[2]) for member in read_members(io.BytesIO(archive), shard="s.tar", **options)]


def read_by_tarfile(archive: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive), encoding="utf-8") as found:
        return [(member.name, found.extractfile(member).read()) for member in found if member.isreg()]  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ODD)
@pytest.mark.filterwarnings("ignore:.*links are skipped")
def test_odd_headers_are_read_as_by_tarfile_and_gnu_tar(case: str, tmp_path: Path) -> None:
    archive = ODD[case] + B + END
    found = read(archive)
    assert found == read_by_tarfile(archive)
    assert found[-1] == ("b.txt", b"hello")
    file = tmp_path / "odd.tar"
    file.write_bytes(archive)
    listed = subprocess.run(["tar", "--quoting-style=literal", "-tf", file], capture_output=True, check=True).stdout
    names = listed.decode("utf-8", "surrogateescape").splitlines()
    assert [name for name, _ in found] == [name for name in names if name.endswith((".txt", "x"))]


@pytest.mark.parametrize("kind", [b"x", b"L"])
def test_long_headers_have_a_limit_with_a_name(kind: bytes) -> None:
    content = records(SCHILY_xattr_user=b"x" * (3 << 20)) if kind == b"x" else b"x" * (1 << 20) + b"\0"
    archive = extension(kind, content) + A + END
    with pytest.raises(ReadLimitError, match=r"byte 0, and the limit is header_bytes=1048576\. If the shard is valid"):
        read(archive)
    limits = ReadLimits(header_bytes=4 << 20, name_bytes=None)
    assert read(archive, limits=limits) == read_by_tarfile(archive)


@pytest.mark.parametrize("zeros", [512, 1024, 4096])
@pytest.mark.parametrize("rest", [b"garbage", b"garbage!" * 64, b"\xa5" * 3000, A + END])
def test_what_follows_the_end_is_ignored_on_request(zeros: int, rest: bytes) -> None:
    archive = A + B + bytes(zeros) + rest
    with pytest.raises(CorruptShardError, match="after the end marker") as caught:
        read(archive)
    assert caught.value.hints == (IGNORE_ZEROS, FINAL)
    assert read(archive, end_marker="final") == read_by_tarfile(archive) == [("a.txt", b"hello"), ("b.txt", b"hello")]
    stream = io.BytesIO(archive)
    list(read_members(stream, shard="s.tar", end_marker="final"))
    assert stream.read() == b""


@pytest.mark.parametrize("end_marker", ["required", "final"])
@pytest.mark.parametrize("zeros", [0, 512])
def test_an_archive_that_ends_between_two_files_is_truncated_even_if_data_may_follow(
    zeros: int, end_marker: EndMarker
) -> None:
    archive = A + B + bytes(zeros)
    with pytest.raises(TruncatedShardError) as caught:
        read(archive, end_marker=end_marker)
    assert caught.value.hints == (END_MARKER,)
    assert read(archive, end_marker="optional") == read_by_tarfile(archive)
