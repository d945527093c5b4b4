"""Pretrain a language model on documents packed into rows, from two datasets whose proportions change by step.

Run ``torchrun --standalone --nproc-per-node 2 language_model.py``, and again after a crash: it resumes with the very
next rows, also on a different number of ranks. The first run writes documents of two kinds. To train on your own,
replace `tokenize` and the functions in `DATASETS`, which yield documents. If there are many documents, write each
dataset once, in a separate program.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from wds_datapipes import IndexedSamples, ShardReadingService, ShardWriter, collate_samples
from wds_datapipes.index import EpochOptions, Pack, build_indexes

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: Rows of all ranks in a step, tokens in a row, and the width of the model.
BATCH_SIZE, ROW_LENGTH, WIDTH, HEADS = 16, 128, 64, 4
DOCUMENTS, SAVE_EVERY = 1600, 8
#: A document begins with BEGIN, and its other tokens are bytes. A row ends with padding.
PADDING, BEGIN = 0, 1
#: From which step on, which part of the documents is from which dataset: the last weights are reached little by little.
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


def count_tokens(sample: dict[str, bytes]) -> dict[str, int]:
    """Return the column of the index for a document."""
    return {"tokens": len(tokenize(sample["txt"].decode()))}


def write_documents(folder: Path) -> None:
    """Write the documents of each dataset, with indexes of their numbers of tokens."""
    for name, documents in DATASETS.items():
        with ShardWriter(f"{folder}/{name}-%03d.tar", maxcount=500, verbose=False) as writer:
            for number, text in enumerate(documents()):
                writer.write({"__key__": f"{number:08d}", "txt": text})
        build_indexes(f"{folder}/{name}-*.tar", columns=count_tokens, progress=False)


def encode(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a document, and its dataset."""
    return {"tokens": tokenize(sample["txt"]), "dataset": sample["__dataset__"]}


def make_loader(folder: Path) -> DataLoader2[Any]:
    """Return the loader of this rank: a run is one epoch of DOCUMENTS, on any number of ranks that divides 16.

    The index says how many tokens each document has, so rows are planned before the epoch, as many for every rank.
    """
    pack = Pack(length="tokens", row=ROW_LENGTH, window=200, long_samples="split")
    mixture = IndexedSamples(
        {name: f"{folder}/{name}-*.tar" for name in DATASETS},
        weights=SCHEDULE,
        order="window",
        global_batch_size=BATCH_SIZE,
        epoch=EpochOptions(samples=DOCUMENTS, pack=pack),
    )
    rows = mixture.wds_decode().map_samples(encode).pack_rows("tokens", pad=PADDING, lists=["dataset"])
    batches = rows.batch(BATCH_SIZE // dist.get_world_size()).collate(collate_fn=collate_samples)
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

    def forward(self, tokens: torch.Tensor, document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the scores of the token after each, given the document of each token, and its position in that."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
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
        for step, rows in zip(count(first + 1), loader):
            tokens, *places = (rows[name].to(device) for name in ("tokens", "segment_ids", "position_ids"))
            scores, targets = model(tokens[:, :-1], *(each[:, :-1] for each in places)), tokens[:, 1:]
            targets = targets.where(targets != BEGIN, PADDING)  # nothing predicts the next document
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
            # Divided by the same number on all ranks, so that each token weighs as much, whichever rank has it.
            (loss / targets.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
            datasets = [name for row in rows["dataset"] for name in row]
            counts = [int((targets != PADDING).sum()), datasets.count("sums"), len(datasets)]
            facts = torch.stack([loss.detach(), *(loss.new_tensor(each) for each in counts)])
            dist.all_reduce(facts)
            if dist.get_rank() == 0:
                print(f"Step {step}: loss {facts[0] / facts[1]:.6f}, {facts[2] / facts[3]:.0%} sums", flush=True)
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
        write_documents(folder)
    dist.barrier()
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
