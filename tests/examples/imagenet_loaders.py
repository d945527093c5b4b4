"""Reads images with the loaders of the ImageNet example, on one rank of several, and prints on rank 0 what all saw.

The arguments are the folders of the images and of the shards, and the file of the states: they are loaded if the file
exists, and otherwise saved.
"""

import json
import sys
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/examples/imagenet"))

from batches import Batch, Loader, Settings
from main import make_loader

KINDS = ("files", "shards", "indexed")


def keys_of(batches: list[Batch]) -> list[list[str]]:
    """The keys of the samples in each batch that are not padding."""
    return [[key for key, pad in zip(b.keys, b.is_padding.tolist(), strict=True) if not pad] for b in batches]


def open_loader(kind: str, split: str = "train") -> Loader:
    data = sys.argv[1 if kind == "files" else 2]
    settings = Settings(data, batch_size=8, workers=1, size=32, seed=5)
    return make_loader(Namespace(loader=kind, dummy=False), settings, split)


def read_two_epochs(kind: str, states: dict[str, Any]) -> dict[str, Any]:
    """What this rank reads in an epoch, in one that is resumed, and for validation."""
    loader = open_loader(kind)
    found: dict[str, Any] = {"first epoch": keys_of(list(loader))}
    batches = iter(loader)
    found["begun"] = keys_of(list(islice(batches, 3)))
    states[kind] = loader.state_dict()
    rest = list(batches)
    loader.shutdown()

    found["resumed"] = keys_of(resumed := list(resume(kind, states)))
    found["resumed like uninterrupted"] = keys_of(rest) == found["resumed"] and all(
        torch.equal(a.images, b.images) and torch.equal(a.is_padding, b.is_padding)
        for a, b in zip(rest, resumed, strict=True)
    )
    validation = open_loader(kind, "val")
    found["validation"] = [
        (key, int(label), int(image.sum()))
        for keys, images, labels, _ in validation
        for key, label, image in zip(keys, labels, images, strict=True)
    ]
    validation.shutdown()
    return found


def resume(kind: str, states: dict[str, Any]) -> list[Batch]:
    loader = open_loader(kind)
    loader.load_state_dict(states[kind])
    loader.set_epoch(1)
    batches = list(loader)
    loader.shutdown()
    return batches


dist.init_process_group("gloo")
path = Path(sys.argv[3])
if path.exists():
    saved = json.loads(path.read_text())
    own: dict[str, Any] = {kind: keys_of(resume(kind, saved)) for kind in KINDS}
else:
    saved = {}
    own = {kind: read_two_epochs(kind, saved) for kind in KINDS}
of_ranks: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(of_ranks, own)
if dist.get_rank() == 0:
    path.write_text(json.dumps(saved))
    print(json.dumps(of_ranks))
dist.destroy_process_group()
