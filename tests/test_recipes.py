"""The pipelines of the pages: with any number of workers and ranks, every sample comes exactly once."""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from page_blocks import ROOT, blocks_of
from torchdata.dataloader2 import DataLoader2

from wds_datapipes import ShardReadingService
from wds_datapipes.testing import check_coverage

WORKERS = (0, 1, 2, 3)


class Recipe(NamedTuple):
    """A pipeline of a page: the expression that builds it there, and how often each sample comes."""

    page: str
    made_by: str
    times: int = 1


RECIPES = [
    Recipe("how-to/questions.md", "samples()"),
    Recipe("how-to/mix-datasets.md", 'dataset("web-{0..3}.tar")'),
    Recipe(
        "how-to/mix-datasets.md",
        'dataset("web-{0..3}.tar").mix_samples(dataset("books-{0..1}.tar"), weights=[1, 1], stop="all")',
    ),
    Recipe("how-to/mix-datasets.md", 'interleave("web-{0..3}.tar", 2)'),
    Recipe("how-to/shuffle.md", "pipeline(100)"),
    Recipe("how-to/batch-by-length.md", 'load_samples().map(itemgetter("__key__"))'),
    Recipe(
        "how-to/batch-by-length.md",
        'load_samples().bucket_samples("txt", batch_size=16).unbatch().map(itemgetter("__key__"))',
    ),
    Recipe("how-to/load-with-workers.md", "pipeline()"),
    Recipe("how-to/epochs-and-ranks.md", "split_pipeline().unbatch_samples()"),
    Recipe("how-to/checkpoint-in-the-middle-of-an-epoch.md", "make_data()[0].pipe"),
    Recipe("how-to/train-on-several-ranks.md", "pipeline().unbatch_samples()"),
    Recipe("how-to/cache-samples.md", "decoded()"),
    Recipe("how-to/decode-images.md", "load_samples()"),
    Recipe("explanation/data-loading.md", "pipeline()"),
    Recipe("explanation/order-and-epochs.md", "stream()"),
    # The page for users of webdataset has this instead of `repeat`.
    Recipe("how-to/questions.md", "samples().cycle(2)", times=2),
    Recipe("how-to/mix-datasets.md", 'interleave("web-{0..3}.tar", 2).cycle(3)', times=3),
]

#: Pages whose pipelines read from servers, need the data of a command, or time something: they are run unchanged.
ELSEWHERE = {
    "how-to/cache-shards.md",
    "how-to/find-the-bottleneck.md",
    "how-to/load-with-torchdata-nodes.md",
    "how-to/move-from-webdataset.md",
    "how-to/read-record-shards.md",
    "how-to/skip-bad-data.md",
    "how-to/read-from-stores.md",
    "how-to/write-a-stage.md",
    "how-to/write-shards.md",
    "index.md",
    "tutorials/getting-started.md",
}


def made(recipe: Recipe, module: ModuleType) -> Any:
    """Execute the definitions of a page, with the shards that it writes, and return a function that builds it."""
    names = vars(module)
    for block in blocks_of((ROOT / "docs" / recipe.page).read_text()):
        if block.kind != "python":
            continue
        for statement in ast.parse(block.text).body:
            text = ast.unparse(statement)
            is_definition = isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))
            writes = isinstance(statement, ast.For) and "build_shard(" in text
            if is_definition or writes or text.startswith(("urls =", "rng =")):
                exec(text, names)
        try:
            eval(recipe.made_by, names)
        except NameError:
            continue
        return lambda: eval(recipe.made_by, names)
    raise AssertionError(f"{recipe.page} has nothing any more that makes {recipe.made_by}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{Path(recipe.page).stem}-{recipe.made_by}")
def test_every_sample_comes_once(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # so that its functions can be pickled
    make = made(recipe, page)
    once = Counter(str(item) for item in make())
    assert once
    assert set(once.values()) == {recipe.times}
    for ranks, workers in [*((1, workers) for workers in WORKERS), (2, 2)]:
        check_coverage(make, ranks=ranks, workers=workers, key=str)
    with DataLoader2(make(), reading_service=ShardReadingService(2)) as loader:
        assert Counter(str(item) for item in loader) == once


def test_every_page_with_a_split_is_covered() -> None:
    pages = {
        os.fspath(page.relative_to(ROOT / "docs"))
        for page in (ROOT / "docs").rglob("*.md")
        if any(".sharding_filter()" in block.text for block in blocks_of(page.read_text()) if block.kind == "python")
    }
    assert pages == {recipe.page for recipe in RECIPES} | ELSEWHERE
