"""Train on tar shards on the Hugging Face Hub, cached on a local disk.

Run ``python hub_dataset.py "hf://datasets/USER/NAME/train-*.tar" --revision COMMIT --folder run`` with shards whose
samples have ``jpg`` or ``png``, and ``cls``, and again after a crash: it resumes with the very next batch. It needs the
extra ``hf``, and for private datasets a token, as ``hf auth login`` stores it. Without shards, it draws some, and needs
no network.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader

from wds_datapipes import ImageDecoder, RandomResizedCrop, ShardList, ShardWriter, StatefulShards

BATCH_SIZE, SIZE, SAVE_EVERY = 16, 32, 5
#: The shapes that are drawn without shards, by class.
SHAPES = ("ellipse", "rectangle", "line")


def write_shards(folder: Path) -> str:
    """Write drawings as a dataset of the Hub has its images; return the pattern of the shards."""
    if any(folder.glob("train-*.tar")):  # of the run that is resumed
        return f"{folder}/train-*.tar"
    rng = random.Random(0)
    with ShardWriter(f"{folder}/train-%04d.tar", maxcount=40, verbose=False) as writer:
        for number in range(320):
            image = Image.new("RGB", (rng.randint(60, 90), rng.randint(60, 90)), (rng.randint(0, 90),) * 3)
            left, top, label = rng.randint(4, 20), rng.randint(4, 20), rng.randrange(len(SHAPES))
            box = (left, top, left + rng.randint(25, 35), top + rng.randint(25, 35))
            color = (rng.randint(150, 255), rng.randint(150, 255), rng.randint(0, 255))
            getattr(ImageDraw.Draw(image), SHAPES[label])(box, fill=color, width=5)
            writer.write({"__key__": f"{number:05d}", "jpg": image, "cls": label})
    return f"{folder}/train-*.tar"


def make_data(urls: str, options: dict[str, Any], copies: Path) -> StatefulShards:
    """Return the batches of images and classes; each shard is downloaded once, and read from its copy in later epochs.

    Args:
        urls: the shards, such as ``hf://datasets/USER/NAME/train-*.tar``.
        options: those of the Hub, such as ``{"revision": COMMIT}``, with which a run always reads the same files.
        copies: the folder for copies of the shards.
    """
    shards = ShardList(urls, storage_options=options).shuffle().sharding_filter()
    samples = shards.cache_wds_shards(copies, max_bytes=100 * 10**9).load_wds_shards(storage_options=options)
    decoder = ImageDecoder("torchrgb8", crop=RandomResizedCrop(SIZE, scale=(0.8, 1.0), flip_probability=0.5))
    pairs = samples.group_samples().shuffle_samples(200).wds_decode(decoder).to_tuple("jpg;png", "cls")
    return StatefulShards(pairs.batch(BATCH_SIZE).collate(), seed=0)


def make_model(classes: int) -> nn.Module:
    """Return a small network."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(256, classes)),
    )


def train(data: StatefulShards, model: nn.Module, epochs: int, checkpoint: Path) -> None:
    """Train from the last checkpoint, if any, and print the loss of each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    epoch, losses = 0, list[float]()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])
        epoch, losses = saved["epoch"], saved["losses"]
    loader = DataLoader(data, batch_size=None, num_workers=2)
    for number in range(epoch, epochs):
        for images, labels in data.tracked(loader):
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
                torch.save({**state, "epoch": number, "losses": losses}, checkpoint.with_suffix(".part"))
                checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one
        print(f"Epoch {number + 1}: loss {sum(losses) / len(losses):.6f}", flush=True)
        losses = []


def main() -> None:
    """Train on the given shards, or on drawings."""
    parser = argparse.ArgumentParser(description="Train on a dataset of the Hugging Face Hub")
    parser.add_argument("urls", nargs="?", help="shards of jpg or png, and cls; by default, drawings")
    parser.add_argument("--revision", help="the commit of the dataset to read")
    parser.add_argument("--classes", type=int, default=len(SHAPES))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="of the copies and the checkpoint; by default, none is kept")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        urls = args.urls or write_shards(folder)
        data = make_data(urls, {"revision": args.revision} if args.revision else {}, folder / "copies")
        train(data, make_model(args.classes), args.epochs, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
