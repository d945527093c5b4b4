"""The page on moving from webdataset: it contains every public name, and names nothing that does not exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torchdata.datapipes.iter  # noqa: F401  registers torchdata's stages
import webdataset
from torch.utils.data import IterDataPipe
from webdataset.compat import FluidInterface

import wds_datapipes
from wds_datapipes import ShardList, index
from wds_datapipes.errors import UnsafeInputError
from wds_datapipes.testing import build_shard

PAGE = Path(__file__).parents[1] / "docs/how-to/move-from-webdataset.md"
TEXT = PAGE.read_text("utf-8")
#: All words in code.
WORDS = {word for code in re.findall(r"`([^`\n]+)`", TEXT) for word in re.findall(r"\w+", code)}

#: Names of webdataset 0.2.86 that 1.0.2 no longer has.
OLD = {
    "cached_tarfile_samples", "cached_tarfile_to_samples", "cbors2_to_samples", "cbors_to_samples", "lru_cleanup",
    "maybe_cached_tarfile_to_samples",
}  # fmt: skip
#: The public names of its package wids.
WIDS = {"ShardListDataset", "ShardListSampler", "ChunkedSampler", "DistributedChunkedSampler"}

NEW = {name for name in dir(webdataset) if not name.startswith("_") and not inspect.ismodule(getattr(webdataset, name))}
FLUID = {name for name in dir(FluidInterface) if not name.startswith("_")}
ARGUMENTS = set(inspect.signature(webdataset.WebDataset.__init__).parameters) - {"self", "urls"}


@pytest.mark.parametrize("names", [OLD, WIDS, NEW, FLUID, ARGUMENTS], ids=len)
def test_every_public_name_is_on_the_page(names: set[str]) -> None:
    assert names
    assert sorted(names - WORDS) == []


def test_every_stage_that_the_page_advises_exists() -> None:
    advised = {
        stage
        for row in re.findall(r"^\|.*\| ?(.+?) ?\|$", TEXT, re.MULTILINE)
        for stage in re.findall(r"[`)]\.(\w+)\(", row)
    }
    assert len(advised) > 25
    assert sorted(advised - set(IterDataPipe.functions)) == []


def test_every_class_that_the_page_advises_exists() -> None:
    columns = re.findall(r"^\|.*\| ?(.+?) ?\|$", TEXT, re.MULTILINE)
    advised = {name for row in columns for name in re.findall(r"`([A-Z]\w+)[`(]", row)}
    assert "ShardList" in advised
    elsewhere = {"DataLoader2", "IterableWrapper"}
    known = {*wds_datapipes.__all__, *index.__all__, *vars(wds_datapipes.errors), *elsewhere}
    assert sorted(advised - known) == []


def read_first(url: str) -> dict[str, Any]:
    """Return the first sample of a shard."""
    sample: dict[str, Any] = next(iter(ShardList(url).load_wds_shards().group_samples()))
    return sample


@pytest.mark.parametrize("field", ["pyd", "pickle"])
def test_fields_that_can_execute_code_need_unsafe_to_be_written_and_read(field: str, tmp_path: Path) -> None:
    url, sample = str(tmp_path / "a.tar"), {"__key__": "a", field: {"x": 1}}
    with webdataset.TarWriter(url) as theirs:
        theirs.write(sample)
    with pytest.raises(UnsafeInputError, match="allow_pickle=True"), wds_datapipes.TarWriter(url) as ours:
        ours.write(sample)
    with wds_datapipes.TarWriter(url, allow_pickle=True) as ours:
        ours.write(sample)
    pipe = ShardList(url).load_wds_shards().group_samples()
    with pytest.raises(UnsafeInputError, match="allow_pickle=True"):
        list(pipe.wds_decode())
    assert next(iter(pipe.wds_decode(allow_pickle=True)))[field] == {"x": 1}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("closed_garbage")
def test_samples_of_local_shards_have_their_path(tmp_path: Path) -> None:
    url = build_shard(tmp_path / "a.tar", [{"__key__": "a", "cls": "1"}])
    theirs = next(iter(webdataset.WebDataset([url], shardshuffle=False)))
    stages = next(iter(webdataset.DataPipeline(webdataset.SimpleShardList([url]), webdataset.tarfile_to_samples())))
    assert read_first(url).keys() == theirs.keys() == stages.keys() | {"__local_path__"}
    assert read_first(url)["__local_path__"] == url
    copied = ShardList(url).cache_wds_shards(tmp_path / "copies").load_wds_shards().group_samples()
    assert Path(next(iter(copied))["__local_path__"]).parent == tmp_path / "copies"
