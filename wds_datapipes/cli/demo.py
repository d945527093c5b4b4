"""The command ``demo``: write shards of handwritten digits and a script that trains on them, and run it."""

from __future__ import annotations

import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Annotated

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.extras import require
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["demo", "write_digits"]

TRAIN_SHARDS, TEST_SHARDS = 12, 3
#: The script. It imports wds_datapipes before torchdata, which would otherwise print a banner.
SCRIPT = '''\
"""Train a small network on the handwritten digits in the shards of this folder."""

from pathlib import Path

import torch
from torch import nn
from wds_datapipes import ShardList, ShardReadingService
from torchdata.dataloader2 import DataLoader2

EPOCHS = 10
folder = Path(__file__).parent


def read_batches(shards):
    samples = shards.load_wds_shards().group_samples().shuffle_samples(1000)
    return samples.wds_decode("torchl").to_tuple("png", "cls").batch(64).collate()


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
shards = ShardList(f"{folder}/train-{{000..011}}.tar").shuffle().sharding_filter()
held_out = list(read_batches(ShardList(f"{folder}/test-{{000..002}}.tar")))

with DataLoader2(read_batches(shards), reading_service=ShardReadingService(num_workers=2)) as loader:
    loader.seed(0)
    for epoch in range(1, EPOCHS + 1):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in held_out)
        accuracy = right / sum(len(labels) for _, labels in held_out)
        print(f"Epoch {epoch:2}/{EPOCHS}   loss {loss:.3f}   held-out accuracy {accuracy:.1%}", flush=True)
    print(loader.reading_service.report())
'''


def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the shards and the script.")] = Path(
        "wds-datapipes-demo"
    ),
) -> None:
    """Train a small network from tar shards, within half a minute.

    Writes the handwritten digits of scikit-learn (1,797 scans, nothing is downloaded) as shards, and a script that
    trains on them through DataLoader2 with two worker processes. Then runs the script, which you can modify.
    """
    require("torchdata.dataloader2", extra="demo", purpose="train with DataLoader2")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(
            f"The folder {output} cannot be created: {error.strerror}. Name another with --output"
        ) from error
    first, *_ = write_digits(output)
    script = output / "train.py"
    script.write_text(SCRIPT)
    with tarfile.open(first) as archive:
        members = "".join(f"  {name}\n" for name in archive.getnames()[:4])
    sys.stdout.write(
        f"Wrote {TRAIN_SHARDS} + {TEST_SHARDS} shards of handwritten digits to {output}\n"
        f"A shard is a plain tar file. tar tf {first}:\n{members}  ...\n\nThe script {script}:\n\n{SCRIPT}\n"
    )
    sys.stdout.flush()
    ended = subprocess.run([sys.executable, str(script)], check=False).returncode  # noqa: S603  our own script
    if ended:
        raise typer.Exit(ended if ended > 0 else 1)


def write_digits(folder: Path) -> list[str]:
    """Write 1,797 scans of handwritten digits to shards: four fifths for training, one fifth held out.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    digits = require("sklearn.datasets", extra="demo", purpose="write the digits").load_digits()
    order = list(range(len(digits.target)))
    random.Random(0).shuffle(order)
    split = len(order) * 4 // 5
    written: list[str] = []
    for name, numbers, count in (("train", order[:split], TRAIN_SHARDS), ("test", order[split:], TEST_SHARDS)):
        for shard in range(count):
            written.append(str(folder / f"{name}-{shard:03d}.tar"))
            with TarWriter(written[-1]) as writer:
                for number in numbers[shard::count]:
                    sample = {"__key__": f"{number:04d}", "png": digits.images[number] / 16}
                    writer.write({**sample, "cls": digits.target[number]})
    return written
