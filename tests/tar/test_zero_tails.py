"""Shards that end in zeros: more than one tar record of zeros indicates a file that was never filled."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from error_facts import naming
from nginx_server import Nginx
from readers import keys_in

from wds_datapipes import JobOptions, ReadLimits, ShardList, convert_shards
from wds_datapipes.errors import ConversionError, CorruptShardError, ShardError, TruncatedShardError
from wds_datapipes.hints import LIMITS
from wds_datapipes.index import IndexOptions
from wds_datapipes.index.format.builder import build_index
from wds_datapipes.testing import build_shard
from wds_datapipes.tools.prepare.read_options import ReadOptions
from wds_datapipes.tools.prepare.shard_contents import read_contents

RECORD = 20 * 512
END = bytes(1024)
SAMPLES: list[dict[str, Any]] = [{"__key__": f"{number}", "bin": bytes([number + 1]) * 3000} for number in range(8)]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
NO_LIMIT = ReadLimits(tail_bytes=None)


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def members(folder: Path) -> bytes:
    """Return an archive without its end marker."""
    return Path(build_shard("whole.tar", SAMPLES, end_marker=False)).read_bytes()


def unchanged(sample: Any) -> Any:
    return sample


WANT = [f"{number}" for number in range(8)]


@pytest.mark.parametrize(("end_marker", "ignore_zeros"), [("required", False), ("optional", True)])
@pytest.mark.parametrize("kind", COMPRESS)
def test_zeros_beyond_one_record_are_an_error_unless_allowed(
    members: bytes, kind: str, end_marker: str, ignore_zeros: bool
) -> None:
    how: dict[str, Any] = {"end_marker": end_marker, "ignore_zeros": ignore_zeros}
    for tail, is_allowed in [(0, True), (RECORD, True), (RECORD + 1, False), (300_000, False)]:
        Path("a.tar").write_bytes(COMPRESS[kind](members + END + bytes(tail)))
        if not is_allowed:
            found = rf"^a\.tar has more than 10240 bytes of zeros after its end marker at byte {len(members)}"
            with pytest.raises(TruncatedShardError, match=found) as caught:
                keys_in("a.tar", **how)
            assert caught.value.hints == (LIMITS["tail_bytes"],)
        allowing = ReadLimits(tail_bytes=tail)
        assert keys_in("a.tar", limits=allowing, **how) == keys_in("a.tar", limits=NO_LIMIT, **how) == WANT
        if tail:
            with pytest.raises(TruncatedShardError, match=f"more than {tail - 1} bytes"):
                keys_in("a.tar", limits=ReadLimits(tail_bytes=tail - 1), **how)


@pytest.mark.parametrize("kind", [kind for kind in COMPRESS if kind != "plain"])
def test_zeros_after_compressed_data_count_too(members: bytes, kind: str) -> None:
    data = COMPRESS[kind](members + END)
    for zeros, is_allowed in [(RECORD, True), (RECORD + 1, False), (1_000_000, False)]:
        Path("a.tar").write_bytes(data + bytes(zeros))
        if is_allowed:
            assert keys_in("a.tar") == WANT
        else:
            with pytest.raises(
                TruncatedShardError, match=rf"^a\.tar has more than 10240 bytes of zeros after its {kind} data"
            ):
                keys_in("a.tar")
        assert keys_in("a.tar", limits=NO_LIMIT) == WANT
    # Between two parts they are padding, as on a tape.
    half = len(members) // 2
    Path("a.tar").write_bytes(COMPRESS[kind](members[:half]) + bytes(20_000) + COMPRESS[kind](members[half:] + END))
    assert keys_in("a.tar") == WANT


@pytest.mark.parametrize("end_marker", ["required", "optional"])
def test_a_preallocated_and_unfilled_file_is_never_accepted_as_complete(members: bytes, end_marker: str) -> None:
    whole = members + END
    size = len(whole) + 20 * RECORD
    for cut in range(0, len(whole) + 1, 256):
        Path("a.tar").write_bytes(whole[:cut] + bytes(size - cut))
        with pytest.raises(ShardError, match=r"^a\.tar "):
            keys_in("a.tar", end_marker=end_marker)


def test_concatenated_archives_may_be_padded_between(members: bytes) -> None:
    Path("a.tar").write_bytes(members + END + bytes(102_400) + members + END)
    found = [member.name for member in ShardList("a.tar").load_wds_shards(ignore_zeros=True)]
    assert found == [f"{key}.bin" for key in WANT * 2]
    with pytest.raises(TruncatedShardError, match=naming("a.tar", "10240 bytes", "end marker")):
        keys_in("a.tar")
    with pytest.raises(CorruptShardError, match="has data at byte"):
        keys_in("a.tar", limits=NO_LIMIT)


def test_every_reader_refuses_them(members: bytes, nginx: Nginx, program: Any) -> None:
    content = members + END + bytes(RECORD + 1)
    (nginx.files / "tail.tar").write_bytes(content)
    Path("a.tar").write_bytes(content)
    Path("a.tgz").write_bytes(gzip.compress(content))
    for url in ("a.tar", "a.tgz", f"http://127.0.0.1:{nginx.http}/tail.tar", "pipe:cat a.tar"):
        readers: list[Callable[[ReadLimits], object]] = [
            lambda limits, url=url: keys_in(url, limits=limits),  # type: ignore[misc]  # bound by its default
            lambda limits, url=url: keys_in(url, limits=limits, on_error="raise", read_ahead=0),  # type: ignore[misc]
        ]
        if not url.startswith("pipe:"):
            readers += [
                lambda limits, url=url: build_index(url, options=IndexOptions(limits=limits)),  # type: ignore[misc]
                lambda limits, url=url: build_index(url, options=IndexOptions(limits=limits, digest=True)),  # type: ignore[misc]
            ]
        for reader in readers:
            with pytest.raises(TruncatedShardError, match="bytes of zeros after its end marker"):
                reader(ReadLimits())
            reader(NO_LIMIT)
        (fault,) = read_contents(url).faults
        assert fault.kind == "TruncatedShardError"
        assert not read_contents(url, ReadOptions(limits=NO_LIMIT)).faults
    with pytest.raises(ConversionError, match="bytes of zeros"):
        convert_shards(unchanged, "a.tar", "b-%d.tar", job=JobOptions(retries=0), num_workers=0)
    assert not Path("b-0.tar").exists()
    done = program("verify", "a.tar", "--num-workers", "0")
    assert done.code == 1
    assert "use --limit tail_bytes=... with more, or with None for no limit" in done.out
    assert program("verify", "a.tar", "--num-workers", "0", "--limit", "tail_bytes=20kB").code == 0


def test_an_archive_of_only_zeros_is_empty_only_if_it_is_small() -> None:
    with tarfile.open("a.tar", "w"):
        pass
    assert keys_in("a.tar") == []
    Path("a.tar").write_bytes(bytes(100_000))
    with pytest.raises(TruncatedShardError, match="after its end marker at byte 0"):
        keys_in("a.tar")
