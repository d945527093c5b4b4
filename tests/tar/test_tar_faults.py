"""Truncated, damaged or invalid archives raise an error with the offset and lose nothing silently."""

from __future__ import annotations

import io
import re
import tarfile
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from wds_datapipes.errors import CorruptShardError, ShardError, TruncatedShardError
from wds_datapipes.samples.grouping import group_samples
from wds_datapipes.shards.loading import TarOptions, read_shards
from wds_datapipes.tar.headers import EndMarker
from wds_datapipes.tar.reader import read_members
from wds_datapipes.types import Member, Sample

END = bytes(1024)
NOISE = Random(0).randbytes(4096).replace(b"\0", b"\1")
#: Three samples of two fields; their sizes are close to the boundaries of a block.
FILES = {"a.cls": 1, "a.txt": 513, "b.cls": 0, "b.txt": 512, "c.cls": 2, "c.txt": 5}
TWO_OF_THEM = {"a.cls": 1, "a.txt": 5, "b.cls": 0, "b.txt": 511}


def archive_of(tar_format: int, files: dict[str, int], *, folder: str = "", mtime: float = 0) -> bytes:
    """An archive that ends with two blocks of zeros; a folder has an entry of its own."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        if folder:
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
        for name, size in files.items():
            entry = tarfile.TarInfo(f"{folder}/{name}" if folder else name)
            entry.size, entry.mtime = size, mtime
            tar.addfile(entry, io.BytesIO(NOISE[:size]))
        end = tar.offset
    return buffer.getvalue()[:end] + END


ARCHIVES = {
    "ustar": archive_of(tarfile.USTAR_FORMAT, FILES),
    "prefix": archive_of(tarfile.USTAR_FORMAT, TWO_OF_THEM, folder="d" * 99),
    "long names": archive_of(tarfile.GNU_FORMAT, TWO_OF_THEM, folder="d" * 99),
    "PAX path": archive_of(tarfile.PAX_FORMAT, TWO_OF_THEM, folder="é" * 60),
    "PAX time": archive_of(tarfile.PAX_FORMAT, TWO_OF_THEM, mtime=1.5),
}


def entries(archive: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:", encoding="utf-8") as tar:
        return tar.getmembers()


def headers(archive: bytes) -> list[int]:
    """Return the offsets of all header blocks, including those of long names and PAX headers, and of the end."""
    found = []
    for entry in entries(archive):
        at = entry.offset
        while at < entry.offset_data:
            found.append(at)
            content = int(archive[at + 124 : at + 135], 8) if archive[at + 156 : at + 157] in b"LKxg" else 0
            at += 512 + (content + 511) // 512 * 512
    return [*found, len(archive) - 1024, len(archive) - 512]


def read(
    archive: bytes, *, end_marker: EndMarker = "required", ignore_zeros: bool = False
) -> tuple[list[Member], ShardError | None]:
    """Return the members read, and the error that ended reading. Other types of errors fail the test."""
    members: list[Member] = []
    try:
        for member in read_members(
            io.BytesIO(archive), shard="x.tar", end_marker=end_marker, ignore_zeros=ignore_zeros
        ):
            members.append(Member(*member))  # noqa: PERF401  what came before an error counts
    except ShardError as error:
        return members, error
    return members, None


# Truncation


@pytest.mark.parametrize("kind", ["ustar", "long names", "PAX path"])
def test_a_truncation_at_every_byte(kind: str) -> None:
    archive = ARCHIVES[kind]
    everything = entries(archive)
    for size in range(len(archive)):
        members, error = read(archive[:size])
        whole = [entry for entry in everything if entry.isreg() and entry.offset_data + entry.size <= size]
        assert [(member.name, member.offset) for member in members] == [(entry.name, entry.offset) for entry in whole]
        assert all(member.data == NOISE[: len(member.data)] for member in members)
        assert type(error) is TruncatedShardError, f"cut at byte {size}"
        assert re.match(expected_message(everything, size), str(error)), f"cut at byte {size}: {error}"


def expected_message(everything: list[tarfile.TarInfo], size: int) -> str:
    """Return the beginning of the message for an archive truncated to ``size`` bytes."""
    if size < 512:
        return rf"x\.tar is (empty|shorter than one tar header): {size} bytes"
    for entry in everything:
        if entry.offset < size < entry.offset_data:
            return rf"x\.tar ends inside a header, at byte {size}\. The file is incomplete"
        if entry.offset_data <= size < entry.offset_data + entry.size:
            there = size - entry.offset_data
            return (
                rf"x\.tar ends inside the member '{entry.name}' \(header at byte {entry.offset}\): "
                rf"only {there} of its {entry.size} bytes are present\. "
            )
    end = (everything[-1].offset_data + everything[-1].size + 511) // 512 * 512
    if size <= end:
        return r"x\.tar ends at byte \d+ without the two blocks of zeros"
    return rf"x\.tar ends inside (a header, at byte {size}|its end marker: one block of zeros at byte {end})"


@pytest.mark.parametrize("kind", ["ustar", "long names", "PAX path"])
def test_truncations_that_an_optional_end_marker_accepts(kind: str) -> None:
    """Cuts between two members, and no others."""
    archive = ARCHIVES[kind]
    ends = {entry.offset_data + (entry.size if entry.isreg() else 0) for entry in entries(archive)}
    # The zeros that pad the last block of a file are not part of it, and one block of zeros is also an end.
    accepted = {size for end in ends for size in range(end, end + -end % 512 + 1)}
    accepted |= set(range(len(archive) - 512, len(archive)))
    for size in range(len(archive)):
        _, error = read(archive[:size], end_marker="optional")
        assert (error is None) == (size in accepted), f"cut at byte {size}: {error}"
        assert isinstance(error, TruncatedShardError | None)


def samples_of(archive: bytes) -> list[Sample]:
    samples: dict[str, Sample] = {}
    for entry in entries(archive):
        if entry.isreg():
            key, _, field = entry.name.partition(".")
            samples.setdefault(key, {"__key__": key})[field] = NOISE[: entry.size]
    return list(samples.values())


def grouped(shard: Path, options: dict[str, str]) -> Iterator[Sample]:
    for sample in group_samples(read_shards([shard], TarOptions(**options))):  # type: ignore[arg-type]  # words of a table
        assert sample.pop("__url__") == sample.pop("__local_path__") == str(shard)
        yield sample


@pytest.mark.parametrize("kind", ["ustar", "PAX time"])
def test_a_truncation_never_yields_a_sample_that_lacks_a_field(tmp_path: Path, kind: str) -> None:
    archive = ARCHIVES[kind]
    shard = tmp_path / "x.tar"
    everything = samples_of(archive)
    firsts = [entry for entry in entries(archive) if entry.name.endswith(".cls")]
    for size in range(0, len(archive), 67):
        shard.write_bytes(archive[:size])
        # A sample is known to be complete once the first file of the next one has been read.
        known = sum(entry.offset_data + entry.size <= size for entry in firsts[1:])
        assert list(grouped(shard, {"on_error": "skip"})) == everything[:known]
        samples = grouped(shard, {})
        assert list(islice(samples, known)) == everything[:known]
        with pytest.raises(TruncatedShardError):
            next(samples)


# Damage


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_changed_byte_in_a_header_is_an_error_or_changes_nothing(kind: str) -> None:
    archive = ARCHIVES[kind]
    expected = read(archive)
    for start in headers(archive):
        for at in range(start, start + 512, 3):
            for mask in (0x01, 0x80):
                damaged = bytearray(archive)
                damaged[at] ^= mask
                members, error = read(bytes(damaged))
                if error is None:
                    assert start + 148 <= at < start + 156, f"byte {at}: only the checksum's own blanks can change"
                    assert (members, None) == expected
                else:
                    assert isinstance(error, CorruptShardError)
                    assert members == expected[0][: len(members)]
                    where = rf"has (a damaged header at byte {start}: its checksum field is b'|data at byte )"
                    assert re.match(rf"x\.tar ({where}|is not a tar archive)", str(error))


@pytest.mark.parametrize(
    ("archive", "error", "message"),
    [
        (b"", TruncatedShardError, r"x\.tar is empty: 0 bytes\. It is not a tar archive"),
        (
            b"<html>404</html>",
            TruncatedShardError,
            r"shorter than one tar header: 16 bytes\. It is a page of .*\. It is not a tar archive",
        ),
        (b"<html>" * 100, CorruptShardError, r"x\.tar is not a tar archive.*begins with b'<html><html>.*error page"),
        (b"\xff\xd8\xff" * 200, CorruptShardError, r"\. It is a JPEG image$"),
        (
            b'{"a": 1}\n' * 9,
            TruncatedShardError,
            r"81 bytes\. It is JSON, .* fetch it again; JSON lines, .*_records\(\)$",
        ),
        (
            b'{"a": 1}\n' * 90,
            CorruptShardError,
            r"\. It is JSON, .*; JSON lines, .* are read with load_wds_records\(\)$",
        ),
        (bytes(512), TruncatedShardError, r"ends inside its end marker: one block of zeros at byte 0, not two"),
        (ARCHIVES["ustar"] + b"x", CorruptShardError, r"data at byte 7168, after the end marker at byte 6144"),
        (ARCHIVES["ustar"] + bytes(10_000) + b"x", CorruptShardError, r"after the end marker at byte 6144"),
        (ARCHIVES["ustar"][:-1024] + b"\n" * 600, CorruptShardError, r"damaged header at byte 6144"),
    ],
)
def test_files_that_are_not_archives(archive: bytes, error: type[ShardError], message: str) -> None:
    with pytest.raises(error, match=message):
        list(read_members(io.BytesIO(archive), shard="x.tar"))


# Crafted headers, compared with tarfile


@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_in_place_of_a_field_warns_once(
    kind: bytes, headers_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the sample would silently lack the field."""
    monkeypatch.setattr("wds_datapipes.tar.reader._warned_about_links", [])
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, linked in {"a.jpg": "", "a": "a.jpg", "b.jpg": "a.jpg", "c.jpg": "a.jpg", "c.cls": ""}.items():
            info = tarfile.TarInfo(name)
            if linked:
                info.type, info.linkname = kind, linked
                archive.addfile(info)
            else:
                info.size = 3
                archive.addfile(info, io.BytesIO(b"abc"))
    with pytest.warns(UserWarning, match=r"shard\.tar has the member 'b\.jpg' \(header at byte 1536\)") as caught:
        found = list(read_members(io.BytesIO(file.getvalue()), shard="shard.tar", headers_only=headers_only))
    assert len(caught) == 1
    assert [member[1] for member in found] == ["a.jpg", "c.cls"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr("wds_datapipes.tar.reader._warned_about_links", [])
        assert len(list(read_members(io.BytesIO(file.getvalue()), shard="shard.tar", select_files="a.jpg".__eq__))) == 1
