"""ReadLimits: the resources that a shard may request. Larger members are refused before they are read."""

from __future__ import annotations

import bz2
import dataclasses
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import PIL.Image
import pytest
import zstandard
from error_facts import naming
from hypothesis import example, given
from hypothesis import strategies as st
from plain_codecs import encoded
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import ErrorBudget, ReadLimits
from wds_datapipes.codecs.field_chain import gunzip, to_gzip
from wds_datapipes.errors import CorruptShardError, DecodeError, ErrorBudgetError, ReadLimitError, WdsError
from wds_datapipes.io import read_limits
from wds_datapipes.io.compression.decompress import decompress_stream
from wds_datapipes.io.read_limits import DEFAULT_LIMITS
from wds_datapipes.io.streams import RawStream, move_bytes
from wds_datapipes.tar.reader import read_members
from wds_datapipes.tar.scanner import ShardScan
from wds_datapipes.testing import build_shard

END = bytes(1024)
MIB = 1 << 20
ZSTD = zstandard.ZstdCompressor().compress
NONE = ReadLimits(**dict.fromkeys(field.name for field in dataclasses.fields(ReadLimits)))


def header(name: str = "a.bin", size: int = 0, kind: bytes = b"0") -> bytes:
    """One header, with any size: a size of 8 GiB or more is written in base 256."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT)[-512:]


def folder(name: str = "d") -> bytes:
    return header(name, 0, b"5")


def with_data(kind: bytes, data: bytes, name: str = "././@LongLink") -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


#: PAX records that do not affect how a member is read, and those that apply to all members after them.
PAX, GLOBAL_PAX = with_data(b"x", b"13 mtime=1.5\n"), with_data(b"g", b"15 comment=one\n")


class Planned(NamedTuple):
    """A planned member of an archive."""

    name: str
    size: int
    #: The number of PAX headers before it.
    before: int
    is_file: bool

    def written(self) -> bytes:
        archive = PAX * self.before
        if len(self.name) > 100:
            archive += with_data(b"L", self.name.encode() + b"\0")
        if not self.is_file:
            return archive + header(self.name[:100], 0, b"5")
        return archive + with_data(b"0", b"x" * self.size, self.name[:100])

    @property
    def headers(self) -> int:
        return self.before + (len(self.name) > 100)

    @property
    def name_bytes(self) -> int:
        # A folder's name ends in a slash in its own header.
        return len(self.name) + (not self.is_file and len(self.name) < 100)


def read(archive: bytes, given: ReadLimits = DEFAULT_LIMITS, **options: Any) -> tuple[list[str], str]:
    return read_from(io.BytesIO(archive), given, **options)


def read_from(stream: BinaryIO, given: ReadLimits, **options: Any) -> tuple[list[str], str]:
    return outcome(read_members(stream, shard="x.tar", limits=given, **options))


def outcome(members: Iterable[Any]) -> tuple[list[str], str]:
    """The names of the members read, and the limit that ended reading, if any."""
    names: list[str] = []
    try:
        names.extend(name for _, name, _, _ in members)
    except ReadLimitError as error:
        return names, limit_in(error)
    return names, ""


def limit_in(error: WdsError) -> str:
    """The limit that an error names and advises to raise."""
    hint = error.hints[0]
    assert hint.argument == "limits"
    assert f"the limit is {hint.value}=" in str(error)
    return hint.value


def expected(plan: list[Planned], given: ReadLimits) -> tuple[list[str], str]:
    names: list[str] = []
    for member in plan:
        if given.headers is not None and member.headers > given.headers:
            return names, "headers"
        if given.name_bytes is not None and member.name_bytes > given.name_bytes:
            return names, "name_bytes"
        if not member.is_file:
            continue
        if given.member_bytes is not None and member.size > given.member_bytes:
            return names, "member_bytes"
        names.append(member.name)
    return names, ""


MEMBERS = st.builds(
    Planned,
    name=st.integers(1, 150).map(lambda length: "n" * length),
    size=st.sampled_from([0, 1, 511, 512, 513, 5000, 20_000]),
    before=st.integers(0, 3),
    is_file=st.booleans() | st.just(True),
)
LIMITS = st.builds(
    ReadLimits,
    member_bytes=st.none() | st.sampled_from([0, 1, 512, 5000, 19_999, 20_000, 100_000]),
    name_bytes=st.none() | st.sampled_from([1, 50, 99, 100, 149]),
    headers=st.none() | st.integers(0, 4),
)


@given(plan=st.lists(MEMBERS, max_size=40), given_limits=LIMITS)
@example([Planned("a", 1, 0, True)] * 30 + [Planned("b", 20_000, 0, True)], ReadLimits(member_bytes=19_999))
@example([Planned("a", 1, 3, True)] * 30, ReadLimits(headers=2))
@example([Planned("a", 0, 0, False)], ReadLimits(name_bytes=1))
@example([Planned("a" * 99, 0, 0, False)], ReadLimits(name_bytes=99))
@example([Planned("a" * 100, 0, 0, False)], ReadLimits(name_bytes=100))
@example([Planned("a" * 149, 0, 0, False)], ReadLimits(name_bytes=149))
def test_reading_ends_at_the_first_member_beyond_a_limit(
    tmp_path_factory: pytest.TempPathFactory, plan: list[Planned], given_limits: ReadLimits
) -> None:
    archive = b"".join(member.written() for member in plan) + END
    assert read(archive, given_limits) == expected(plan, given_limits)
    place = tmp_path_factory.getbasetemp() / "planned.tar"
    place.write_bytes(archive)
    assert outcome(ShardScan(str(place), limits=given_limits)) == expected(plan, given_limits)


class Guarded(RawStream):
    """An endless stream, of which only ``allowed`` bytes may be read."""

    def __init__(self, pieces: Iterator[bytes], most: int) -> None:
        self._pieces, self._most, self._rest = pieces, most, memoryview(b"")

    def readinto(self, buffer: Any, /) -> int:
        size, self._rest = move_bytes(self._rest or memoryview(next(self._pieces)), buffer)
        self._most -= size
        assert self._most >= 0, "it reads on and on"
        return size


def endless(*pieces: bytes, most: int) -> BinaryIO:
    def each() -> Iterator[bytes]:
        yield from pieces[:-1]
        yield from repeat(pieces[-1])

    return cast(BinaryIO, Guarded(each(), most))


def test_a_member_that_is_too_large_is_refused_before_its_data_are_read() -> None:
    size = (8 << 30) + 1
    stream = endless(header("a.bin", size), bytes(MIB), most=4 * MIB)
    tracemalloc.start()
    with pytest.raises(ReadLimitError) as caught:
        list(read_members(stream, shard="https://host/x.tar"))
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()
    assert str(caught.value) == (
        f"https://host/x.tar has the member 'a.bin' (header at byte 0) of {size} bytes, and the limit is "
        f"member_bytes=8589934592. If the shard is valid, pass limits=ReadLimits(member_bytes=...) with more, or "
        f"with None for no limit"
    )


def test_without_a_limit_a_member_larger_than_memory_is_damage() -> None:
    with pytest.raises(CorruptShardError, match="more than fit into memory"):
        read(header("a.bin", 1 << 80), NONE)


def test_unselected_members_may_be_large() -> None:
    archive = with_data(b"0", b"x" * 5000, "a.big") + with_data(b"0", b"1", "a.cls") + END
    given = ReadLimits(member_bytes=10)
    assert read(archive, given) == ([], "member_bytes")
    assert read(archive, given, select_files=lambda name: name == "a.cls") == (["a.cls"], "")


def test_names_as_long_as_a_linux_path_are_read_by_default() -> None:
    assert read(Planned("n" * 4096, 1, 0, True).written() + END) == (["n" * 4096], "")
    assert read(Planned("n" * 4097, 1, 0, True).written() + END) == ([], "name_bytes")
    record = f"path={'é' * 2049}\n"
    size = len(record.encode()) + 5
    assert read(with_data(b"x", f"{size} {record}".encode()) + with_data(b"0", b"1", "a") + END) == ([], "name_bytes")


def test_the_name_of_the_header_and_its_prefix_count_together() -> None:
    entry = tarfile.TarInfo(f"{'d' * 120}/{'n' * 60}")
    archive = entry.tobuf(tarfile.USTAR_FORMAT) + END
    assert read(archive, ReadLimits(name_bytes=181)) == ([entry.name], "")
    assert read(archive, ReadLimits(name_bytes=180)) == ([], "name_bytes")


# Members that are not files


@given(gaps=st.lists(st.integers(0, 12), min_size=1, max_size=8), most=st.integers(0, 12))
def test_the_gap_is_that_between_two_files(gaps: list[int], most: int) -> None:
    archive = b"".join(with_data(b"0", b"x", "a") + folder() * gap for gap in gaps) + END
    found, limit = read(archive, ReadLimits(gap_bytes=most * 512), end_marker="optional")
    enough = next((number for number, gap in enumerate(gaps) if gap > most), None)
    # The end marker and the bytes before it also form a gap.
    is_last = enough is None and gaps[-1] + 1 > most
    assert (len(found), limit) == (
        (len(gaps), "gap_bytes" if is_last else "") if enough is None else (enough + 1, "gap_bytes")
    )


@pytest.mark.parametrize(
    "pieces",
    [
        [folder() * 100],
        [header("link", 0, b"2") * 100],
        [with_data(b"L", b"n" * 200) + folder()],
        [GLOBAL_PAX + folder()],
        [END, bytes(64 << 10)],
        [header("unknown", 1 << 60, b"Z"), bytes(64 << 10)],
    ],
    ids=["folders", "links", "long names of folders", "headers for all", "zeros", "data of an unknown kind"],
)
@pytest.mark.parametrize("ignore_zeros", [False, True])
def test_archives_that_never_reach_a_file_end(pieces: list[bytes], ignore_zeros: bool) -> None:
    stream = endless(with_data(b"0", b"1", "a"), *pieces, most=3 * MIB)
    limits = ReadLimits(gap_bytes=MIB, tail_bytes=None)
    members = read_members(stream, shard="x.tar", ignore_zeros=ignore_zeros, limits=limits)
    assert next(members)[1] == "a"
    with pytest.raises(
        ReadLimitError, match=r"x\.tar has no file from byte 1024 to byte \d+, and the limit is gap_bytes"
    ):
        next(members)


@pytest.mark.parametrize("piece", [PAX, GLOBAL_PAX, with_data(b"L", b"n" * 90), with_data(b"K", b"n" * 90)])
def test_headers_that_never_reach_a_member_end(piece: bytes) -> None:
    with pytest.raises(ReadLimitError, match=naming("257 headers", "byte 262144")):
        list(read_members(endless(piece, most=3 * MIB), shard="x.tar"))


# Compressed shards


def shard_of(*members: bytes) -> bytes:
    return b"".join(with_data(b"0", data, f"{number}.bin") for number, data in enumerate(members)) + END


@pytest.mark.parametrize("compress", [to_gzip, bz2.compress, lzma.compress, ZSTD], ids=["gzip", "bz2", "xz", "zstd"])
def test_a_bomb_is_refused_as_soon_as_it_expands_too_far(
    monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(read_limits, "EXPANSION_FROM_BYTES", MIB)
    bomb = compress(shard_of(*[bytes(MIB // 2)] * 10))
    most = 5 * MIB / len(bomb) / 2
    for expansion, refused in ((most, "expansion"), (most * 2.5, ""), (None, "")):
        given = ReadLimits(expansion=expansion)
        with decompress_stream(cast(BinaryIO, io.BytesIO(bomb)), url="x.tar", limits=given) as stream:
            names, limit = read_from(stream, given)
        assert (limit, len(names) < 10) == (refused, bool(refused))


def test_zstd_expands_in_bounded_steps() -> None:
    bomb = ZSTD(shard_of(bytes(256 * MIB)))
    tracemalloc.start()
    with decompress_stream(cast(BinaryIO, io.BytesIO(bomb)), url="x.tar") as stream:
        assert stream.read(512) == header("0.bin", 256 * MIB)
    assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    tracemalloc.stop()


@pytest.mark.parametrize(
    "nothing",
    [b"\x50\x2a\x4d\x18" + (MIB - 8).to_bytes(4, "little") + bytes(MIB - 8), bytes(MIB)],
    ids=["frames to be skipped", "zeros behind the end"],
)
def test_compressed_data_that_expand_to_nothing_end(nothing: bytes) -> None:
    begin = ZSTD(shard_of(b"1"))
    given = ReadLimits(gap_bytes=5 * MIB)
    with decompress_stream(endless(begin, nothing, most=8 * MIB), url="x.tar", limits=given) as stream:
        members = read_members(stream, shard="x.tar", limits=given)
        assert next(members)[1] == "0.bin"
        with pytest.raises(
            ReadLimitError, match=r"The zstd data of x\.tar \(after 2048 .* have 5\d{6} bytes without any content"
        ):
            next(members)


# Compressed fields


def test_a_field_that_is_a_bomb_takes_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = to_gzip(bytes(64 * MIB))
    tracemalloc.start()
    with pytest.raises(ReadLimitError):
        gunzip(bomb, limits=ReadLimits(member_bytes=2 * MIB))
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()
    monkeypatch.setattr(read_limits, "EXPANSION_FROM_BYTES", MIB)
    with pytest.raises(ReadLimitError, match=r"expand to \d+ bytes or more, and the limit is expansion=100\. "):
        gunzip(bomb, limits=ReadLimits(expansion=100))


ZEROS = to_gzip(b" " * 100_000 + b"1")
np.savez_compressed(ARRAYS := io.BytesIO(), a=np.zeros(100_000, np.uint8))


@pytest.mark.parametrize(
    ("field", "data", "what"),
    [("json.gz.gz", to_gzip(ZEROS), "gzip"), ("json.gz", ZEROS, "gzip"), ("npz", ARRAYS.getvalue(), "npz")],
)
def test_decoding_is_bounded(field: str, data: bytes, what: str) -> None:
    samples = IterableWrapper([{"__key__": "a", "__url__": "x.tar", field: data}])
    given = ReadLimits(member_bytes=90_000)
    with pytest.raises(
        DecodeError, match=rf"field '{field}' .* decoded by .*: ReadLimitError: \d+ bytes of {what} data"
    ) as caught:
        list(samples.wds_decode(limits=given))
    assert limit_in(caught.value) == "member_bytes"
    assert list(samples.wds_decode(limits=given, on_error="skip")) == []
    assert len(list(samples.wds_decode())) == 1


# The stage


def test_shards_beyond_their_limits_are_skipped_like_bad_ones(tmp_path: Path) -> None:
    good = build_shard(tmp_path / "good.tar", [{"__key__": "g", "txt": "1"}])
    bad = build_shard(tmp_path / "bad.tar", [{"__key__": "a", "txt": "1"}, {"__key__": "b", "txt": "1", "video": "xx"}])
    pipe = IterableWrapper([bad, good])
    given = ReadLimits(member_bytes=1)
    with pytest.raises(ReadLimitError, match=r"bad\.tar has the member 'b\.video' \(header at byte 2048\) of 2 bytes"):
        list(pipe.load_wds_shards(limits=given))
    samples = list(pipe.load_wds_shards(limits=given, on_error="skip").group_samples())
    assert [sample["__key__"] for sample in samples] == ["a", "g"]  # b may lack a field, and is never yielded
    with pytest.raises(ErrorBudgetError, match="1 x ReadLimitError"):
        list(pipe.load_wds_shards(limits=given, on_error=ErrorBudget(max_errors=0, warn=False)))


@pytest.mark.parametrize(("name", "value"), [("member_bytes", -1), ("name_bytes", 1.5), ("expansion", 0.5)])
def test_invalid_limits_are_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must be an? .*None, not "):
        ReadLimits(**{name: value})
    with pytest.raises(TypeError, match=r"limits must be ReadLimits\(\.\.\.\), not "):
        IterableWrapper(["x.tar"]).load_wds_shards(limits=value)


@pytest.mark.parametrize("compress", ["zst", "xz"])
def test_windows_have_a_limit_with_a_name(compress: str, tmp_path: Path) -> None:
    archive = header("a.txt", 3) + b"one".ljust(512, b"\0") + END
    if compress == "zst":
        parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False, enable_ldm=True)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        data = compressor.compress(archive) + compressor.flush()
    else:
        data = lzma.compress(archive, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28}])
    file = tmp_path / f"a.tar.{compress}"
    file.write_bytes(data)
    shards = IterableWrapper([str(file)])
    [member] = shards.load_wds_shards()
    assert member.data == b"one"
    for most in (128 << 20, 100, 0):
        with pytest.raises(
            ReadLimitError, match=rf"need a larger window or dictionary, and the limit is window_bytes={most}\."
        ):
            list(shards.load_wds_shards(limits=ReadLimits(window_bytes=most)))
    [member] = shards.load_wds_shards(limits=ReadLimits(window_bytes=None))
    assert member.data == b"one"


def test_blank_pages_are_images_and_larger_ones_have_a_limit_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    page = encoded(PIL.Image.new("1", (4960, 7016), 1), "TIFF", compression="group4")
    assert len(page) < 5000
    [sample] = IterableWrapper([{"tif": page}]).wds_decode("l8")
    assert sample["tif"].shape == (7016, 4960)
    assert sample["tif"].min() == 255
    flat = IterableWrapper([{"png": encoded(PIL.Image.new("1", (20_000, 10_000)), "PNG")}])
    with pytest.raises(DecodeError, match="200000000 pixels, and the limit is image_pixels=178956970"):
        list(flat.wds_decode("l8"))
    plain = PIL.Image.new("L", (2000, 1000))
    for data, field in ((encoded(plain, "PNG"), "png"), (encoded(plain, "JPEG"), "jpg")):
        samples = IterableWrapper([{field: data}])
        with pytest.raises(DecodeError, match="2000000 pixels, and the limit is image_pixels=1999999"):
            list(samples.wds_decode("l8", limits=ReadLimits(image_pixels=1_999_999)))
        [sample] = samples.wds_decode("l8", limits=ReadLimits(image_pixels=None))
        assert sample[field].shape == (1000, 2000)
        [batch] = samples.batch(1).decode_batch("torchl8", limits=ReadLimits(image_pixels=2_000_000))
        assert batch[field].shape == (1, 1000, 2000)
    tiff = encoded(PIL.Image.new("1", (2000, 1000)), "TIFF", compression="group4")
    samples = IterableWrapper([{"tif": tiff}]).wds_decode("l8", limits=ReadLimits(image_pixels=None))
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 900_000)  # Pillow refuses twice as many
    with pytest.raises(DecodeError, match=r"For TIFF, Pillow has a limit of its own.*set PIL\.Image\.MAX_IMAGE_PIXELS"):
        list(samples)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    assert next(iter(samples))["tif"].shape == (1000, 2000)
    with pytest.raises(DecodeError, match="the limit is image_pixels=5"):
        list(
            IterableWrapper([{"png": encoded(PIL.Image.new("L", (3, 2)))}]).wds_decode(
                "l8", limits=ReadLimits(image_pixels=5)
            )
        )
