"""Archives from Python's tarfile, from GNU tar or with crafted headers are read as tarfile reads them."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import pytest
from drawn_archives import NOISE, Recipe, recipes, written
from forward_streams import forward
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import (
    CorruptShardError,
    ReadLimitError,
    ShardError,
    TruncatedShardError,
    UnsupportedMemberError,
)
from wds_datapipes.io.read_limits import ReadLimits
from wds_datapipes.shards.loading import TarOptions, load_wds_shards
from wds_datapipes.tar.reader import read_members

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Name, data, offset.
Content = tuple[str, bytes, int]

END = bytes(1024)


def ours(archive: bytes, open_stream: Callable[[bytes], BinaryIO] = io.BytesIO, **options: Any) -> list[Content]:
    return [
        (name, data, offset) for _, name, data, offset in read_members(open_stream(archive), shard="x.tar", **options)
    ]


def by_tarfile(archive: bytes, **options: Any) -> list[Content]:
    found = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:", encoding="utf-8", **options) as tar:
        for member in tar:
            if member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                found.append((member.name, content.read(), member.offset))
    return found


# Archives that tarfile writes

PARTS = st.text("ab.é漢 _-", min_size=1, max_size=12).filter(lambda part: part not in (".", ".."))
#: Around the lengths that fit into the name field (100 bytes), and into the prefix field with it (155).
LENGTHS = st.sampled_from([1, 2, 5, 98, 99, 100, 101, 154, 155, 156])
NAMES = st.one_of(
    st.lists(PARTS, min_size=1, max_size=4).map("/".join),
    st.builds("{}/{}".format, LENGTHS.map("d".__mul__), LENGTHS.map("f".__mul__)),
    st.integers(1, 700).map("n".__mul__),
)
STREAMS = st.one_of(
    st.just(io.BytesIO),
    st.builds(
        lambda step, buffer_size: lambda data: forward(data, step, buffer_size),
        st.sampled_from([1, 7, 512, 4096, 1 << 20]),
        st.sampled_from([1, 512, 700, 1 << 18]),
    ),
)


RECIPES = recipes(NAMES)


@given(recipe=RECIPES, open_stream=STREAMS)
@settings(deadline=None, max_examples=80)
def test_an_archive_of_tarfile_reads_as_tarfile_reads_it(
    recipe: Recipe, open_stream: Callable[[bytes], BinaryIO]
) -> None:
    archive = written(recipe)
    assert ours(archive, open_stream) == by_tarfile(archive)


@given(recipe=RECIPES, open_stream=STREAMS, wanted=st.sets(st.integers(0, 23)))
@settings(deadline=None, max_examples=30)
def test_skipped_members_do_not_change_the_rest(
    recipe: Recipe, open_stream: Callable[[bytes], BinaryIO], wanted: set[int]
) -> None:
    archive = written(recipe)
    asked: list[str] = []

    def select(name: str) -> bool:
        asked.append(name)
        return len(asked) - 1 in wanted

    everything = by_tarfile(archive)
    assert ours(archive, open_stream, select_files=select) == [
        content for number, content in enumerate(everything) if number in wanted
    ]
    assert asked == [name for name, _, _ in everything]


@given(several=st.lists(RECIPES, min_size=1, max_size=3), open_stream=STREAMS)
@settings(deadline=None, max_examples=20)
def test_concatenated_archives(several: list[Recipe], open_stream: Callable[[bytes], BinaryIO]) -> None:
    parts = [written(recipe) for recipe in several]
    archive = b"".join(parts)
    limits = ReadLimits(tail_bytes=None)  # archives without a member are zeros
    contents = ours(archive, open_stream, ignore_zeros=True, limits=limits)
    assert contents == by_tarfile(archive, ignore_zeros=True)
    assert [content[:2] for content in contents] == [content[:2] for part in parts for content in by_tarfile(part)]
    if any(part.strip(b"\0") for part in parts[1:]):
        with pytest.raises(
            CorruptShardError, match=r"x\.tar has data at byte \d+, after the end marker.*ignore_zeros=True"
        ):
            ours(archive, open_stream, limits=limits)


# Archives that GNU tar writes

SHORT = ["a.txt", "dir/b.0.txt", "dir/empty.bin", "with blank.txt", "é漢.txt"]
IN_PREFIX = ["d" * 90 + "/" + "e" * 60 + "/" + "f" * 100, "g" * 96 + "/h.txt"]
LONG = ["l" * 180 + "/" + "m" * 180 + ".txt", "n" * 101]
#: The names that a format can hold.
GNU_TAR_FORMATS = {
    "v7": SHORT,
    "oldgnu": SHORT + IN_PREFIX + LONG,
    "gnu": SHORT + IN_PREFIX + LONG,
    "ustar": SHORT + IN_PREFIX,
    "posix": SHORT + IN_PREFIX + LONG,
}


def gnu_tar(folder: Path, *arguments: str) -> bytes:
    """Return the archive that GNU tar writes of the paths at the end of the arguments."""
    command = ["tar", "--create", "--file=-", f"--directory={folder}", "--sort=name", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "LC_ALL": "C.UTF-8"}).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[list[str]], dict[str, bytes]]:
    """Write files of all sizes, and also members that are not files."""

    def write(names: list[str]) -> dict[str, bytes]:
        contents = {}
        for number, name in enumerate(names):
            path = tmp_path / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            contents[f"./{name}"] = NOISE[number : number + [700, 0, 1, 511, 512, 513, 200_000][number % 7]]
            path.write_bytes(contents[f"./{name}"])
            os.utime(path, ns=(1, 1_000_000_001 * (number + 1)))
        (tmp_path / "tree/link").symlink_to("a.txt")
        if names != SHORT:  # names for v7, which has no named pipes
            os.mkfifo(tmp_path / "tree/queue")
        return contents

    return write


@pytest.mark.parametrize("open_stream", [io.BytesIO, lambda data: forward(data, 1000)], ids=["seeking", "forward"])
@pytest.mark.parametrize("tar_format", GNU_TAR_FORMATS)
def test_the_five_formats_of_gnu_tar(
    tmp_path: Path,
    tree: Callable[[list[str]], dict[str, bytes]],
    tar_format: str,
    open_stream: Callable[[bytes], BinaryIO],
) -> None:
    contents = tree(GNU_TAR_FORMATS[tar_format])
    if "n" * 101 in contents:  # the target of a link has its own long name
        (tmp_path / "tree/to_long").symlink_to("n" * 101)
    archive = gnu_tar(tmp_path / "tree", f"--format={tar_format}", ".")
    assert {name: data for name, data, _ in ours(archive, open_stream)} == contents
    assert ours(archive, open_stream) == by_tarfile(archive)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_bytes(b"data")
    for tar_format in GNU_TAR_FORMATS:
        archive = gnu_tar(tmp_path, f"--format={tar_format}", ".")
        assert [content[:2] for content in ours(archive)] == [(f"./{name}", b"data")]


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "posix0.0", "posix0.1", "posix1.0"])
def test_sparse_files_are_refused_by_name(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"before")
    with (tmp_path / "holes.bin").open("wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"island")
    version = f"--sparse-version={form.removeprefix('posix') if form.startswith('posix') else '1.0'}"
    archive = gnu_tar(tmp_path, "--sparse", f"--format={form.rstrip('.01')}", version, "a.txt", "holes.bin")
    members = read_members(io.BytesIO(archive), shard="x.tar")
    assert next(members)[2] == b"before"
    with pytest.raises(UnsupportedMemberError, match=r"x\.tar holds the member '[^']*holes\.bin'.* sparse file"):
        next(members)


@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
def test_the_volumes_of_a_multi_volume_archive_are_refused(tmp_path: Path, tar_format: str) -> None:
    (tmp_path / "a.bin").write_bytes(NOISE[:25_000])
    volumes = [tmp_path / "1.tar", tmp_path / "2.tar", tmp_path / "3.tar"]
    subprocess.run(
        ["tar", "--create", "--multi-volume", "--tape-length=20", f"--format={tar_format}"]
        + [f"--file={volume}" for volume in volumes]
        + [f"--directory={tmp_path}", "a.bin"],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    for volume in volumes[:2]:
        with pytest.raises((TruncatedShardError, UnsupportedMemberError), match=r"'[^']*a\.bin[^']*'"):
            ours(volume.read_bytes())


# Crafted headers


def header(name: str = "a.txt", size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def file(name: str = "a.txt", data: bytes = b"data", size: int | None = None, kind: bytes = tarfile.REGTYPE) -> bytes:
    return header(name, len(data) if size is None else size, kind) + data + bytes(-len(data) % 512)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return file("pax", records, kind=kind)


def record(keyword: str, value: str | bytes) -> bytes:
    rest = b" %b=%b\n" % (keyword.encode(), value.encode() if isinstance(value, str) else value)
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def patched(block: bytes, fields: dict[int, bytes], *, signed: bool = False) -> bytes:
    """Return a header with changed bytes at some offsets and a matching checksum."""
    changed = bytearray(block)
    for at, value in fields.items():
        changed[at : at + len(value)] = value
    changed[148:156] = b" " * 8
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in changed)
    changed[148:156] = b"%06o\0 " % total
    return bytes(changed)


def base256(number: int) -> bytes:
    return b"\x80" + number.to_bytes(11, "big")


L, G = tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE
HAND_MADE: dict[str, tuple[bytes, list[tuple[str, bytes]]]] = {
    "PAX path for one member only": (
        pax(record("path", "other.txt")) + file() + file("b.txt"),
        [("other.txt", b"data"), ("b.txt", b"data")],
    ),
    "PAX path twice": (pax(record("path", "one.txt") + record("path", "two.txt")) + file(), [("two.txt", b"data")]),
    "PAX path with a newline and an equals sign": (pax(record("path", "a\n=b.txt")) + file(), [("a\n=b.txt", b"data")]),
    "PAX size": (pax(record("size", "4")) + header(size=0) + file("", b"data")[512:], [("a.txt", b"data")]),
    "PAX size smaller than the field": (
        pax(record("size", "3")) + header(size=700) + file("", b"one")[512:] + file("b.txt"),
        [("a.txt", b"one"), ("b.txt", b"data")],
    ),
    "PAX size of a directory": (
        pax(record("size", "4")) + header("dir/", 0, tarfile.DIRTYPE) + file("b.txt"),
        [("b.txt", b"data")],
    ),
    "PAX hdrcharset": (
        pax(record("hdrcharset", "BINARY") + record("path", b"caf\xe9.txt")) + file(),
        [("caf\udce9.txt", b"data")],
    ),
    "the PAX header of Solaris": (pax(record("path", "s.txt"), tarfile.SOLARIS_XHDTYPE) + file(), [("s.txt", b"data")]),
    "global path": (
        pax(record("path", "all.txt"), G) + file() + file("b.txt") + pax(record("path", "own.txt")) + file("c.txt"),
        [("all.txt", b"data"), ("all.txt", b"data"), ("own.txt", b"data")],
    ),
    "GNU long name": (file("////", b"n" * 300 + b"\0", kind=L) + file(), [("n" * 300, b"data")]),
    "GNU long name in exactly a block": (file("////", b"n" * 512, kind=L) + file(), [("n" * 512, b"data")]),
    "base-256 size": (
        patched(header(), {124: base256(4)}) + file("", b"data")[512:] + file("b.txt"),
        [("a.txt", b"data"), ("b.txt", b"data")],
    ),
    "a size with blanks": (patched(header(), {124: b"         4 \0"}) + file()[512:], [("a.txt", b"data")]),
    "a size without an end": (patched(header(), {124: b"000000000004"}) + file()[512:], [("a.txt", b"data")]),
    "a size left empty": (patched(header(), {124: bytes(12)}), [("a.txt", b"")]),
    "v7": (patched(header(size=4, kind=tarfile.AREGTYPE), {257: bytes(8)}) + file()[512:], [("a.txt", b"data")]),
    "a v7 directory": (
        patched(header("dir/", 4, tarfile.AREGTYPE), {257: bytes(8)}) + file("b.txt"),
        [("b.txt", b"data")],
    ),
    "signed checksum": (patched(file("é漢.txt")[:512], {}, signed=True) + file()[512:], [("é漢.txt", b"data")]),
    "an unknown kind, with data": (file("v", b"x" * 600, kind=b"Z") + file(), [("a.txt", b"data")]),
}


@pytest.mark.parametrize("case", HAND_MADE)
def test_crafted_headers(case: str) -> None:
    archive, expected = HAND_MADE[case]
    contents = ours(archive + END)
    assert [content[:2] for content in contents] == expected
    assert ours(archive + END, forward) == contents
    assert contents == by_tarfile(archive + END)


def test_a_long_name_whose_truncation_looks_like_a_directory() -> None:
    """A slash at the end of the whole name marks a directory in v7; tarfile checks the truncated name."""
    name = "d" * 99 + "/f.txt"
    cut = patched(header("d" * 99 + "/", 4, tarfile.AREGTYPE), {})
    assert ours(file("L", name.encode(), kind=L) + cut + file()[512:] + END) == [(name, b"data", 0)]


def test_a_long_name_ends_where_its_header_says() -> None:
    """tarfile takes the whole block."""
    name = header("L", 5, L) + b"b.txt and more".ljust(512, b"\0")
    assert ours(name + file() + END) == [("b.txt", b"data", 0)]


def test_the_times_of_old_gnu_headers_are_not_a_prefix() -> None:
    """tarfile joins them to the name; GNU tar and this reader check the magic."""
    block = patched(file()[:512], {257: b"ustar  \0", 345: b"14712345670\0" + b"14712345671\0"})
    assert ours(block + file()[512:] + END) == [("a.txt", b"data", 0)]


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (pax(b"path=a\n") + file(), r"damaged PAX header at byte 0: b'path=a\\n' is not a record of the form"),
        (pax(b"0 path=a\n") + file(), "damaged PAX header"),
        (pax(b"99 path=a.txt\n") + file(), "damaged PAX header"),
        (pax(record("path", "b.txt") + b"x path=a\n") + file(), "damaged PAX header"),
        (pax(b"9" * 400 + b" a=b\n") + file(), "damaged PAX header"),
        (
            pax(record("size", "four")) + file(),
            r"member 'a\.txt', at byte 0\) whose size is b'four', which is not a number",
        ),
        (pax(record("size", "-1")) + file(), "not a number"),
        (
            pax(record("path", "b.txt") * 90_000) + file(),
            r"PAX header of 1260000 bytes at byte 0, and the limit is header_bytes=1048576",
        ),
        (header("L", 1 << 40, L) + file(), r"PAX header of 1099511627776 bytes .*ReadLimits\(header_bytes=...\)"),
        (patched(header(), {124: b"00000000009\0"}), r"whose size field is b'00000000009\\x00', which is not a number"),
        (patched(header(), {124: b"-0000000004\0"}), "not a number"),
        (patched(header(), {124: b"0o4\0"}), "not a number"),
        (file("L", b"n" * 300, kind=L), "end marker at byte 1024, right after a long name or PAX header at byte 0"),
        (pax(record("path", "b.txt")), "member is missing"),
    ],
)
def test_refused_headers(archive: bytes, message: str) -> None:
    with pytest.raises((CorruptShardError, ReadLimitError), match=message):
        ours(archive + END)


@pytest.mark.parametrize(
    "headers",
    [header("huge.bin", 9 << 30), pax(record("size", str(9 << 30))) + header("huge.bin")],
    ids=["base-256", "PAX"],
)
def test_a_member_over_eight_gigabytes(tmp_path: Path, headers: bytes) -> None:
    shard = tmp_path / "x.tar"
    with shard.open("wb") as stream:
        stream.write(file("a.txt") + headers)
        stream.seek(9 << 30, os.SEEK_CUR)  # a hole, which takes no space
        stream.write(file("b.txt") + END)
    members = list(load_wds_shards([shard], TarOptions(select_files=lambda name: name != "huge.bin")))
    assert [member[1:] for member in members] == [
        ("a.txt", b"data", 0),
        ("b.txt", b"data", 1024 + len(headers) + (9 << 30)),
    ]


@pytest.mark.parametrize(("open_stream", "selected"), [(io.BytesIO, True), (io.BytesIO, False), (forward, False)])
def test_a_size_beyond_all_memory(open_stream: Callable[[bytes], BinaryIO], selected: bool) -> None:
    for power in (40, 63, 64, 87):
        archive = file("a.txt") + patched(header("huge.bin"), {124: base256(1 << power)}) + END
        members = read_members(
            open_stream(archive), shard="x.tar", select_files=lambda name: selected or name == "a.txt"
        )
        assert next(members)[2] == b"data"
        with pytest.raises(ShardError, match=r"x\.tar .*'huge\.bin' \(header at byte 1024\)"):
            next(members)


# Selection of members


class Counting(io.FileIO):
    """A file that counts the bytes read."""

    count = 0

    def readinto(self, buffer: Buffer, /) -> int:
        size = super().readinto(buffer)
        self.count += size
        return size


def test_large_unselected_files_are_not_read(tmp_path: Path) -> None:
    shard = tmp_path / "x.tar"
    shard.write_bytes(b"".join(file(f"{number}.bin", bytes(1 << 20)) for number in range(20)) + END)
    with Counting(str(shard)) as raw:
        stream = io.BufferedReader(raw, 1 << 14)
        assert list(read_members(cast(BinaryIO, stream), shard="x.tar", select_files=lambda name: False)) == []
        assert 0 < raw.count < 1 << 20
