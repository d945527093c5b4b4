"""Compression detected by content: every format, truncated and damaged anywhere, from sources that return few bytes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import pytest
import zstandard
from forward_streams import Trickle
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_datapipes.errors import CorruptShardError, TruncatedShardError
from wds_datapipes.io.compression.decompress import BUFFER_BYTES, decompress_stream
from wds_datapipes.io.openers import open_url

if TYPE_CHECKING:
    pass

Compress = Callable[[bytes], bytes]

KINDS: dict[str, Compress] = {
    "gzip": lambda data: gzip.compress(data, 1),
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
#: Partly repetitive, partly random, and longer than all buffers.
DATA = random.Random(0).randbytes(3 * BUFFER_BYTES // 2) + b"again and " * 50_000
SMALL = random.Random(1).randbytes(100) + b"again and " * 20


def expand(data: bytes, step: int = 1 << 30) -> bytes:
    with decompress_stream(cast(BinaryIO, Trickle(data, step)), url="s3://b/x.tar") as stream:
        return stream.read()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def compress(kind: str) -> Compress:
    return KINDS[kind]


@settings(max_examples=60)
@given(
    parts=st.lists(st.binary(max_size=60), min_size=1, max_size=5),
    kind=st.sampled_from(sorted(KINDS)),
    step=st.integers(1, 99),
    zeros=st.sampled_from([0, 12]),
)
def test_many_parts_are_one_stream(parts: list[bytes], kind: str, step: int, zeros: int) -> None:
    assert expand(b"".join(KINDS[kind](part) for part in parts) + bytes(zeros), step) == b"".join(parts)


@settings(max_examples=40)
@given(data=st.text(max_size=40).map(str.encode), step=st.integers(1, 50))
def test_uncompressed_data_are_unchanged(data: bytes, step: int) -> None:
    assert expand(data, step) == data


@pytest.mark.parametrize(
    "head", [b"BZh9.txt" + bytes(20), b"BZhx1AY&SY", b"\x1f\x8b.jpg" + bytes(20), b"\xfd7zX" + bytes(9)]
)
def test_a_name_like_a_magic_number_is_not_compression(head: bytes) -> None:
    assert expand(head) == head


def test_any_size_of_read_gives_the_same(compress: Compress) -> None:
    for size in (BUFFER_BYTES - 1, 3 * BUFFER_BYTES):
        pieces = []
        with decompress_stream(io.BytesIO(compress(DATA)), url="x.tar") as stream:
            while piece := stream.read(size):
                pieces.append(piece)
        assert {len(piece) for piece in pieces[:-1]} <= {size}
        assert b"".join(pieces) == DATA


def test_any_truncation_is_noticed(kind: str, compress: Compress) -> None:
    whole = compress(SMALL)
    for size in range(10, len(whole)):
        with pytest.raises(
            TruncatedShardError, match=rf"The {kind} data of s3://b/x.tar \(after \d+ unc.* end too early"
        ):
            expand(whole[:size])
    for size in range(1, len(whole)):
        with pytest.raises(
            (TruncatedShardError, CorruptShardError), match=rf"The {kind} data of s3://b/x.tar \(after [3-6]\d\d unc"
        ):
            expand(whole + whole[:size])


def test_a_flipped_bit_is_noticed(compress: Compress) -> None:
    whole = compress(SMALL)
    for position in range(10, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        with contextlib.suppress(CorruptShardError, TruncatedShardError):
            assert expand(bytes(damaged)) == SMALL  # such as a bit that gzip's header does not use


@pytest.mark.parametrize("garbage", [b"garbage", b"g", bytes(5) + b"garbage garbage"])
def test_garbage_after_the_data(kind: str, compress: Compress, garbage: bytes) -> None:
    with pytest.raises(CorruptShardError, match=rf"The {kind} data.*after 300 unc.*followed by other data.*b'g"):
        expand(compress(SMALL) + garbage)


def test_zstd_frames_to_skip_are_skipped() -> None:
    skip = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
    frame = KINDS["zstd"](SMALL)
    assert expand(skip + frame + skip + frame + skip) == SMALL * 2


def test_a_plain_stream_seeks_if_its_source_does(tmp_path: Path) -> None:
    for data in (SMALL, b"tiny", b""):
        (tmp_path / "x.tar").write_bytes(data)
        with decompress_stream(open_url(str(tmp_path / "x.tar")), url="x.tar") as stream:
            assert type(stream) is io.FileIO
            assert stream.seekable()
            assert stream.tell() == 0
            assert stream.read() == data
            stream.seek(2)
            assert stream.read() == data[2:]
    with decompress_stream(cast(BinaryIO, Trickle(SMALL, 3)), url="x.tar") as stream:
        assert not stream.seekable()


@pytest.mark.parametrize("compress", [*KINDS.values(), bytes], ids=[*KINDS, "none"])
def test_closing_closes_the_source(compress: Compress) -> None:
    for step in (3, 1 << 30):
        source = Trickle(compress(SMALL), step)
        stream = decompress_stream(cast(BinaryIO, source), url="x.tar")
        assert stream.read(1) == SMALL[:1]
        assert not source.closed
        stream.close()
        stream.close()
        assert source.closed
