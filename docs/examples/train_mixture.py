"""Train a small language model on a mixture of token shards, on any number of ranks, from any checkpoint.

Run ``torchrun --standalone --nproc-per-node 2 train_mixture.py mixture --folder first --steps 60``, with a module
``mixture`` whose function ``build`` returns the pipeline of a rank.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from wds_datapipes import ShardReadingService

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

VOCABULARY, WIDTH = 64, 64


class LanguageModel(nn.Module):
    """A recurrent network that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.predict = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of each text."""
        scores = self.predict(self.layer(self.embed(tokens[:, :-1]))[0])
        return cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, is_padding: torch.Tensor
) -> float:
    """Train on this rank's part of a global batch, and return the loss of all of it, without padding."""
    total = (model(tokens.long()) * ~is_padding).sum()
    numbers = torch.stack([total.detach(), (~is_padding).sum().float()])
    dist.all_reduce(numbers)
    optimizer.zero_grad()
    (total * dist.get_world_size() / numbers[1]).backward()  # DistributedDataParallel averages over the ranks
    optimizer.step()
    return float(numbers[0] / numbers[1])


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module", help="has a function build(), which returns the pipeline")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints and the log")
    parser.add_argument("--steps", type=int, default=60, help="the number of the step to stop before")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--amend", action="store_true", help="the pipeline was changed, and a new phase begins")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = LanguageModel()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    service = ShardReadingService(num_workers=1, distributed=True, timeout_s=60)
    loader: DataLoader2[Any] = DataLoader2(import_module(args.module).build(), reading_service=service)
    loader.seed(1)
    step = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"], amend=args.amend)
        step = saved["step"]
    model = DistributedDataParallel(module)

    for keys, tokens, is_padding in islice(chain.from_iterable(repeat(loader)), args.steps - step):
        loss = train_step(model, optimizer, tokens, is_padding)
        step += 1
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, keys)  # only for the log
        if dist.get_rank() == 0:
            with (args.folder / "log.jsonl").open("a") as file:
                print(json.dumps({"step": step - 1, "loss": loss, "keys": [*chain(*every)]}), file=file)
            if step % args.save_every == 0:
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
                torch.save({**state, "step": step}, args.folder / f"{step}.pt")
    loader.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
