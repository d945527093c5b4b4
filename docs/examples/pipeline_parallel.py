"""Train a model in stages, as pipeline parallelism does: the ranks of a pipeline read the same packed rows.

Run ``torchrun --standalone --nproc-per-node 2 pipeline_parallel.py``, and again after a crash: it resumes with the very
next rows, also with other numbers of pipelines and of stages. With ``--nproc-per-node 4``, two pipelines of two stages
share each step, and with ``--stages 4``, one has four. The first run writes documents of images and text into ``run``.
Each patch of an image is a token. Tests run this with torch 2.13.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, pad

from wds_datapipes import IndexedSamples, ShardReadingService, ShardWriter
from wds_datapipes.index import EpochOptions, Pack, build_indexes

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: Rows of all pipelines in a step, tokens in a row, and documents in the run.
ROWS, ROW_LENGTH, DOCUMENTS, SAVE_EVERY = 8, 256, 760, 8
PATCH, WIDTH, HEADS, LAYERS = 8, 64, 4, 4
#: A document begins with BEGIN, IMAGE stands for a patch, and other tokens are bytes; the rest of a row is 0.
BEGIN, IMAGE = 1, 2
#: The state of the optimizer has the names of parameters, so that stages find theirs.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def write_shards(folder: Path) -> None:
    """Write documents of images and what they show, with the number of tokens of each in the indexes."""
    rng = random.Random(0)
    with ShardWriter(f"{folder}/documents-%03d.tar", maxcount=64, verbose=False) as writer:
        for number in range(256):
            colors = rng.choices(["red", "green", "blue", "black"], k=rng.randint(1, 4))
            sizes = [(PATCH * rng.randint(1, 4), PATCH * rng.randint(1, 4)) for _ in colors]
            images = {f"{n}.png": Image.new("RGB", *pair) for n, pair in enumerate(zip(sizes, colors, strict=True))}
            texts = [f"This is {color} paper. " for color in colors]
            writer.write({"__key__": f"{number:05d}", **images, "json": {"texts": texts, "sizes": sizes}})
    build_indexes(f"{folder}/documents-*.tar", columns=count_tokens, fields=["json"], progress=False)


def count_tokens(sample: dict[str, bytes]) -> dict[str, int]:
    """Return the column of the index that rows are planned with; no image is read for this."""
    facts = json.loads(sample["json"])
    patches = sum(width * height // PATCH**2 for width, height in facts["sizes"])
    return {"tokens": 1 + patches + len("".join(facts["texts"]).encode())}


def encode(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tokens (T) of a document, and the pixels (P, 3 * 8 * 8) of its patches."""
    tokens, patches = [BEGIN], list[torch.Tensor]()
    for number, text in enumerate(sample["json"]["texts"]):
        pixels = (sample[f"{number}.png"] / 255).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        patches.append(pixels.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1))
        tokens += [*[IMAGE] * len(patches[-1]), *text.encode()]
    return {"tokens": torch.tensor(tokens), "patches": torch.cat(patches)}


def place_patches(row: dict[str, Any]) -> dict[str, Any]:
    """Give each token of a row pixels, which are 0 for text: stages exchange tensors whose shapes never change."""
    pixels = torch.zeros(ROW_LENGTH, 3 * PATCH**2)
    pixels[row["tokens"] == IMAGE] = torch.cat(row["patches"])
    return {**row, "patches": pixels}


def make_loader(urls: str, pipelines: DeviceMesh) -> DataLoader2[Any]:
    """Return the loader of this rank, whose batches are lists of rows; a run is one epoch.

    Args:
        urls: the shards.
        pipelines: the dimension of the mesh along which data differ. All stages of a pipeline read the same rows.
    """
    epoch = EpochOptions(samples=DOCUMENTS, pack=Pack(length="tokens", row=ROW_LENGTH))
    samples = IndexedSamples(urls, order="window", global_batch_size=ROWS, epoch=epoch)
    rows = samples.wds_decode("torchrgb8").map_samples(encode).pack_rows("tokens", lists=["patches"], pad=0)
    service = ShardReadingService(num_workers=1, distributed=pipelines, timeout_s=600)
    loader: DataLoader2[Any] = DataLoader2(
        rows.map(place_patches).batch(ROWS // pipelines.size()), reading_service=service
    )
    loader.seed(0)
    return loader


class VisionLanguageModel(nn.Module):
    """A stage of a model whose attention stays within a document, given the tokens or what the stage before returns."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        # All parts are made before some are dropped, so the first weights do not depend on the number of stages.
        parts: dict[str, nn.Module] = {
            "token": nn.Embedding(256, WIDTH),
            "patch": nn.Linear(3 * PATCH**2, WIDTH),
            "position": nn.Embedding(ROW_LENGTH, WIDTH),
        }
        layers = [
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0, norm_first=True, batch_first=True)
            for _ in range(LAYERS)
        ]
        predict = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.embed = nn.ModuleDict(parts if stage == 0 else {})
        self.layers = nn.ModuleDict({f"{n}": layers[n] for n in range(LAYERS) if n * stages // LAYERS == stage})
        self.predict = predict if stage == stages - 1 else None

    def forward(
        self, x: torch.Tensor, patches: torch.Tensor, segment_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores of the next token in the last stage, and the features of each token in the others."""
        if self.embed:
            features = self.embed["patch"](patches) * (x == IMAGE)[..., None]
            x = self.embed["token"](x) + self.embed["position"](position_ids) + features
        number = torch.arange(ROW_LENGTH, device=x.device)
        hidden = (segment_ids[:, :, None] != segment_ids[:, None]) | (number[:, None] < number)
        for layer in self.layers.values():
            x = layer(x, hidden.repeat_interleave(HEADS, 0))
        return x if self.predict is None else self.predict(x)


def sum_losses(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all tokens of text."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")


def train(folder: Path, mesh: DeviceMesh, device: torch.device) -> None:
    """Train a stage to the end of the run, from the last checkpoint, if any; the last stage prints the losses."""
    pipelines, stages = mesh["pipelines"], mesh["stages"]
    torch.manual_seed(0)
    model = VisionLanguageModel(stages.get_local_rank(), stages.size()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stage = PipelineStage(model, stages.get_local_rank(), stages.size(), device, group=stages.get_group())
    # Each row is a microbatch. Rows are planned, so every pipeline has as many in each step, as the schedule requires.
    schedule = Schedule1F1B(stage, ROWS // pipelines.size(), sum_losses, scale_grads=False)
    first, checkpoint = 0, folder / "checkpoint.pt"
    with make_loader(f"{folder}/documents-*.tar", pipelines) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
            own = {name: saved["model"][name] for name in model.state_dict()}
            parts = {"model_state_dict": own, "optim_state_dict": saved["optimizer"]}
            set_state_dict(model, optimizer, **parts, options=BY_NAME)
            loader.load_state_dict(saved["data"])
            first = saved["step"]
        for step, rows in zip(count(first + 1), loader):
            names = ("tokens", "patches", "segment_ids", "position_ids")
            batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]).to(device) for name in names}
            tokens = batch.pop("tokens")
            following = pad(tokens[:, 1:], (0, 1))
            targets = following.where(following > IMAGE, -100)  # neither images nor the next document
            losses, inputs = list[torch.Tensor](), [tokens] if stage.is_first else []
            # Other stages receive the features of the rows from the stage before, and have the rest of the same rows.
            schedule.step(*inputs, target=targets, losses=losses, **batch)
            total = torch.zeros(2, device=device)  # of all pipelines: the loss, and the number of tokens to predict
            if stage.is_last:
                total += torch.stack([torch.stack(losses).detach().sum(), (targets > 0).sum()])
            dist.all_reduce(total)
            for gradient in [each.grad for each in model.parameters() if each.grad is not None]:
                dist.all_reduce(gradient, group=pipelines.get_group())
                gradient /= total[1]
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == stages.size() - 1:
                print(f"Step {step}: loss {total[0] / total[1]:.6f}, {len(rows)} rows", flush=True)
            if step % SAVE_EVERY == 0 and pipelines.get_local_rank() == 0:
                save(checkpoint, stages, model, optimizer, {"data": loader.state_dict(), "step": step})


def save(checkpoint: Path, stages: DeviceMesh, model: nn.Module, optimizer: Any, others: dict[str, Any]) -> None:
    """Save the parts of all stages of a pipeline; the state of the loader is the same on all ranks."""
    own = get_state_dict(model, optimizer, options=BY_NAME)
    parts: list[Any] = [None] * stages.size()
    dist.gather_object(own, parts if stages.get_local_rank() == 0 else None, 0, stages.get_group())
    if stages.get_local_rank() == 0:
        whole_model = {name: value for part, _ in parts for name, value in part.items()}
        whole_optimizer = {name: value for _, part in parts for name, value in part.items()}
        torch.save({"model": whole_model, "optimizer": whole_optimizer, **others}, checkpoint.with_suffix(".part"))
        checkpoint.with_suffix(".part").replace(checkpoint)  # a crash leaves the old or the new one


def main() -> None:
    """Write the shards, unless a run has begun, and train."""
    parser = argparse.ArgumentParser(description="Train a vision-language model with pipeline parallelism")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the shards and the checkpoint")
    parser.add_argument("--stages", type=int, default=2, help="the number of stages of a pipeline")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the workers need the other cores
    dist.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = (dist.get_world_size() // options.stages, options.stages)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipelines", "stages"))
    if dist.get_rank() == 0 and not (options.folder / "checkpoint.pt").exists():
        options.folder.mkdir(exist_ok=True)
        write_shards(options.folder)
    dist.barrier()
    train(options.folder, mesh, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
