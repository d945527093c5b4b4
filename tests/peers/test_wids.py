"""webdataset's wids, removed from it in version 1.0: it reads our index, and we read that of its tool.

This needs the packages of the dependency group ``wids``; `nox -s "peers(wids)"` has them. The numbers in names are
those of the rows in `tests/contract/test_contract_table.py`.
"""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import wids
from wids import wids_index
from wids.wids_lru import LRUCache
from wids.wids_mmtar import MMIndexedTar

from wds_datapipes import IndexedSamples
from wds_datapipes.index import AccessOptions, EpochOptions, Manifest, build_indexes, read_wids_index, write_wids_index
from wds_datapipes.index.format.index_copies import DatasetIndexes
from wds_datapipes.index.read.sample_reader import SampleReader
from wds_datapipes.testing import build_shard, check_coverage


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    (tmp_path / "more").mkdir()
    return [
        build_shard(
            tmp_path / f"{name}.tar",
            [
                {"__key__": f"{name}{number}", "txt": f"text {number}" * number, "cls": f"{number}"}
                for number in range(count)
            ],
        )
        for name, count in (("a", 3), ("more/b", 5), ("c", 1))
    ]


def test_the_index_of_its_tool_is_read(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "index.json"
    monkeypatch.setattr(sys, "argv", ["widsindex", "create", *urls, "-o", str(place)])
    wids_index.main()
    ours = tmp_path / "ours.json"
    manifest = Manifest(build_indexes(sorted(urls)))
    write_wids_index(manifest, ours)
    assert read_wids_index(place) == manifest
    theirs = {entry["url"]: entry for entry in json.loads(place.read_text())["shardlist"]}
    for entry in json.loads(ours.read_text())["shardlist"]:
        assert {**entry, "url": f"{tmp_path}/{entry['url']}"}.items() <= theirs[f"{tmp_path}/{entry['url']}"].items()


def test_74_a_dataset_knows_its_length_and_has_numbered_samples(urls: list[str], tmp_path: Path) -> None:
    place, cache = tmp_path / "index.json", str(tmp_path / "cache")
    write_wids_index(Manifest(build_indexes(urls)), place, name="letters")
    theirs = wids.ShardListDataset(str(place), cache_dir=cache, cache_size=2, transformations=[])
    ours = IndexedSamples(urls).map_style()
    assert len(theirs) == len(ours) == 9
    for number in range(9):
        sample, expected = theirs[number], ours[number]
        assert sample["__key__"] == expected["__key__"]
        assert all(sample[f".{field}"].read() == expected[field] for field in ("txt", "cls"))
    assert [(shard["url"], shard["nsamples"]) for shard in theirs.shards] == [*zip(urls, (3, 5, 1), strict=True)]
    assert list(theirs.cache.keys()) == [shard["url"] for shard in theirs.shards[1:]]


def test_75_fields_that_end_in_gz_are_decompressed(tmp_path: Path) -> None:
    url = build_shard(
        tmp_path / "z.tar", [{"__key__": "a", "txt.gz": gzip.compress(b"one"), "json.gz": gzip.compress(b"[1]")}]
    )
    write_wids_index(Manifest(build_indexes([url])), tmp_path / "index.json")
    theirs = wids.ShardListDataset(str(tmp_path / "index.json"), cache_dir=str(tmp_path / "cache"))[0]
    (ours,) = IndexedSamples([url]).wds_decode()
    assert theirs[".txt.gz"] == ours["txt.gz"] == "one"
    assert theirs[".json.gz"] == ours["json.gz"] == [1]


def test_76_samplers_cover_the_data_shard_by_shard(urls: list[str], tmp_path: Path) -> None:
    write_wids_index(Manifest(build_indexes(urls)), tmp_path / "index.json")
    dataset = wids.ShardListDataset(str(tmp_path / "index.json"), cache_dir=str(tmp_path / "cache"))
    theirs = list(wids.ShardedSampler(dataset))
    ours = list(IndexedSamples(urls, order="window", epoch=EpochOptions(window_shards=1)))
    assert sorted(theirs) == list(range(9))
    assert len({sample["__key__"] for sample in ours}) == 9
    found = [[dataset.get_shard(number)[2]["url"] for number in theirs], [sample["__url__"] for sample in ours]]
    for shards in found:
        assert sum(one != other for one, other in pairwise(shards)) == 2, "each shard is read once"
    check_coverage(lambda: IndexedSamples(urls, remainder="keep"), ranks=2, workers=2)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_77_archives_of_all_formats_are_indexed(kind: int, tmp_path: Path) -> None:
    members = {"a.txt": b"one", "a.cls": b"1", "b.txt": b"two" * 500}
    with tarfile.open(tmp_path / "x.tar", "w", format=kind) as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, BytesIO(data))
    theirs = MMIndexedTar(str(tmp_path / "x.tar"))
    assert dict(theirs) == members
    theirs.close()
    ours = IndexedSamples([str(tmp_path / "x.tar")], order="sequential")
    assert {
        f"{sample['__key__']}.{field}": sample[field] for sample in ours for field in ("txt", "cls") if field in sample
    } == members


def test_78_the_shards_used_last_stay_open(urls: list[str]) -> None:
    order = [0, 1, 0, 2]
    released: list[int] = []
    theirs = LRUCache(2, release_handler=lambda key, _: released.append(key))
    for number in order:
        theirs[number] = urls[number]
    assert (list(theirs.keys()), released) == ([0, 2], [1])
    build_indexes(urls)
    access = AccessOptions(open_shards=2)
    with SampleReader(urls, DatasetIndexes(urls, [3, 5, 1], access).read, access) as ours:
        for _ in ours.stream((np.array([shard]), np.array([0])) for shard in order):
            pass
        still_open = {file.path for file in psutil.Process().open_files()}
    assert [number for number, url in enumerate(urls) if url in still_open] == [0, 2]
