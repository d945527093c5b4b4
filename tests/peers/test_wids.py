"""webdataset's wids, removed from it in version 1.0: it reads our index, and we read that of its tool.

This needs the packages of the dependency group ``wids``; `nox -s "peers(wids)"` has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import wids
from wids import wids_index

from wds_datapipes import ShardList
from wds_datapipes.index import Manifest, build_index, read_wids_index, write_wids_index
from wds_datapipes.testing import build_shard


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


def test_wids_reads_with_our_index_what_we_read(urls: list[str], tmp_path: Path) -> None:
    manifest = write_wids_index(urls, tmp_path / "index.json", name="letters")
    dataset = wids.ShardListDataset(str(tmp_path / "index.json"), cache_dir=str(tmp_path / "cache"), transformations=[])
    ours = list(ShardList(urls).load_wds_shards().group_samples())
    assert len(dataset) == manifest.samples == len(ours) == 9
    for number, expected in enumerate(ours):
        sample = dataset[number]
        assert sample["__key__"] == expected["__key__"]
        assert {field: sample[f".{field}"].read() for field in ("txt", "cls")} == {
            field: expected[field] for field in ("txt", "cls")
        }
    for shard, url in zip(dataset.shards, urls, strict=True):
        assert (shard["url"], shard["nsamples"]) == (url, len(build_index(url)))


def test_the_index_of_its_tool_is_read(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "index.json"
    monkeypatch.setattr(sys, "argv", ["widsindex", "create", *urls, "-o", str(place)])
    wids_index.main()
    ours = tmp_path / "ours.json"
    written = write_wids_index(sorted(urls), ours)
    assert read_wids_index(place, depth="bytes") == written == Manifest(written.entries)
    theirs = {entry["url"]: entry for entry in json.loads(place.read_text())["shardlist"]}
    for entry in json.loads(ours.read_text())["shardlist"]:
        assert {**entry, "url": f"{tmp_path}/{entry['url']}"} == theirs[f"{tmp_path}/{entry['url']}"]
