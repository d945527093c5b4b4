"""The README's script for shards in a bucket runs on its eight ranks without a warning."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import on_ranks
from page_blocks import ROOT, blocks_of
from PIL import Image

from wds_datapipes import TarWriter, WriteOptions
from wds_datapipes.index import Manifest
from wds_datapipes.tools.plan.training_run import RunShape, plan_run
from wds_datapipes.types import ShardInfo

RANKS = 8
#: What the test changes: the store, and how much is read and by how many processes.
CHANGES = {'"s3://bucket/': '"bucket/', "num_workers=8": "num_workers=1", "range(90)": "range(2)"}


def block() -> str:
    text: str
    [text] = [each.text for each in blocks_of((ROOT / "README.md").read_text("utf-8")) if "def epochs" in each.text]
    for old, new in CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def test_the_plan_of_the_block_for_a_bucket_has_no_warning() -> None:
    """With ImageNet's number of images."""
    batch, lanes = (int(number) for number in re.findall(r"(?:global_batch_size|lanes)=(\d+)", block()))
    shards = Manifest([ShardInfo(f"{number:06d}.tar", 1251, 1251 * 110_000) for number in range(1024)])
    assert (
        plan_run(
            shards, RunShape(hosts=1, ranks_per_host=RANKS, num_workers=8, global_batch_size=batch, lanes=lanes)
        ).warnings
        == ()
    )


@pytest.mark.timeout(600)
def test_the_block_for_a_bucket_runs_on_eight_ranks(folder: Path) -> None:
    (folder / "bucket").mkdir()
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 24, 3), 7, np.uint8)).save(buffer, "JPEG")
    for shard in range(1024):
        with TarWriter(f"bucket/train-{shard:06d}.tar", options=WriteOptions(index=True)) as writer:
            for number in range(3):
                writer.write({"__key__": f"{shard}-{number}", "jpg": buffer.getvalue(), "cls": shard})

    def train(_: int) -> list[tuple[Any, int]]:
        names: dict[str, Any] = {}
        exec(block(), names)
        batches: Iterator[Any] = names["epochs"]()
        return [(tuple(images.shape), len({*labels.tolist()})) for images, labels in batches]

    found = on_ranks(RANKS, train, limit_s=500)
    assert [len(batches) for batches in found] == [2 * 3] * RANKS
    assert {shape for batches in found for shape, _ in batches} == {(128, 3, 224, 224)}
    assert min(classes for batches in found for _, classes in batches) > 20  # of 128 samples, however small the windows
