"""The command ``demo``: from images in tar shards to a trained network, on scikit-learn's digits or on your shards."""

from __future__ import annotations

import json
import operator
import random
import reprlib
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._meter import ProgressMeter, plural
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS
from wds_datapipes.extras import require
from wds_datapipes.samples.keys import first_dot
from wds_datapipes.writing.tar_writer import TarWriter

__all__ = ["Dataset", "demo", "write_digits"]

#: The heading of the options for shards of the user's own.
OWN = {"rich_help_panel": "Your own images"}
TRAIN_SHARDS, TEST_SHARDS = 12, 3
#: Every fifth sample of a single shard is held out.
HELD_OUT_EVERY = 5
#: The code to copy. wds_datapipes is imported before torchdata, which would print a banner otherwise.
CODE = """\
from wds_datapipes import ShardList, ShardReadingService
from torchdata.dataloader2 import DataLoader2

shards = ShardList({shards}).shuffle()
samples = shards.sharding_filter().load_wds_shards().group_samples()
decoded = samples.shuffle_samples(1000).wds_decode("torchrgb", only={only})
batches = decoded.to_tuple({image}, {label}).batch(64)
with DataLoader2(batches, reading_service=ShardReadingService(2)) as loader:
    for batch in loader:
        images, labels = zip(*batch)
        print(len(batch), images[0].shape, labels[0])
"""


@dataclass(frozen=True)
class Dataset:
    """Images with integer labels, in shards.

    Attributes:
        training: the shards to train on.
        held_out: the shards to measure the accuracy on.
        held_out_keys: the keys of the samples that are held out, if both are the same single shard.
        counts: how many samples there are to train on, and how many are held out.
        image_field: the field of the image; ``"jpg;png"`` is the first of them that a sample has.
        label_field: the field of the label.
        labels: all labels, sorted. The network numbers the classes in this order.
    """

    training: list[str]
    held_out: list[str]
    held_out_keys: frozenset[str]
    counts: tuple[int, int]
    image_field: str
    label_field: str
    labels: list[int]


def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder for what is written.")] = Path(
        "wds-datapipes-demo"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="How often to go through the training samples.")] = 10,
    workers: Annotated[int, typer.Option(min=0, help="How many processes read, decode and augment.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same run.")] = 0,
    shards: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Train on your shards, as in 'data/train-{000..099}.tar'.", **OWN),
    ] = None,
    test_shards: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="The shards to hold out. Without it, that is the last of your shards, or a fifth of a single one.",
            **OWN,
        ),
    ] = None,
    image_field: Annotated[
        str, typer.Option(metavar="FIELD", help="The field with the image; ';' separates alternatives.", **OWN)
    ] = "jpg;png",
    label_field: Annotated[
        str, typer.Option(metavar="FIELD", help="The field with the label, an integer.", **OWN)
    ] = "cls",
) -> None:
    """Train a small network from tar shards, in half a minute.

    Writes the handwritten digits that scikit-learn brings along (1,797 scans, nothing is downloaded) as shards, trains
    from them through DataLoader2 with worker processes, and ends with what these have done, a sheet of samples, the
    learning curves and the code to copy.
    """
    require("matplotlib", extra="demo", purpose="draw the pictures")
    require("torchdata.dataloader2", extra="demo", purpose="train with DataLoader2")
    if test_shards and not shards:
        raise WrongUse("--test-shards are held out from training on --shards. Name these too")
    started = perf_counter()
    if shards:
        data = survey(shards, test_shards or (), image_field.lower(), label_field.lower())
        make_folder(output)
    else:
        make_folder(output)
        data = write_and_survey(output, seed)
    say(
        f"{data.counts[0]:,} samples in {plural(len(data.training), 'shard')} to train on, "
        f"{data.counts[1]:,} in {plural(len(data.held_out), 'shard')} held out, {len(data.labels)} classes\n"
    )
    accuracy = train_and_draw(data, output, epochs=epochs, workers=workers, seed=seed, is_gray=not shards)
    say(f"\nHeld-out accuracy: {accuracy:.1%}, after {perf_counter() - started:.0f} s in all")
    say(f"Pictures: {output / 'samples.png'}, {output / 'curves.png'}")
    say(f"Shards: {', '.join(shards) if shards else output / '*.tar'}")
    patterns = shards or [f"{output}/train-{{000..{TRAIN_SHARDS - 1:03d}}}.tar"]
    literals = {
        "shards": patterns[0] if len(patterns) == 1 else patterns,
        "only": f"{data.image_field.replace(';', ' ')} {data.label_field}",
        "image": data.image_field,
        "label": data.label_field,
    }
    code = CODE.format(**{name: json.dumps(value) for name, value in literals.items()})
    sys.stdout.write(f"\nThe code to copy:\n\n{code}")


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")


def train_and_draw(data: Dataset, output: Path, *, epochs: int, workers: int, seed: int, is_gray: bool) -> float:
    """Train, print a line for each epoch, draw the pictures, and return the accuracy on what is held out."""
    # Only now, since torch takes its time.
    from wds_datapipes.cli._demo_pictures import draw_curves, draw_sheet
    from wds_datapipes.cli._demo_training import Training

    history = []
    with Training(data, size=8 if is_gray else 32, is_gray=is_gray, epochs=epochs, workers=workers, seed=seed) as run:
        for number in range(1, epochs + 1):
            label = f"Epoch {number:{len(str(epochs))}}/{epochs}"
            with ProgressMeter(label, data.counts[0], unit="samples") as meter:
                epoch = run.run_epoch(meter)
            history.append(epoch)
            say(
                f"{label}   loss {epoch.loss:.3f}   accuracy {epoch.training_accuracy:6.1%}, held out "
                f"{epoch.held_out_accuracy:6.1%}   {epoch.samples_per_s:,.0f} samples/s"
            )
        report = run.report()
    say("\nLoading, " + str(report).replace("; ", "\n  "))
    draw_curves(output / "curves.png", history)
    draw_sheet(output / "samples.png", run.predictions(), run.training_samples(), data.labels)
    return history[-1].held_out_accuracy


def make_folder(path: Path) -> None:
    """Make the folder that is written to, if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(f"The folder {path} cannot be made: {error.strerror}. Name another with --output") from error


# Digits ------------------------------------------------------------------------------------------------------------


def write_and_survey(folder: Path, seed: int) -> Dataset:
    """Write the digits, and show what a shard is."""
    training, held_out = write_digits(folder, seed=seed)
    say(f"Wrote {TRAIN_SHARDS} + {TEST_SHARDS} shards of handwritten digits to {folder}")
    say(f"A shard is a plain tar file. tar tf {training[0]}:")
    with tarfile.open(training[0]) as archive:
        for name in archive.getnames()[:4]:
            say(f"  {name}")
    say("  ...\n")
    return survey(training, held_out, "png", "cls")


def write_digits(folder: Path, *, seed: int) -> tuple[list[str], list[str]]:
    """Write 1,797 scans of handwritten digits to shards; return those to train on, and a fifth that is held out.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    digits = require("sklearn.datasets", extra="demo", purpose="write the digits").load_digits()
    order = list(range(len(digits.target)))
    random.Random(seed).shuffle(order)
    split = len(order) * 4 // 5
    written: list[list[str]] = []
    for name, numbers, count in (("train", order[:split], TRAIN_SHARDS), ("test", order[split:], TEST_SHARDS)):
        written.append([str(folder / f"{name}-{shard:03d}.tar") for shard in range(count)])
        for shard, path in enumerate(written[-1]):
            with TarWriter(path) as writer:
                for number in numbers[shard::count]:
                    sample = {"__key__": f"{number:04d}", "png": digits.images[number] / 16}
                    writer.write({**sample, "cls": digits.target[number]})
    return written[0], written[1]


# Shards of the user ------------------------------------------------------------------------------------------------


def survey(shards: Sequence[str], held_out_shards: Sequence[str], image_field: str, label_field: str) -> Dataset:
    """Read the labels of all samples, and nothing else of them, and settle what is held out.

    That is ``held_out_shards`` if there are any; else the last shard; and of a single shard every fifth sample.

    Raises:
        PatternError: a pattern matches nothing.
        WrongUse: the samples are no images with labels of two or more classes, or there are too few of them.
    """
    from wds_datapipes import ShardList

    for field in image_field.split(";"):
        if field.rpartition(".")[2] not in IMAGE_EXTENSIONS:
            raise WrongUse(
                f"{field!r} is not the field of an image: its extension is not one of an image file, such as jpg, png "
                f"or webp. Name another with --image-field"
            )
    training, held_out = list(ShardList(shards)), list(ShardList(held_out_shards)) if held_out_shards else []
    if not held_out and len(training) > 1:
        held_out = [training.pop()]
    seen = read_labels(training, image_field, label_field)
    checked = (
        read_labels(held_out, image_field, label_field) if held_out else seen[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    )
    if not checked:
        raise WrongUse(
            f"{training[0]} has {len(seen)} samples, and one of {HELD_OUT_EVERY} would be held out. "
            f"Name more shards, or others to hold out"
        )
    labels = sorted({label for _, label in seen + checked})
    if len(labels) < 2:
        raise WrongUse(f"All samples of {training} have the label {labels[0]}: training needs two classes or more")
    keys = frozenset[str]() if held_out else frozenset(key for key, _ in checked)
    counts = len(seen) - len(keys), len(checked)
    return Dataset(training, held_out or training, keys, counts, image_field, label_field, labels)


def read_labels(shards: list[str], image_field: str, label_field: str) -> list[tuple[str, int]]:
    """Return the key and the label of every sample; no image is read, only its name."""
    from wds_datapipes import ShardList

    found: set[str] = set()

    def select(name: str) -> bool:
        key_and_field = first_dot(name)
        field = key_and_field[1].lower() if key_and_field else ""
        found.add(field)
        return field == label_field

    samples = ShardList(shards).load_wds_shards(select_files=select).group_samples().wds_decode(only=[label_field])
    labels = [(sample["__key__"], label_of(sample, label_field)) for sample in samples]
    for option, fields in ("--image-field", image_field.split(";")), ("--label-field", [label_field]):
        if found.isdisjoint(fields):
            raise WrongUse(
                f"No sample of {', '.join(shards[:3])}{', ...' if len(shards) > 3 else ''} has the field "
                f"{' or '.join(map(repr, fields))}. The fields found are: {', '.join(sorted(found - {''})[:20])}. "
                f"Name another with {option}"
            )
    return labels


def label_of(sample: dict[str, Any], field: str) -> int:
    """Return the label of a sample."""
    value = sample[field]
    try:
        return int(value) if isinstance(value, str | bytes) else operator.index(value)
    except (TypeError, ValueError):
        raise WrongUse(
            f"Labels are integers, and the field {field!r} of the sample {sample['__key__']!r} of {sample['__url__']} "
            f"holds {reprlib.repr(value)}. Name another field with --label-field"
        ) from None
