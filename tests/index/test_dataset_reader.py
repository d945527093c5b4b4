"""Reading samples of many shards by their indexes: the same samples as in a stream, and errors of changed shards."""

from __future__ import annotations

import os
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wds_datapipes import ShardList
from wds_datapipes.errors import ChangedShardError, MissingSidecarError, UnsupportedSidecarError
from wds_datapipes.index import AccessOptions, IndexOptions, build_indexes
from wds_datapipes.index.reading.dataset_reader import DatasetReader
from wds_datapipes.testing import build_shard

SIZES = (7, 1, 30, 12)


def write(folder: Path) -> list[str]:
    """Write shards with fields of 0 to 200,000 bytes, some samples without a field, and build their indexes."""
    rng = random.Random(0)
    urls = []
    for shard, size in enumerate(SIZES):
        samples: list[dict[str, bytes | str]] = [
            {
                "__key__": f"s{shard}/{number:03}",
                "txt": f"{shard} {number}",
                "jpg": rng.randbytes(rng.choice([0, 1, 511, 512, 513, 200_000])),
                **({"cls": f"{number}"} if number % 3 else {}),
            }
            for number in range(size)
        ]
        urls.append(build_shard(folder / f"{shard}.tar", samples))
    build_indexes(urls)
    return urls


def read(reader: DatasetReader, shards: list[int], numbers: list[int]) -> list[Any]:
    """Read samples, or raise the first error."""
    found: list[Any] = list(reader.stream([(np.array(shards, np.int64), np.array(numbers, np.int64))]))
    for item in found:
        if isinstance(item, Exception):
            raise item
    return found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[list[dict[str, Any]]]]:
    urls = write(tmp_path_factory.mktemp("dataset"))
    return urls, [list(ShardList(url).load_wds_shards().group_samples()) for url in urls]


@given(
    wanted=st.lists(st.sampled_from([(shard, number) for shard in range(4) for number in range(SIZES[shard])])),
    open_shards=st.integers(1, 5),
    fields=st.sampled_from([None, ["cls"], ["jpg", "TXT"], ["no"]]),
)
def test_samples_are_those_of_a_stream(
    dataset: tuple[list[str], list[list[dict[str, Any]]]],
    wanted: list[tuple[int, int]],
    open_shards: int,
    fields: list[str] | None,
) -> None:
    urls, streamed = dataset
    names = None if fields is None else {field.lower() for field in fields}
    with DatasetReader(urls, SIZES, fields=fields, access=AccessOptions(open_shards=open_shards)) as reader:
        found = read(reader, [shard for shard, _ in wanted], [number for _, number in wanted])
    expected = [
        {
            name: value
            for name, value in streamed[shard][number].items()
            if names is None or name in names or name[:2] == "__"
        }
        for shard, number in wanted
    ]
    assert found == expected
    assert [list(sample) for sample in found] == [list(sample) for sample in expected]


def test_few_files_are_open_at_a_time_and_none_at_the_end(dataset: Any, nothing_left: None) -> None:
    urls, _ = dataset
    with DatasetReader(urls, SIZES, access=AccessOptions(open_shards=2)) as reader:
        for shard in (0, 1, 2, 3, 0, 2):
            read(reader, [shard], [0])
            shards = [file.path for file in psutil.Process().open_files() if file.path.endswith(".tar")]
            assert len(shards) <= 2
            assert urls[shard] in shards


def replace_with(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


def test_a_changed_shard_is_an_error(tmp_path: Path) -> None:
    urls = write(tmp_path)
    whole = Path(urls[2]).read_bytes()
    with DatasetReader(urls, SIZES) as reader:
        read(reader, [2], [3])
        replace_with(urls[2], whole[:-10240])
        read(reader, [2], [3])  # the shard was opened before
    for content, message in (
        (whole[:-10240], rf"2\.tar has changed since it was indexed: it has {len(whole) - 10240} bytes instead of"),
        (whole[512:] + bytes(512), r"2\.tar has changed since it was indexed: "),
        (
            bytes(len(whole)),
            r"2\.tar has changed since it was indexed: at byte 10240 is no member instead of 's2/003\.txt'",
        ),
    ):
        replace_with(urls[2], content)
        with DatasetReader(urls, SIZES) as reader, pytest.raises(ChangedShardError, match=message):
            read(reader, [2], [3])


def test_an_index_that_does_not_match_is_an_error(tmp_path: Path) -> None:
    urls = write(tmp_path)
    with (
        DatasetReader(urls, [6, 1, 30, 12]) as reader,
        pytest.raises(ChangedShardError, match=r"0\.tar\.wdsidx has 7 samples, and the dataset was opened with 6"),
    ):
        read(reader, [0], [0])
    os.remove(f"{urls[0]}.wdsidx")
    with (
        DatasetReader(urls, SIZES, AccessOptions(indexes="require")) as reader,
        pytest.raises(MissingSidecarError, match=r"0\.tar\.wdsidx cannot be read"),
    ):
        read(reader, [0], [0])


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "a.tar.gz", [{"__key__": "a", "cls": "1"}])
    (result,) = build_indexes([url])
    with (
        DatasetReader([url], [result.samples]) as reader,
        pytest.raises(UnsupportedSidecarError, match="compressed with gzip, so its samples can only be read in order"),
    ):
        read(reader, [0], [0])


def test_long_names_and_pax_headers_are_read(tmp_path: Path) -> None:
    urls = []
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        url = str(tmp_path / f"{form}.tar")
        with tarfile.open(url, "w", format=form) as archive:
            for number in range(3):
                (tmp_path / "data").write_text(f"{number}")
                archive.add(tmp_path / "data", f"{'ä' * 90}{number}.cls")
        urls.append(url)
    sizes = [result.samples for result in build_indexes(urls)]
    with DatasetReader(urls, sizes) as reader:
        assert [sample["cls"] for sample in read(reader, [0, 1, 1], [2, 0, 2])] == [b"2", b"0", b"2"]


def test_fields_of_an_index_that_keeps_capital_letters_are_matched_exactly(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "a.tar", [{"__key__": "a", "TXT": "one", "txt": "two"}])
    build_indexes([url], options=IndexOptions(lowercase=False))
    with DatasetReader([url], [1], fields=["TXT"]) as reader:
        (sample,) = read(reader, [0], [0])
    assert {name: value for name, value in sample.items() if name[:2] != "__"} == {"TXT": b"one"}
