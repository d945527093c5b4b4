"""Pretrain a language model on shards of packed tokens, from two datasets whose proportions change by step.

Run ``torchrun --standalone --nproc-per-node 2 language_model.py``, and again after a crash: it resumes with the very
next batch, also on a different number of ranks. The first run writes documents of two kinds as rows of tokens. To train
on your own, replace `tokenize` and the functions in `DATASETS`, which yield documents. If there are many documents,
write each dataset once, in a separate program.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.datapipes.iter import IterableWrapper

from wds_datapipes import IndexedSamples, ShardReadingService, ShardWriter, WriteOptions
from wds_datapipes.index import EpochOptions

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: Rows of all ranks in a step, tokens in a row, and the width of the model.
BATCH_SIZE, ROW_LENGTH, WIDTH, HEADS = 16, 128, 64, 4
STEPS, SAVE_EVERY = 32, 8
#: A document begins with BEGIN, and its other tokens are bytes. A row ends with padding.
PADDING, BEGIN = 0, 1
#: From which step on, which part of the rows is from which dataset: the last weights are reached little by little.
SCHEDULE = [(0, {"stories": 3, "sums": 1}), (8, {"stories": 3, "sums": 1}), (24, {"stories": 1, "sums": 3}, "linear")]


def write_stories() -> Iterator[str]:
    """Yield short stories."""
    rng = random.Random(0)
    names, verbs = ("Ada", "Grace", "Alan", "Emmy"), ("sees", "likes", "paints", "hears")
    things = ("the sea", "a red house", "the old clock", "two birds")
    for _ in range(600):
        sentences = [f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(things)}." for _ in range(rng.randint(1, 9))]
        yield " ".join(sentences)


def write_sums() -> Iterator[str]:
    """Yield sums."""
    rng = random.Random(1)
    for _ in range(3000):
        first, second = rng.randint(1, 9), rng.randint(1, 9)
        yield f"{first} + {second} = {first + second}"


DATASETS = {"stories": write_stories, "sums": write_sums}


def tokenize(text: str) -> torch.Tensor:
    """Return the tokens of a document."""
    return torch.tensor([BEGIN, *text.encode()])


def write_rows(folder: Path) -> None:
    """Write the documents of each dataset as rows of ROW_LENGTH tokens, with indexes of the shards.

    Rows of equal length make steps that take equally long, and the proportions of a mixture those of tokens.
    """
    for name, documents in DATASETS.items():
        samples = [{"__key__": str(n), "tokens": tokenize(text)} for n, text in enumerate(documents())]
        rows = IterableWrapper(samples).pack_samples(ROW_LENGTH, "tokens", pad=PADDING, long_samples="split")
        with ShardWriter(
            f"{folder}/{name}-%03d.tar", maxcount=64, options=WriteOptions(index=True), verbose=False
        ) as writer:
            for number, row in enumerate(rows):
                writer.write({"__key__": f"{number:08d}", "npy": row["tokens"].numpy().astype(np.uint16)})


def make_loader(folder: Path) -> DataLoader2[Any]:
    """Return the loader of this rank: a run is one epoch of STEPS batches, on any number of ranks that divides 16."""
    mixture = IndexedSamples(
        {name: f"{folder}/{name}-*.tar" for name in DATASETS},
        weights=SCHEDULE,
        order="window",
        global_batch_size=BATCH_SIZE,
        epoch=EpochOptions(samples=STEPS * BATCH_SIZE),
    )
    batches = mixture.wds_decode().to_tuple("npy", "__dataset__").batch(BATCH_SIZE // dist.get_world_size()).collate()
    service = ShardReadingService(num_workers=1, distributed=True, timeout_s=600)
    loader: DataLoader2[Any] = DataLoader2(batches, reading_service=service)
    loader.seed(0)
    return loader


class LanguageModel(nn.Module):
    """A transformer of one block, whose attention does not cross from one document of a row to another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_position = nn.Embedding(256, WIDTH), nn.Embedding(ROW_LENGTH, WIDTH)
        self.norm, self.attend, self.merge = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.predict = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the token that follows each token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        begins = tokens == BEGIN
        document = begins.cumsum(1)
        position = places - torch.where(begins, places, 0).cummax(1).values  # in the document
        mask = (document[:, :, None] == document[:, None, :]) & (places[:, None] >= places)
        x = self.embed(tokens) + self.embed_position(position)
        query, key, value = self.attend(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.merge(scaled_dot_product_attention(query, key, value, mask[:, None]).transpose(1, 2).flatten(2))
        scores: torch.Tensor = self.predict(x + self.think(x))
        return scores


def train(folder: Path) -> None:
    """Train on this rank to the end of the run, from its last checkpoint, if any, and print the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first, checkpoint = 0, folder / "checkpoint.pt"
    with make_loader(folder) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=device, weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["data"])
            first = saved["step"]
        for step, (rows, datasets) in zip(count(first + 1), loader):
            tokens = rows.to(device).long()
            scores, targets = model(tokens[:, :-1]), tokens[:, 1:]
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
            # Divided by the same number on all ranks, so that each token weighs as much, whichever rank has it.
            (loss / targets.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
            facts = torch.stack([loss.detach(), (targets != PADDING).sum(), loss.new_tensor(datasets.count("sums"))])
            dist.all_reduce(facts)
            if dist.get_rank() == 0:
                print(f"Step {step}: loss {facts[0] / facts[1]:.6f}, {facts[2] / BATCH_SIZE:.0%} sums", flush=True)
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:  # the state of the loader is the same on all ranks
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "data": loader.state_dict(), "step": step}, checkpoint.with_suffix(".part"))
                checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one


def main() -> None:
    """Write the shards, unless a run has begun, and train."""
    parser = argparse.ArgumentParser(description="Pretrain a language model on a mixture of packed tokens")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the shards and the checkpoint")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    if dist.get_rank() == 0 and not (folder / "checkpoint.pt").exists():
        folder.mkdir(exist_ok=True)
        write_rows(folder)
    dist.barrier()
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
