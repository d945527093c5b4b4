"""Train on short clips, each cut at random from a video.

Run ``python video_clips.py "videos-{000..099}.tar"`` with shards whose samples have ``mp4`` and ``cls``. Without
shards, it makes some: a square that moves to the left, right, top or bottom. Needs the extra ``media``.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
from typing import Any

import av
import numpy as np
import torch
from torch import nn

from wds_datapipes import ShardList, ShardReadingService, ShardWriter

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

BATCH_SIZE, CLIP_FRAMES, SIZE = 16, 6, 32
#: How the square of a class moves in a frame, to the right and down.
DIRECTIONS = ((-2, 0), (2, 0), (0, -2), (0, 2))


def mp4_file(frames: Any) -> bytes:
    """Return an MP4 file of frames (H, W, 3)."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def write_shards(folder: str) -> str:
    """Write videos of squares; return the pattern of the shards."""
    rng = random.Random(0)
    with ShardWriter(f"{folder}/videos-%03d.tar", maxcount=32, verbose=False) as writer:
        for number in range(128):
            label = number % len(DIRECTIONS)
            frames = np.full((rng.randint(CLIP_FRAMES, 14), SIZE, SIZE, 3), rng.randint(0, 80), np.uint8)
            left, top = rng.randrange(SIZE), rng.randrange(SIZE)
            for time, frame in enumerate(frames):
                across, down = DIRECTIONS[label]
                rows, columns = (np.arange(8) + start + time * by for start, by in ((top, down), (left, across)))
                frame[np.ix_(rows % SIZE, columns % SIZE)] = 200
            writer.write({"__key__": f"{number:05d}", "mp4": mp4_file(frames), "cls": label})
    return f"{folder}/videos-*.tar"


def cut_clip(sample: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return consecutive frames from a random place of a video, the last frame again if it is too short."""
    frames, _, _ = sample["mp4"]  # frames (T, H, W, 3), audio, and the rates of both
    start = rng.randint(0, max(0, len(frames) - CLIP_FRAMES))
    places = torch.arange(start, start + CLIP_FRAMES).clamp(max=len(frames) - 1)
    return {"clip": frames[places].permute(3, 0, 1, 2).contiguous(), "cls": sample["cls"]}


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of batches of clips (B, 3, T, H, W) and labels."""
    samples = ShardList(urls).shuffle().sharding_filter().load_wds_shards().group_samples().shuffle_samples(100)
    clips = samples.wds_decode("torch_video").map_samples_with_rng(cut_clip).to_tuple("clip", "cls")
    service = ShardReadingService(num_workers=2)
    loader: DataLoader2[Any] = DataLoader2(clips.batch(BATCH_SIZE).collate(), reading_service=service)
    loader.seed(0)
    return loader


def make_model() -> nn.Module:
    """Return a network of convolutions over time and space."""
    return nn.Sequential(
        *(nn.Conv3d(3, 16, (3, 7, 7), stride=(1, 3, 3)), nn.BatchNorm3d(16), nn.ReLU()),
        *(nn.Conv3d(16, 32, 3), nn.BatchNorm3d(32), nn.ReLU()),
        *(nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(32, len(DIRECTIONS))),
    )


def train(urls: str, epochs: int) -> None:
    """Train, and print the loss of each epoch."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with make_loader(urls) as loader:
        for epoch in range(1, epochs + 1):
            losses = []
            for clips, labels in loader:
                loss = nn.functional.cross_entropy(model(clips.float() / 255), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"Epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)


def main() -> None:
    """Train on the given shards, or on moving squares."""
    parser = argparse.ArgumentParser(description="Train on clips of videos")
    parser.add_argument("urls", nargs="?", help="shards of mp4 and cls; by default, moving squares")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    with tempfile.TemporaryDirectory() as folder:
        train(args.urls or write_shards(folder), args.epochs)


if __name__ == "__main__":
    main()
