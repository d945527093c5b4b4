"""Train on a folder of images and captions that img2dataset has downloaded, with a contrastive loss, as CLIP does.

Run ``torchrun --standalone --nproc-per-node 2 clip_image_text.py laion`` with such a folder, or a URL such as
``s3://bucket/laion``, and again after a crash: it resumes with the very next batch. It reads the shards, such as
``00000.tar``, and from ``00000_stats.json`` how many pairs there are; it needs neither ``00000.parquet`` nor indexes.
Without a folder, it writes one with drawings of shapes, such as "a small red circle".
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it carries no types
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from wds_datapipes import ErrorBudget, ImageDecoder, RandomResizedCrop, ShardList, StatefulShards, TarWriter
from wds_datapipes.integrations.ranks import gather_states

#: Pairs of all ranks in a step.
BATCH_SIZE, EPOCHS, SAVE_EVERY = 32, 2, 8
IMAGE_SIZE, WIDTH = 32, 64
#: The number of words that are told apart, and the longest caption in words.
WORDS, CAPTION_LENGTH = 4096, 16


def write_folder(folder: Path) -> None:
    """Write drawings and their captions as img2dataset writes those that it could download."""
    rng = random.Random(0)
    folder.mkdir(exist_ok=True)
    captions = list(product(("small", "large"), ("red", "green", "blue", "yellow", "black"), ("circle", "square"))) * 3
    for shard in range(8):
        rng.shuffle(captions)
        with TarWriter(f"{folder}/{shard:05d}.tar") as writer:
            for number, (size, color, shape) in enumerate(captions):
                image = Image.new("RGB", (rng.randint(48, 80), rng.randint(48, 80)), "white")
                radius = rng.randint(6, 9) if size == "small" else rng.randint(16, 20)
                x, y = rng.randint(20, image.width - 20), rng.randint(20, image.height - 20)
                drawing = ImageDraw.Draw(image)
                draw = drawing.ellipse if shape == "circle" else drawing.rectangle
                draw((x - radius, y - radius, x + radius, y + radius), fill=color)
                facts = {"width": image.width, "height": image.height, "status": "success"}
                sample = {"jpg": image, "txt": f"a {size} {color} {shape}", "json": facts}
                writer.write({"__key__": f"{shard:05d}{number:04d}", **sample})
        stats = {"count": 70, "successes": len(captions), "failed_to_download": 70 - len(captions)}
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats))


def count_pairs(folder: str) -> int:
    """Return the number of pairs in a folder or in a store."""
    with fsspec.open_files(f"{folder}/*_stats.json") as files:
        return sum(json.load(file)["successes"] for file in files)


def is_usable(sample: dict[str, Any]) -> bool:
    """Whether an image has a caption, and no extreme shape."""
    width, height = sample["json"]["width"], sample["json"]["height"]
    return bool(sample["txt"].strip()) and max(width, height) <= 3 * min(width, height)


def tokenize(caption: str) -> torch.Tensor:
    """Return a number for each word of a caption, cut or filled up with 0 to a fixed length."""
    words = caption.lower().split()[:CAPTION_LENGTH]
    tokens = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return torch.tensor(tokens + [0] * (CAPTION_LENGTH - len(tokens)))


def make_data(folder: str) -> StatefulShards:
    """Return the batches of images and tokens of this rank: as many on every rank, from different shards.

    An epoch has as many batches as the folder has pairs for. It begins where the last one has ended, so pairs that are
    left out or damaged, and shards of different sizes, do not matter.
    """
    crop = RandomResizedCrop(IMAGE_SIZE, scale=(0.8, 1.0), flip_probability=0.5)
    samples = ShardList(f"{folder}/*.tar").shuffle().sharding_filter().load_wds_shards().group_samples()
    decoded = samples.shuffle_samples(200).wds_decode(
        ImageDecoder("torchrgb8", crop=crop), on_error=ErrorBudget(max_rate=0.01)
    )
    pairs = decoded.filter(is_usable).map_dict(txt=tokenize).to_tuple("jpg;webp;png", "txt")
    batches = pairs.batch(BATCH_SIZE // dist.get_world_size(), drop_last=True).collate()
    return StatefulShards(batches.with_epoch(count_pairs(folder) // BATCH_SIZE), seed=0)


class TwoTowers(nn.Module):
    """Maps images and captions to vectors; those of a pair should be similar."""

    def __init__(self) -> None:
        super().__init__()
        self.of_images = nn.Sequential(
            *(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, WIDTH, 5, stride=2), nn.ReLU()),
            *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(WIDTH, WIDTH)),
        )
        self.of_tokens = nn.Sequential(
            nn.EmbeddingBag(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of images, multiplied by the scale of the similarities, and those of captions."""
        return normalize(self.of_images(images.float() / 255)) * self.log_scale.exp(), normalize(self.of_tokens(tokens))


def gather(own: torch.Tensor) -> torch.Tensor:
    """Return the values of all ranks, with gradients for those of this rank."""
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(values, own.detach())
    values[dist.get_rank()] = own
    return torch.cat(values)


def contrastive_loss(images: torch.Tensor, captions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of finding the caption of an image and the image of a caption; equal captions are right."""
    similarity = images @ captions.T
    is_right = (tokens[:, None] == tokens[None]).all(2).float()
    target = is_right / is_right.sum(1, keepdim=True)  # symmetric
    return (cross_entropy(similarity, target) + cross_entropy(similarity.T, target)) / 2


def train(data: StatefulShards, folder: Path) -> None:
    """Train on this rank to the end of the run, from its last checkpoint, if any, and print the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTowers().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])
        step = saved["step"]
    loader = DataLoader(data, batch_size=None, num_workers=1, pin_memory=torch.cuda.is_available())
    while step < EPOCHS * len(loader):
        for batch in data.tracked(loader):
            images, tokens = (each.to(device) for each in batch)
            # Each pair is compared with those of all ranks.
            loss = contrastive_loss(*(gather(each) for each in (*model(images, tokens), tokens)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                print(f"Step {step}: loss {loss:.6f}", flush=True)
            if step % SAVE_EVERY == 0:
                position = gather_states(data.state_dict())  # each rank has its own position; rank 0 has all of them
                if dist.get_rank() == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "data": position, "step": step}, checkpoint.with_suffix(".part"))
                    checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one


def main() -> None:
    """Train on the given folder, or on drawings."""
    parser = argparse.ArgumentParser(description="Train on images and captions that img2dataset has downloaded")
    parser.add_argument("data", nargs="?", help="the folder that img2dataset has written; by default, drawings")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint, and of the drawings")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    if dist.get_rank() == 0 and not (options.folder / "checkpoint.pt").exists():
        options.folder.mkdir(exist_ok=True)
        if options.data is None:
            write_folder(options.folder / "pairs")
    dist.barrier()
    train(make_data(options.data or f"{options.folder}/pairs"), options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
