"""Every reader reads written shards back, and the same samples are written as the same bytes."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import example, given, settings

from wds_datapipes import TarWriter, WriteOptions
from wds_datapipes.io.compression.formats import COMPRESSIONS
from wds_datapipes.samples.keys import first_dot, is_meta
from wds_datapipes.tar.header_writer import HeaderWriter
from wds_datapipes.tar.reader import read_members

Samples = list[dict[str, Any]]
SUFFIXES: list[Any] = [each.suffix for each in COMPRESSIONS]

PARTS = st.text("aZ0_-é漢", min_size=1, max_size=8)
#: Around the lengths that fit into the name field (100 bytes) and the prefix (155), with a field of three letters.
LENGTHS = st.sampled_from([1, 95, 96, 97, 100, 150, 154, 155, 156, 260])
KEYS = st.one_of(
    st.lists(PARTS, min_size=1, max_size=3).map("/".join),
    LENGTHS.map("k".__mul__),
    st.builds("{}/{}".format, LENGTHS.map("d".__mul__), LENGTHS.map("k".__mul__)),
    LENGTHS.map("é".__mul__),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0."), min_size=1),
).filter(lambda key: first_dot(f"{key}.x") == (key, "x") and not is_meta(f"{key}.x"))
FIELDS = st.sampled_from(["txt", "cls", "jpg", "left.png", "_x", "seg.png", "é", "meta.json"])
DATA = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([0, 1, 511, 512, 513, 1024, 33_000, 70_000]).map(
        lambda size: bytes(range(256)) * (size // 256 + 1)
    ),
)
SAMPLES = st.lists(
    st.tuples(KEYS, st.dictionaries(FIELDS, DATA, min_size=1, max_size=4)), max_size=6, unique_by=lambda item: item[0]
).map(lambda items: [{"__key__": key, **fields} for key, fields in items])


def written(samples: Samples, **options: Any) -> tuple[bytes, TarWriter]:
    stream = io.BytesIO()
    with TarWriter(stream, WriteOptions(**options)) as shard:
        for sample in samples:
            shard.write(sample)
    return stream.getvalue(), shard


@settings(max_examples=80, deadline=None)
@given(SAMPLES)
@example([{"__key__": "k" * 96, "txt": b"", "cls": b"1"}])
@example([{"__key__": "d" * 155 + "/" + "k" * 96, "txt": b""}])
@example([{"__key__": "raw\udcff", "txt": b"a file name that is no UTF-8"}])
def test_reading_is_the_reverse_of_writing(samples: Samples) -> None:
    archive, shard = written(samples)
    members = list(read_members(io.BytesIO(archive), shard="x.tar"))
    assert [(name, data) for _, name, data, _ in members] == [
        (f"{sample['__key__']}.{field}", sample[field]) for sample in samples for field in list(sample)[1:]
    ]
    with tarfile.open(fileobj=io.BytesIO(archive), encoding="utf-8") as tar:
        assert [(each.name, each.size) for each in tar] == [(name, len(data)) for _, name, data, _ in members]
        for member in tar:
            assert (member.mtime, member.mode, member.uid, member.gid) == (0, 0o644, 0, 0)
            fits = member.name.isascii() and (len(member.name) <= 100 or "/" in member.name)
            assert bool(member.pax_headers) <= (not fits or len(member.name) > 100)
    assert len(archive) == shard.size + 1024


@settings(max_examples=20, deadline=None)
@given(SAMPLES)
def test_the_same_samples_are_the_same_bytes_compressed_or_not(samples: Samples) -> None:
    plain, _ = written(samples)
    for compress in (None, *SUFFIXES):
        archive, _ = written(samples, compress=compress)
        assert written(samples, compress=compress)[0] == archive
        assert (archive == plain) == (compress is None)


NAMED = [
    *({"__key__": f"{number:03d}", "txt": b"text %d" % number, "cls": b"%d" % number} for number in range(5)),
    {"__key__": "d" * 150 + "/" + "k" * 90, "txt": b"in the prefix"},
    {"__key__": "n" * 200, "txt": b"in a PAX record"},
    {"__key__": "grüße/漢字", "txt": b"not ASCII"},
]


def listed(*command: str) -> list[str]:
    finished = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
    )
    assert finished.stderr == ""
    return finished.stdout.splitlines()


def test_gnu_tar_lists_and_unpacks_it(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(written(NAMED)[0])
    names = [f"{sample['__key__']}.{field}" for sample in NAMED for field in list(sample)[1:]]
    assert listed("tar", "--quoting-style=literal", "-tf", str(tmp_path / "s.tar")) == names
    (tmp_path / "out").mkdir()
    listed("tar", "-xf", str(tmp_path / "s.tar"), "-C", str(tmp_path / "out"))
    for sample in NAMED:
        assert (tmp_path / "out" / f"{sample['__key__']}.txt").read_bytes() == sample["txt"]


def test_a_file_of_more_than_eight_gib(tmp_path: Path) -> None:
    size = 8**11 + 5
    header = HeaderWriter(user="", group="", mode=0o644, mtime=0).header("big.bin", size)
    path = tmp_path / "big.tar"
    with path.open("wb") as file:
        file.write(header)
        file.seek(size + -size % 512, io.SEEK_CUR)  # a hole, which takes no space
        file.write(HeaderWriter(user="", group="", mode=0o644, mtime=0).header("a.txt", 1) + b"x".ljust(512, b"\0"))
        file.write(bytes(1024))
    with tarfile.open(path) as tar:
        assert [(member.name, member.size) for member in tar] == [("big.bin", size), ("a.txt", 1)]
    assert [line.split()[2] for line in listed("tar", "-tvf", str(path))] == [str(size), "1"]
