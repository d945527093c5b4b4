"""Train a detector on images with different numbers of boxes.

Run ``python detection_ragged_boxes.py "boxes-{000..099}.tar"`` with shards whose samples have ``jpg``, and ``json``
such as ``{"boxes": [[left, top, right, bottom], ...]}`` in pixels. Without shards, it draws some rectangles.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, l1_loss

from wds_datapipes import ShardList, ShardReadingService, ShardWriter, collate_samples

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: The network divides an image into CELLS x CELLS cells. Each finds the box whose center is in it.
BATCH_SIZE, SIZE, CELLS = 16, 64, 8


def write_shards(folder: str) -> str:
    """Write drawings of zero to four rectangles; return the pattern of the shards."""
    rng = random.Random(0)
    with ShardWriter(f"{folder}/boxes-%03d.tar", maxcount=32, verbose=False) as writer:
        for number in range(192):
            image = Image.new("RGB", (rng.randint(80, 160), rng.randint(80, 160)), (rng.randint(0, 90),) * 3)
            boxes = []
            for _ in range(rng.randint(0, 4)):
                width, height = rng.randint(12, 40), rng.randint(12, 40)
                left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
                boxes.append([left, top, left + width, top + height])
                color = (rng.randint(150, 255), rng.randint(150, 255), rng.randint(0, 255))
                ImageDraw.Draw(image).rectangle((left, top, left + width - 1, top + height - 1), fill=color)
            writer.write({"__key__": f"{number:05d}", "jpg": image, "json": {"boxes": boxes}})
    return f"{folder}/boxes-*.tar"


def resize(sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the image at one size, and its boxes (N, 4) as fractions of the width and height."""
    image = sample["jpg"]
    height, width = image.shape[1:]
    boxes = torch.tensor(sample["json"]["boxes"], dtype=torch.float32).reshape(-1, 4)
    resized = interpolate(image[None], (SIZE, SIZE), mode="bilinear", antialias=True)[0]
    return resized, boxes / torch.tensor([width, height, width, height])


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of batches: a tensor of images, and a list with the boxes of each."""
    samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(500)
    pairs = samples.wds_decode("torchrgb8").map(resize)
    batches = pairs.batch(BATCH_SIZE).collate(collate_fn=partial(collate_samples, ragged="list"))
    loader: DataLoader2[Any] = DataLoader2(batches, reading_service=ShardReadingService(num_workers=2))
    loader.seed(0)
    return loader


def make_model() -> nn.Module:
    """Return a network with five values for each cell: whether there is a box, its center and its size."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 5, 1)),
    )


def detection_loss(output: torch.Tensor, boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of the cells, and of the boxes in those that have one.

    Args:
        output: of the network, (B, 5, CELLS, CELLS).
        boxes: those of each image, (N, 4); a tensor if all images have equally many.
    """
    image_of_box = torch.repeat_interleave(torch.tensor([len(each) for each in boxes]))
    left, top, right, bottom = torch.cat([*boxes]).T
    center = torch.stack([left + right, top + bottom], 1) / 2
    column, row = (center * CELLS).long().clamp(max=CELLS - 1).T
    has_box = torch.zeros_like(output[:, 0])
    has_box[image_of_box, row, column] = 1
    loss = binary_cross_entropy_with_logits(output[:, 0], has_box)
    if len(image_of_box):
        wanted = torch.cat(
            [center * CELLS - torch.stack([column, row], 1), torch.stack([right - left, bottom - top], 1)], 1
        )
        loss = loss + l1_loss(output[image_of_box, 1:, row, column], wanted)
    return loss


def train(urls: str, epochs: int) -> None:
    """Train, and print the loss of each epoch."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with make_loader(urls) as loader:
        for epoch in range(1, epochs + 1):
            losses = []
            for images, boxes in loader:
                loss = detection_loss(model(images.float() / 255), boxes)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"Epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)


def main() -> None:
    """Train on the given shards, or on drawings of rectangles."""
    parser = argparse.ArgumentParser(description="Train a detector")
    parser.add_argument("urls", nargs="?", help="shards of jpg, and json with boxes; by default, drawings")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    with tempfile.TemporaryDirectory() as folder:
        train(args.urls or write_shards(folder), args.epochs)


if __name__ == "__main__":
    main()
