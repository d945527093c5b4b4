"""The command ``demo``: from images in tar shards to a trained network, on scikit-learn's digits or on your shards."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from wds_datapipes.cli._app import WrongUse
from wds_datapipes.cli._screen import new_console, with_progress
from wds_datapipes.cli.demo_digits import TEST_SHARDS, TRAIN_SHARDS, write_digits
from wds_datapipes.cli.demo_pictures import COLUMNS, Section, Shown, draw_curves, draw_sheet
from wds_datapipes.cli.demo_recipe import digits_recipe, images_recipe
from wds_datapipes.cli.demo_survey import Dataset, survey
from wds_datapipes.codecs.images import IMAGE_EXTENSIONS
from wds_datapipes.extras import require

if TYPE_CHECKING:
    from torch import Tensor

    from wds_datapipes import LoadingReport
    from wds_datapipes.cli.demo_training import Epoch, ImageFormat, Network

__all__ = ["demo"]

#: The heading of the options for shards of the user's own.
OWN = {"rich_help_panel": "Your own images"}

#: How many rows of held-out and of training samples the sheet shows.
HELD_OUT_ROWS, TRAINING_ROWS = 4, 2


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
    console, started = new_console(), perf_counter()
    if shards:
        image_field, label_field = image_field.lower(), label_field.lower()
        check_image_field(image_field)
        data = survey(shards, test_shards or (), image_field=image_field, label_field=label_field)
        make_folder(output)
        side, channels = 32, 3
        code = images_recipe(shards, image_field=image_field, label_field=label_field, size=side)
    else:
        make_folder(output)
        data = digits_dataset(console, output, seed)
        side, channels = 8, 1
        code = digits_recipe(f"{output}/train-{{000..{TRAIN_SHARDS - 1:03d}}}.tar")

    # Only now, since torch takes its time.
    from wds_datapipes.cli.demo_training import ImageFormat

    images = ImageFormat(side, channels)
    describe_dataset(console, data)
    network, history, loading = run(console, data, images, epochs=epochs, workers=workers, seed=seed)
    console.print("\nLoading, " + str(loading).replace("; ", "\n  "))
    draw_curves(output / "curves.png", history)
    draw_sheet(output / "samples.png", [held_out_section(network, data, images), training_section(data, images)])
    console.print(
        f"\nHeld-out accuracy: {history[-1].held_out_accuracy:.1%}, after {perf_counter() - started:.0f} s in all"
    )
    console.print(f"Pictures: {output / 'samples.png'}, {output / 'curves.png'}")
    console.print(f"Shards: {', '.join(shards) if shards else output / '*.tar'}")
    console.print(f"\nThe code to copy:\n\n{code}", end="")


def make_folder(path: Path) -> None:
    """Make the folder that is written to, if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(f"The folder {path} cannot be made: {error.strerror}. Name another with --output") from error


def check_image_field(image_field: str) -> None:
    """Refuse fields whose extension is not that of an image."""
    for field in image_field.split(";"):
        if field.rpartition(".")[2] not in IMAGE_EXTENSIONS:
            raise WrongUse(
                f"{field!r} is not the field of an image: its extension is not one of an image file, such as jpg, png "
                f"or webp. Name another with --image-field"
            )


def digits_dataset(console: Console, folder: Path, seed: int) -> Dataset:
    """Write the digits and show what a shard is."""
    training, held_out = write_digits(folder, seed=seed)
    console.print(f"Wrote {TRAIN_SHARDS} + {TEST_SHARDS} shards of handwritten digits to {folder}")
    console.print(f"A shard is a plain tar file. tar tf {training[0]}:")
    with tarfile.open(training[0]) as archive:
        for name in archive.getnames()[:4]:
            console.print(f"  {name}")
    console.print("  ...\n")
    return survey(list(map(str, training)), list(map(str, held_out)), image_field="png", label_field="cls")


def describe_dataset(console: Console, data: Dataset) -> None:
    """Say how much there is to train on."""
    training, held_out = data.training, data.held_out
    console.print(
        f"{training.count:,} samples in {plural(len(training.shards), 'shard')} to train on, "
        f"{held_out.count:,} in {plural(len(held_out.shards), 'shard')} held out, {len(data.labels)} classes\n"
    )


def plural(count: int, noun: str) -> str:
    """Return a count and its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def run(
    console: Console, data: Dataset, images: ImageFormat, *, epochs: int, workers: int, seed: int
) -> tuple[Network, list[Epoch], LoadingReport]:
    """Train, with a bar for each epoch and a line after it."""
    import torch

    from wds_datapipes.cli.demo_training import Batch, train

    # Threads that have no core of their own beside the workers wait for each other, and that costs more than they give.
    torch.set_num_threads(max(1, torch.get_num_threads() - workers))
    history: list[Epoch] = []

    def watch(batches: Iterable[Batch], number: int) -> Iterable[Batch]:
        label = f"Epoch {number:{len(str(epochs))}}/{epochs}"
        return with_progress(console, batches, label, total=data.training.count, count=lambda batch: len(batch[1]))

    def report(epoch: Epoch) -> None:
        history.append(epoch)
        console.print(
            f"Epoch {epoch.number:{len(str(epochs))}}/{epochs}   loss {epoch.loss:.3f}   "
            f"accuracy {epoch.training_accuracy:6.1%}, held out {epoch.held_out_accuracy:6.1%}   "
            f"{epoch.samples_per_s:,.0f} samples/s"
        )

    network, loading = train(data, images, epochs=epochs, workers=workers, seed=seed, watch=watch, report=report)
    return network, history, loading


def held_out_section(network: Network, data: Dataset, images: ImageFormat) -> Section:
    """Choose held-out samples to show: first some that the network takes for something else, then others."""
    from wds_datapipes.cli.demo_training import predict

    wrong: list[Shown] = []
    right: list[Shown] = []
    mistakes = 0
    room = HELD_OUT_ROWS * COLUMNS
    for pictures, classes, found in predict(network, data, images):
        for picture, label, guess in zip(pictures, classes.tolist(), found.tolist(), strict=True):
            chosen = right if label == guess else wrong
            mistakes += label != guess
            if len(chosen) < room:
                chosen.append(Shown(pixels(picture), data.labels[label], data.labels[guess]))
    told = f"{data.held_out.count - mistakes:,} of {data.held_out.count:,} are recognised."
    if mistakes:
        told += " In red, the label and what the network takes the image for instead."
    return Section("Held-out samples", told, (wrong[: room // 2] + right)[:room])


def training_section(data: Dataset, images: ImageFormat) -> Section:
    """Take training samples as the network sees them."""
    from wds_datapipes.cli.demo_training import training_pipe

    pictures, classes = next(iter(training_pipe(data, images, batch_size=TRAINING_ROWS * COLUMNS)))
    return Section(
        "Training samples",
        "Decoded, then turned and shifted a little and given some noise, anew in each epoch.",
        [Shown(pixels(picture), data.labels[label]) for picture, label in zip(pictures, classes.tolist(), strict=True)],
    )


def pixels(picture: Tensor) -> NDArray[np.float32]:
    """Return what (C, H, W) shows, as (H, W) or (H, W, 3)."""
    array: NDArray[np.float32] = picture.permute(1, 2, 0).numpy()
    return array[..., 0] if array.shape[2] == 1 else array
