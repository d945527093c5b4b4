"""Does training wait for data, on a CPU, on a GPU, and on several ranks?

    python benchmarks/bench_train.py --only training --workers 2
    python benchmarks/bench_train.py --only gpu --rounds 2 --results benchmarks/results
    python benchmarks/bench_train.py --only ranks --plots docs/images

**training**: A ResNet-18 is trained on batches of 64 x 3 x 224 x 224 bytes from shards of photographs (the pipelines of
bench_peers.py). Each step converts a batch to floats, and runs forward, backward and SGD. The limit is the same
step on one batch that is already there.

"idle" is the share of the time in which the loop waits for a batch. Training and workers compete for the same cores, so
it says little about a GPU: the next question is about that. ``--width 64`` is ResNet-18; smaller ones train in less
time.

**gpu**: A ResNet-50 and a ViT-S/16 are trained in bfloat16, compiled by ``torch.compile``, on batches of 256 random
resized crops of 224 x 224 pixels, from shards of JPEG files as large as ImageNet's: about 500 x 375 pixels, and 110 KB.
Loaders decode on the CPU to page-locked bytes, which the loop copies to the GPU without blocking, or decode on the GPU.
The GPU normalizes the pixels. The limit is the same step on one batch that is already on the GPU.

"busy" is the share of the time in which the GPU computes steps, by CUDA events around each. Decoding on the GPU counts
as time between steps. "cores" is the number of cores that all processes take. The time to pin a batch and to copy it is
measured apart.

Equal work is checked at the first measurement of each loader: the pixels of some samples are compared with Pillow's,
unless it draws its own boxes. Loaders that fail, or are not installed, are left out, and the output says so. With
``--results``, the results are written after each measurement. With ``--quick``, it runs on a CPU as well.

**ranks**: ``torchrun`` starts ``docs/examples/train.py`` on 1, 2 and 4 ranks, with gloo, on the handwritten
digits of scikit-learn. A fourth run is killed on 2 ranks and resumes on 4. All must have the same global batches. The
table shows how much their losses differ, and the longest time that a rank waited for a batch after the first of its
epoch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from harness.contest import in_turn
from harness.crops import BATCH, PASSES, SIZE, Batch
from harness.datasets import PHOTOGRAPHS
from harness.questions import Question, answer, options
from loaders.table import LOADERS, OURS, REFERENCE
from measures.gpu_training import gpu
from measures.ranks import ranks
from measures.training import Trainer, Training, opened, resnet18

LIMIT = "data on the device"
#: The loaders that train on a CPU, and the duration of a measurement.
ON_CPU = (OURS, "ours, DataLoader", REFERENCE)
SECONDS = 20


def batches_of(name: str, urls: list[str], workers: int) -> Iterable[Batch]:
    build = LOADERS[name].batches
    assert build is not None
    return build(urls, workers)


def measure(trainer: Trainer, build: Callable[[], Iterable[Batch]] | None, duration_s: float) -> Training:
    """Train on the batches of a loader, or on one that is already on the device."""
    if build is None:
        images = torch.randint(0, 256, (BATCH, 3, SIZE, SIZE), dtype=torch.uint8)
        batch = images, torch.arange(BATCH)
        return trainer.train(iter(lambda: batch, None), duration_s=duration_s)
    with opened(build()) as batches:
        return trainer.train(batches, duration_s=duration_s)


def training(arguments: Namespace) -> dict[str, Any]:
    """Train on the CPU with each loader, and without any."""
    workers, width = (arguments.workers or [2])[-1], 2 if arguments.quick else arguments.width
    seconds = (0 if arguments.quick else SECONDS) if arguments.seconds is None else arguments.seconds
    torch.manual_seed(0)
    trainer = Trainer(torch.device("cpu"), resnet18(width))
    urls = PHOTOGRAPHS["IMG"].write(arguments.data, arguments.scale, multiple=16) * PASSES
    builds = {name: partial(batches_of, name, urls, workers) for name in ON_CPU}
    measures = {name: partial(measure, trainer, builds.get(name), seconds) for name in (LIMIT, *builds)}
    found, _ = in_turn("training", measures, arguments.rounds)
    title = f"ResNet-18 (width {width}) on the CPU, {workers} workers"
    return {"training": title, "limit": LIMIT, "runs": {n: [r._asdict() for r in runs] for n, runs in found.items()}}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", nargs="+", type=int, help="numbers of workers (2; on a GPU, those of each loader)")
    parser.add_argument("--width", type=int, default=64, help="channels of the models (%(default)s: the usual ones)")
    parser.add_argument("--seconds", type=float, help="the duration of a measurement (20; on a GPU 12)")
    parser.add_argument("--device", default="cuda", help="of gpu: cuda, cuda:1 or cpu (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="of gpu: the number of samples in a batch (%(default)s)")
    parser.add_argument("--loaders", default="", help="of gpu: only those with this text in the name")
    answer(parser, Question("training", training, 3), Question("gpu", gpu), Question("ranks", ranks))


if __name__ == "__main__":
    main()
