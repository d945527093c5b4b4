"""Train a vision-language model under FSDP on documents of text and images, packed into rows of equal work.

Run ``torchrun --standalone --nproc-per-node 2 vision_language.py``, and again after a crash: it resumes with the very
next rows, also with another number of ranks. The first run writes documents into ``run``. To train on your own, write
shards with the same fields: ``0.jpg``, ``1.jpg`` and so on are the images, and ``json`` has the text before each of
them and after the last, and their sizes. FSDP requires torch 2.6 or later.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, interpolate

from wds_datapipes import IndexedSamples, ShardReadingService, ShardWriter
from wds_datapipes.index import EpochOptions, Pack, build_indexes

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: Rows of all ranks in a step; tokens in a row, which the memory of a GPU limits; and documents in the run.
ROWS, ROW_LENGTH, DOCUMENTS, SAVE_EVERY = 8, 384, 1400, 8
#: An image is resized to whole patches of PATCH x PATCH pixels. Each patch is also a token of the language model.
PATCH, MOST_PATCHES, WIDTH = 8, 49, 64
#: What a patch takes in the encoder, compared with what a token takes in the language model.
ENCODER_COST = 0.5
#: A document begins with BEGIN, IMAGE stands for a patch, and other tokens are bytes.
BEGIN, IMAGE = 1, 2
#: Checkpoints contain the full parameters, which are sharded across ranks.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_shards(folder: Path) -> None:
    """Write documents with up to four images of different sizes, and indexes that say how much work each takes."""
    rng = random.Random(0)
    with ShardWriter(f"{folder}/documents-%03d.tar", maxcount=64, verbose=False) as writer:
        for number in range(256):
            colors = rng.choices(["red", "green", "blue", "black"], k=rng.choice([0, 1, 1, 2, 4]))
            sizes = [(rng.randint(12, 80), rng.randint(12, 80)) for _ in colors]
            images = {f"{n}.jpg": Image.new("RGB", *pair) for n, pair in enumerate(zip(sizes, colors, strict=True))}
            texts = [rng.choice(["See ", "Here come "]), *(f"{color} paper, " for color in colors)]
            writer.write({"__key__": f"{number:05d}", **images, "json": {"texts": texts, "sizes": sizes}})
    build_indexes(f"{folder}/documents-*.tar", columns=work_of, fields=["json"], progress=False)


def grid_of(width: int, height: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of the patches of an image, which keep its shape."""
    scale = min((MOST_PATCHES / (width * height)) ** 0.5, 1 / PATCH)
    return max(int(height * scale), 1), max(int(width * scale), 1)


def work_of(sample: dict[str, bytes]) -> dict[str, float]:
    """Return the columns of the index for a document; no image is read for this."""
    facts = json.loads(sample["json"])
    patches = sum(rows * columns for rows, columns in (grid_of(*size) for size in facts["sizes"]))
    tokens = 1 + len("".join(facts["texts"]).encode()) + patches
    return {"tokens": tokens, "cost": tokens + ENCODER_COST * patches}


def encode(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tokens (T) of a document, and the pixels of each patch, its row and its column (P, 3 * 8 * 8 + 2)."""
    tokens, patches = [BEGIN], [torch.empty(0, 3 * PATCH**2 + 2)]
    for number, text in enumerate(sample["json"]["texts"]):
        tokens += text.encode()
        if (image := sample.get(f"{number}.jpg")) is not None:
            rows, columns = grid_of(image.shape[2], image.shape[1])
            pixels = interpolate(image[None] / 255, (rows * PATCH, columns * PATCH), mode="bilinear", antialias=True)[0]
            pixels = pixels.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # (3, rows, columns, PATCH, PATCH)
            places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) / MOST_PATCHES**0.5
            patches.append(torch.cat([pixels.permute(1, 2, 0, 3, 4).reshape(len(places), -1), places], 1))
            tokens += [IMAGE] * len(places)
    return {"tokens": torch.tensor(tokens), "patches": torch.cat(patches)}


def make_loader(urls: str) -> DataLoader2[Any]:
    """Return the loader of this rank, whose batches are lists of rows; a run is one epoch.

    The index says how many tokens each document has, so rows are planned before the epoch: every rank has as many in
    each step, as FSDP requires, and about as much work.
    """
    pack = Pack(length="tokens", row=ROW_LENGTH, cost="cost", window=256)
    samples = IndexedSamples(
        urls, order="window", global_batch_size=ROWS, epoch=EpochOptions(samples=DOCUMENTS, pack=pack)
    )
    rows = samples.wds_decode("torchrgb8").map_samples(encode).pack_rows("tokens", lists=["patches"])
    service = ShardReadingService(num_workers=1, distributed=True, timeout_s=600)
    loader: DataLoader2[Any] = DataLoader2(rows.batch(ROWS // dist.get_world_size()), reading_service=service)
    loader.seed(0)
    return loader


class VisionLanguageModel(nn.Module):
    """A language model, which sees what is before a token in its document; and an encoder, which sees an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_patch, self.embed_token = nn.Linear(3 * PATCH**2 + 2, WIDTH), nn.Embedding(256, WIDTH)
        self.embed_position = nn.Embedding(ROW_LENGTH, WIDTH)
        self.encoder, self.language = (
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, norm_first=True) for _ in range(2)
        )
        self.predict = nn.Linear(WIDTH, 256)

    def forward(
        self, tokens: torch.Tensor, document: torch.Tensor, position: torch.Tensor, patches: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the losses of the text in a row, given the document and the position of each token."""
        image = (patches[:, -2:] == 0).all(1).cumsum(0)  # each begins at its first row and column
        features = self.encoder(self.embed_patch(patches), image[:, None] != image)  # True hides
        number = torch.arange(len(tokens), device=tokens.device)
        x = self.embed_token(tokens).masked_scatter((tokens == IMAGE)[:, None], features)
        hidden = (document[:, None] != document) | (number[:, None] < number)
        scores = self.predict(self.language(x + self.embed_position(position), hidden))
        targets = tokens[1:].where(tokens[1:] > IMAGE, -100)  # neither images nor the next document
        return cross_entropy(scores[:-1], targets, reduction="sum")


def train(folder: Path) -> None:
    """Train on this rank to the end of the run, from its last checkpoint, if any, and print the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model: Any = VisionLanguageModel().to(device)  # torch types neither its parts nor what fully_shard adds
    for part in (model.encoder, model.language, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, checkpoint = 0, folder / "checkpoint.pt"
    with make_loader(f"{folder}/documents-*.tar") as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
            parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
            set_state_dict(model, optimizer, **parts, options=WHOLE)
            loader.load_state_dict(saved["data"])
            first = saved["step"]
        for step, rows in zip(count(first + 1), loader):
            cost = sum(len(row["tokens"]) + ENCODER_COST * sum(map(len, row["patches"])) for row in rows)
            texts = sum(int((row["tokens"][1:] > IMAGE).sum()) for row in rows)
            work = torch.zeros(dist.get_world_size(), 2, device=device)  # of each rank, and its tokens to predict
            work[dist.get_rank()] = work.new_tensor([cost, texts])
            dist.all_reduce(work)
            (busiest, _), (mean, mean_texts) = work.amax(0), work.mean(0)
            total = torch.zeros((), device=device)
            # All ranks gather the parameters for each row together: with other numbers of rows, they would hang.
            for number, row in enumerate(rows, 1):
                model.set_requires_gradient_sync(number == len(rows))
                packed = [row["tokens"], row["segment_ids"], row["position_ids"], torch.cat(row["patches"])]
                loss = model(*(each.to(device) for each in packed)) / mean_texts
                loss.backward()
                total += loss.detach() / dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"Step {step}: loss {total:.6f}, {len(rows)} rows, busiest rank {busiest / mean:.3f}", flush=True)
            if step % SAVE_EVERY == 0:
                whole_model, whole_optimizer = get_state_dict(model, optimizer, options=WHOLE)  # from all ranks
                state = {"model": whole_model, "optimizer": whole_optimizer, "step": step}
                if dist.get_rank() == 0:  # the state of the loader is the same on all ranks
                    torch.save({**state, "data": loader.state_dict()}, checkpoint.with_suffix(".part"))
                    checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one


def main() -> None:
    """Write the shards, unless a run has begun, and train."""
    parser = argparse.ArgumentParser(description="Train a vision-language model on interleaved images and text")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the shards and the checkpoint")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    if dist.get_rank() == 0 and not (folder / "checkpoint.pt").exists():
        folder.mkdir(exist_ok=True)
        write_shards(folder)
    dist.barrier()
    train(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
