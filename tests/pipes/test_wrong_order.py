"""Stages in the wrong order: the error names the stage, what it got, and the stages that belong before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torchdata.datapipes.iter import FileLister

from wds_datapipes import ShardList
from wds_datapipes.errors import WdsError
from wds_datapipes.testing import build_shard

Build = Callable[[IterDataPipe[Any]], IterDataPipe[Any]]
URLS = r"got a str: put \.load_wds_shards\(\)\.group_samples\(\) before it"
MEMBERS = "got a Member: put it after group_samples"
TUPLES = "got a tuple: put it after group_samples and before stages such as to_tuple"
BATCHES = r"got a DataChunk: put it before \.batch\(\)"
OLD = r"write ShardList\(urls\)\.load_wds_shards\(\)\.group_samples\(\) instead"

CASES: dict[str, tuple[Build, str]] = {
    "wds_decode of URLs": (lambda urls: urls.wds_decode(), URLS),
    "to_tuple of URLs": (lambda urls: urls.to_tuple("cls"), URLS),
    "group_samples of URLs": (lambda urls: urls.group_samples(), r"got str.*Put \.load_wds_shards\(\) before it"),
    "wds_decode of members": (lambda urls: urls.load_wds_shards().wds_decode(), MEMBERS),
    "to_tuple of members": (lambda urls: urls.load_wds_shards().to_tuple("cls"), MEMBERS),
    "map_dict of members": (lambda urls: urls.load_wds_shards().map_dict(cls=len), MEMBERS),
    "load_wds_shards of members": (lambda urls: urls.load_wds_shards().load_wds_shards(), "must yield str, not Member"),
    "cache_wds_shards of members": (lambda urls: urls.load_wds_shards().cache_wds_shards("c"), "must yield str, not M"),
    "group_samples of samples": (lambda urls: samples(urls).group_samples(), "got dict.*It may already be a sample"),
    "wds_decode of tuples": (lambda urls: samples(urls).to_tuple("cls").wds_decode(), TUPLES),
    "wds_decode of batches": (lambda urls: samples(urls).batch(2).wds_decode(), BATCHES),
    "rename of batches": (lambda urls: samples(urls).batch(2).rename(label="cls"), BATCHES),
    "map_tuple of samples": (lambda urls: samples(urls).map_tuple(len), "got a sample: put it after to_tuple"),
    "writing tuples": (
        lambda urls: samples(urls).to_tuple("cls").write_wds_shards("b-%d.tar"),
        r"not a tuple\. Write samples as \.group_samples\(\) yields them, before stages such as \.to_tuple\(\)",
    ),
    "group_samples of torchdata's files": (
        lambda _: old_files().group_samples(),
        r"got tuple.*In place of torchdata's \.load_from_tar\(\), write ShardList\(urls\)\.load_wds_shards\(\)",
    ),
    "wds_decode of torchdata's samples": (lambda _: old_files().webdataset().wds_decode(), f"field '.cls' .*{OLD}"),
    "to_tuple of torchdata's samples": (lambda _: old_files().webdataset().to_tuple("cls"), f"'.cls'.*{OLD}"),
    "map_dict of torchdata's samples": (lambda _: old_files().webdataset().map_dict(cls=len), f"'.cls'.*{OLD}"),
}


def samples(urls: IterDataPipe[Any]) -> IterDataPipe[Any]:
    pipe: IterDataPipe[Any] = urls.load_wds_shards().group_samples()
    return pipe


def old_files() -> IterDataPipe[Any]:
    """The files of the shard, as torchdata's own stages yield them."""
    pipe: IterDataPipe[Any] = FileLister(".", "*.tar").open_files(mode="b").load_from_tar()
    return pipe


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*StreamWrapper:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_error_names_the_stages_that_belong_before(case: str, folder: Path) -> None:
    build_shard("a.tar", [{"__key__": str(number), "cls": b"1"} for number in range(2)])
    build, message = CASES[case]
    with pytest.raises((TypeError, WdsError), match=message):
        list(build(ShardList(f"{folder}/a.tar")))
