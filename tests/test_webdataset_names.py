"""The page on the names of webdataset has every public name, and no name that does not exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torchdata.datapipes.iter  # noqa: F401  registers torchdata's stages
import webdataset
from torch.utils.data import IterDataPipe
from webdataset.compat import FluidInterface

import wds_datapipes
from wds_datapipes import index

PAGE = Path(__file__).parents[1] / "docs/reference/names-of-webdataset.md"
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


def test_every_stage_and_class_that_the_page_advises_exists() -> None:
    columns = re.findall(r"^\|.*\| ?(.+?) ?\|$", TEXT, re.MULTILINE)
    stages = {stage for row in columns for stage in re.findall(r"[`)]\.(\w+)\(", row)}
    assert len(stages) > 25
    assert sorted(stages - set(IterDataPipe.functions)) == []
    classes = {name for row in columns for name in re.findall(r"`([A-Z]\w+)[`(]", row)}
    assert "ShardList" in classes
    known = {*wds_datapipes.__all__, *index.__all__, *vars(wds_datapipes.errors), "DataLoader2", "IterableWrapper"}
    assert sorted(classes - known) == []
