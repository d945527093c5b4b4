"""Fine-tune a language model on chats: each rank gets equally many rows of whole chats in every step.

Run ``torchrun --standalone --nproc-per-node 2 chat.py``, and again after a crash: it resumes with the very next rows,
also on a different number of ranks. The first run writes chats to shards, with a field ``json`` such as
``{"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]}``, and the
number of tokens of each to their indexes. To train on your own, replace `write_chats` and `encode`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from wds_datapipes import IndexedSamples, ShardReadingService, ShardWriter
from wds_datapipes.index import EpochOptions, Pack, build_indexes

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: Rows of all ranks in a step, tokens in a row, and the width of the model.
ROWS, ROW_LENGTH, WIDTH, HEADS = 8, 256, 64, 4
STEPS, SAVE_EVERY = 32, 8
#: A message begins with the token of its role and ends with END; its other tokens are bytes.
PADDING, END = 0, 1
ROLES = {"system": 2, "user": 3, "assistant": 4}
#: The label of tokens that are no answer, which is that of torch's losses.
IGNORED = -100


def write_chats(folder: Path) -> None:
    """Write chats of one to four questions and answers, and the number of tokens of each to the indexes."""
    rng = random.Random(0)
    with ShardWriter(f"{folder}/chats-%03d.tar", maxcount=250, verbose=False) as writer:
        for number in range(1000):
            messages = [{"role": "system", "content": "Answer briefly."}]
            for _ in range(rng.choice((1, 1, 2, 4))):
                first, second = rng.randint(1, 9), rng.randint(1, 9)
                messages.append({"role": "user", "content": f"What is {first} + {second}?"})
                messages.append({"role": "assistant", "content": f"It is {first + second}."})
            writer.write({"__key__": f"{number:06d}", "json": {"messages": messages}})
    build_indexes(f"{folder}/chats-*.tar", columns=count_tokens, fields=["json"])


def encode(messages: Sequence[Mapping[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a chat, and their labels: only what the assistant says is to be learned."""
    tokens, labels = list[int](), list[int]()
    for message in messages:
        content = [*message["content"].encode(), END]
        tokens += [ROLES[message["role"]], *content]
        labels += [IGNORED, *(content if message["role"] == "assistant" else [IGNORED] * len(content))]
    return torch.tensor(tokens), torch.tensor(labels)


def count_tokens(sample: Mapping[str, Any]) -> dict[str, int]:
    """Return the column of the index that rows are planned with."""
    return {"tokens": len(encode(json.loads(bytes(sample["json"]))["messages"])[0])}


def encode_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that are packed."""
    tokens, labels = encode(sample["json"]["messages"])
    return {**sample, "tokens": tokens, "labels": labels}


def make_loader(folder: Path) -> DataLoader2[Any]:
    """Return the loader of this rank: a step has the same rows on any number of ranks that divides ROWS."""
    epoch = EpochOptions(pack=Pack(length="tokens", row=ROW_LENGTH))
    chats = IndexedSamples(f"{folder}/chats-*.tar", order="window", global_batch_size=ROWS, epoch=epoch)
    rows = chats.wds_decode().map_samples(encode_sample)
    rows = rows.pack_rows("tokens", "labels", pad={"tokens": PADDING, "labels": IGNORED})
    columns = rows.to_tuple("tokens", "labels", "segment_ids", "position_ids")
    service = ShardReadingService(num_workers=1, distributed=True, timeout_s=600)
    loader: DataLoader2[Any] = DataLoader2(
        columns.batch(ROWS // dist.get_world_size()).collate(), reading_service=service
    )
    loader.seed(0)
    return loader


class LanguageModel(nn.Module):
    """A transformer of one block, whose attention does not cross from one chat of a row to another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_position = nn.Embedding(256, WIDTH), nn.Embedding(ROW_LENGTH, WIDTH)
        self.norm, self.attend, self.merge = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.predict = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: torch.Tensor, chats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the scores of the token that follows each token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (chats[:, :, None] == chats[:, None, :]) & (places[:, None] >= places)
        x = self.embed(tokens) + self.embed_position(positions)
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
        for step, batch in zip(count(first + 1), chain.from_iterable(repeat(loader))):
            tokens, labels, chats, positions = (each.to(device) for each in batch)
            # The first token of a chat has the label IGNORED, so no chat predicts the next one.
            scores, targets = model(tokens, chats, positions)[:, :-1], labels[:, 1:]
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
            facts = torch.stack([loss.detach(), (targets != IGNORED).sum(), (chats > 0).sum()]).double()
            dist.all_reduce(facts)
            # DistributedDataParallel averages over the ranks; so each token weighs as much, whichever rank has it.
            (loss * dist.get_world_size() / facts[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                filled = facts[2] / (ROWS * ROW_LENGTH)
                print(f"Step {step}: loss {facts[0] / facts[1]:.6f}, rows are {filled:.0%} full", flush=True)
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:  # the state of the loader is the same on all ranks
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "data": loader.state_dict(), "step": step}, checkpoint.with_suffix(".part"))
                checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one
            if step == STEPS:
                break


def main() -> None:
    """Write the shards, unless a run has begun, and train."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model on packed chats")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the shards and the checkpoint")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    if dist.get_rank() == 0 and not (folder / "checkpoint.pt").exists():
        folder.mkdir(exist_ok=True)
        write_chats(folder)
    dist.barrier()
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
