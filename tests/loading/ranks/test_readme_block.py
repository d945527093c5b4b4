"""The README's function for shards in a bucket trains and resumes on its eight ranks without a warning."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import on_ranks
from page_blocks import ROOT, blocks_of
from PIL import Image

from wds_datapipes import TarWriter, WriteOptions
from wds_datapipes.index import Manifest
from wds_datapipes.tools.plan.training_run import RunShape, plan_run
from wds_datapipes.types import ShardInfo

RANKS = 8
#: What the test changes: the store, how much is read and by how many processes, and how often is saved.
CHANGES = {
    '"s3://bucket/': '"bucket/',
    "num_workers=8": "num_workers=1",
    ", 90)": ", 2)",
    "step % 500 == 499": "step == 1",
}


def block() -> str:
    text: str
    [text] = [each.text for each in blocks_of((ROOT / "README.md").read_text("utf-8")) if "def train" in each.text]
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


class Recorder(torch.nn.Module):
    """A model that records the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1024)
        self.seen: list[tuple[tuple[int, ...], float]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(images.mean((2, 3)))
        self.seen.append((tuple(images.shape), float(images[:, 0, 0, 0].sum())))
        return found


@pytest.mark.timeout(600)
def test_the_block_for_a_bucket_runs_on_eight_ranks_and_resumes(folder: Path) -> None:
    (folder / "bucket").mkdir()
    for shard in range(1024):
        with TarWriter(f"bucket/train-{shard:06d}.tar", options=WriteOptions(index=True)) as writer:
            buffer = io.BytesIO()
            Image.fromarray(np.full((16, 24, 3), shard % 251, np.uint8)).save(buffer, "JPEG")
            for number in range(3):
                writer.write({"__key__": f"{shard}-{number}", "jpg": buffer.getvalue(), "cls": shard})

    def train(_: int) -> list[Any]:
        names: dict[str, Any] = {}
        exec(block(), names)
        model = Recorder()
        names["train"](model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model.seen

    importlib.import_module("torch._dynamo")  # which an optimizer imports, in each rank, in more than a second
    whole = on_ranks(RANKS, train, limit_s=500)
    assert [len(batches) for batches in whole] == [2 * 3] * RANKS
    assert {shape for batches in whole for shape, _ in batches} == {(128, 3, 224, 224)}
    assert (
        len({total for batches in whole for _, total in batches}) == 2 * 3 * RANKS
    )  # no batch is that of another rank
    rest = on_ranks(RANKS, train, limit_s=500)  # from the state of rank 0, after the second step of the second epoch
    assert rest == [batches[-1:] for batches in whole]
