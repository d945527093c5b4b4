"""The command ``demo``: write shards of photographs and a script that trains on them, and run it."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Annotated

from wds_datapipes.extras import DATALOADER2, require
from wds_datapipes.tools.cli.errors import WrongUse
from wds_datapipes.tools.cli.options.values import metavar, wrong_use
from wds_datapipes.types import Sample
from wds_datapipes.writing.tar_writer import TarWriter

TRAIN_SHARDS, TEST_SHARDS = 12, 3
#: The width and height of a patch, and the distance between neighbouring ones, in pixels.
SIZE, STEP = 64, 12
#: The script. It imports wds_datapipes before torchdata, which would otherwise print a banner.
SCRIPT = Path(__file__).with_name("demo_script.txt").read_text(encoding="utf-8")


def demo(*, output_dir: Annotated[Path, metavar("DIR")] = Path("wds-datapipes-demo")) -> None:
    """Train a small network from tar shards within half a minute.

    Writes 2,728 patches of the two photographs in scikit-learn (nothing is downloaded) to shards, and a script that
    trains on random crops of them with DataLoader2 and two worker processes. Then runs the script, which you can
    modify.

    Args:
        output_dir: The folder for the shards and the script.
    """
    require("torchdata.dataloader2", release=DATALOADER2, purpose="train with DataLoader2")
    with wrong_use("--output-dir: ", OSError):
        output_dir.mkdir(parents=True, exist_ok=True)
    script = output_dir / "train.py"
    if script.exists() and script.read_text(encoding="utf-8") != SCRIPT:
        raise WrongUse(
            f"{script} is not the script of this demo, which would replace it. Run it with python, move it, or choose "
            f"another folder with --output-dir"
        )
    first, *_ = write_photographs(output_dir)
    script.write_text(SCRIPT)
    sys.stdout.write(
        f"Wrote {TRAIN_SHARDS} + {TEST_SHARDS} shards of photographs to {output_dir}\n"
        f"A shard is a plain tar file: tar tf '{first}'\n\nThe script {script}:\n\n{SCRIPT}\n"
    )
    sys.stdout.flush()
    run_script(script)


def run_script(script: Path) -> None:
    """Run the script and print its output, so that it ends when nothing reads that any more."""
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:  # noqa: S603  our own script
        try:
            for line in running.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
        except BaseException:
            running.kill()
            raise
    if running.returncode:
        raise SystemExit(max(running.returncode, 1))


def write_photographs(folder: Path) -> list[str]:
    """Write overlapping patches of two photographs to shards; the right fifth of each photograph is held out.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    photographs = require("sklearn.datasets", extra="demo", purpose="read the photographs").load_sample_images().images
    train: list[Sample] = []
    held_out: list[Sample] = []
    for label, photograph in enumerate(photographs):
        height, width, _ = photograph.shape
        border = width * 4 // 5
        for top, left in product(range(0, height - SIZE + 1, STEP), range(0, width - SIZE + 1, STEP)):
            patch = photograph[top : top + SIZE, left : left + SIZE]
            sample = {"__key__": f"{label}-{top:03d}-{left:03d}", "jpg": patch, "cls": label}
            if left + SIZE <= border:
                train.append(sample)
            elif left >= border:
                held_out.append(sample)
    random.Random(0).shuffle(train)
    written: list[str] = []
    for name, samples, count in (("train", train, TRAIN_SHARDS), ("test", held_out, TEST_SHARDS)):
        for shard in range(count):
            written.append(str(folder / f"{name}-{shard:03d}.tar"))
            with TarWriter(written[-1]) as writer:
                for sample in samples[shard::count]:
                    writer.write(sample)
    return written
