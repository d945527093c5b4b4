"""Train on pairs of images and captions with a contrastive loss, as CLIP does.

Run ``python clip_image_text.py "pairs-{000..099}.tar"`` with shards whose samples have ``jpg`` and ``txt``. Without
shards, it draws some: colored shapes, such as "a small red circle".
"""

from __future__ import annotations

import argparse
import random
import tempfile
import zlib
from itertools import product
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import nn

from wds_datapipes import ImageDecoder, RandomResizedCrop, ShardList, ShardReadingService, ShardWriter

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

BATCH_SIZE, IMAGE_SIZE, WIDTH = 32, 32, 64
#: The number of words that are told apart, and the longest caption in words.
WORDS, CAPTION_LENGTH = 4096, 16


def write_shards(folder: str) -> str:
    """Write drawings of shapes and their captions; return the pattern of the shards."""
    rng = random.Random(0)
    colors = ("red", "green", "blue", "yellow", "black", "purple", "orange", "cyan")
    with ShardWriter(f"{folder}/pairs-%03d.tar", maxcount=64, verbose=False) as writer:
        descriptions = list(product(("small", "large"), colors, ("circle", "square"))) * 16
        rng.shuffle(descriptions)
        for number, (size, color, shape) in enumerate(descriptions):
            image = Image.new("RGB", (rng.randint(48, 80), rng.randint(48, 80)), "white")
            radius = rng.randint(6, 9) if size == "small" else rng.randint(16, 20)
            x, y = rng.randint(20, image.width - 20), rng.randint(20, image.height - 20)
            box = (x - radius, y - radius, x + radius, y + radius)
            draw = ImageDraw.Draw(image)
            (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=color)
            writer.write({"__key__": f"{number:05d}", "jpg": image, "txt": f"a {size} {color} {shape}"})
    return f"{folder}/pairs-*.tar"


def tokenize(caption: str) -> torch.Tensor:
    """Return a number for each word of a caption, cut or filled up with 0 to a fixed length."""
    words = caption.lower().split()[:CAPTION_LENGTH]
    tokens = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return torch.tensor(tokens + [0] * (CAPTION_LENGTH - len(tokens)))


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of batches of images and tokens."""
    crop = RandomResizedCrop(IMAGE_SIZE, scale=(0.8, 1.0), flip_probability=0.5)
    samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(1000)
    pairs = samples.wds_decode(ImageDecoder("torchrgb8", crop=crop)).map_dict(txt=tokenize).to_tuple("jpg;png", "txt")
    loader: DataLoader2[Any] = DataLoader2(
        pairs.batch(BATCH_SIZE).collate(), reading_service=ShardReadingService(num_workers=2)
    )
    loader.seed(0)
    return loader


class TwoTowers(nn.Module):
    """Maps images and captions to vectors of unit length; those of a pair should be similar."""

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

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the similarity of each image to each caption."""
        from_images = nn.functional.normalize(self.of_images(images.float() / 255))
        from_tokens = nn.functional.normalize(self.of_tokens(tokens))
        similarity: torch.Tensor = self.log_scale.exp() * from_images @ from_tokens.T
        return similarity


def contrastive_loss(similarity: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of finding the caption of an image and the image of a caption; equal captions are right."""
    is_right = (tokens[:, None] == tokens[None]).all(2).float()
    target = is_right / is_right.sum(1, keepdim=True)  # symmetric
    return (nn.functional.cross_entropy(similarity, target) + nn.functional.cross_entropy(similarity.T, target)) / 2


def train(urls: str, epochs: int) -> None:
    """Train, and print the loss of each epoch."""
    torch.manual_seed(0)
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    with make_loader(urls) as loader:
        for epoch in range(1, epochs + 1):
            losses = []
            for images, tokens in loader:
                loss = contrastive_loss(model(images, tokens), tokens)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"Epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)


def main() -> None:
    """Train on the given shards, or on drawings."""
    parser = argparse.ArgumentParser(description="Train on pairs of images and captions")
    parser.add_argument("urls", nargs="?", help="shards of jpg and txt; by default, drawings")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    with tempfile.TemporaryDirectory() as folder:
        train(args.urls or write_shards(folder), args.epochs)


if __name__ == "__main__":
    main()
