"""The pictures of the demo: the curves of a training run, and a sheet of samples with predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from wds_datapipes.cli._demo_training import Epoch

__all__ = ["draw_curves", "draw_sheet"]

INK, FAINT, BLUE, ORANGE, RED = "#1f2933", "#7b8794", "#1f6fb2", "#d9730d", "#c8102e"
DOTS_PER_INCH = 150
#: How many samples a row of the sheet has, and how many rows there are of held-out and of training samples.
COLUMNS, HELD_OUT_ROWS, TRAINING_ROWS = 12, 4, 2


def draw_curves(path: Path, epochs: Sequence[Epoch]) -> None:
    """Draw loss and accuracy over the epochs."""
    figure = Figure(figsize=(9.5, 3.9), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    numbers = range(1, len(epochs) + 1)
    line: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4}  # a run of one epoch is a point
    losses.plot(numbers, [epoch.loss for epoch in epochs], color=BLUE, **line)
    losses.set_ylim(bottom=0)
    for name, color, parts in (
        ("training", BLUE, [epoch.training_accuracy for epoch in epochs]),
        ("held out", ORANGE, [epoch.held_out_accuracy for epoch in epochs]),
    ):
        label = f"{name}, {parts[-1]:.1%} at the end"
        accuracies.plot(numbers, [100 * part for part in parts], color=color, label=label, **line)
    accuracies.legend(loc="lower right", frameon=False, labelcolor="linecolor")
    for axes, title in ((losses, "Training loss"), (accuracies, "Accuracy in %")):
        axes.set_title(title, loc="left", color=INK, fontweight="bold")
        axes.set_xlabel("epoch", color=FAINT)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="#e4e7eb")
        axes.tick_params(colors=FAINT, length=0)
        axes.spines[["top", "left", "right"]].set_visible(False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw_sheet(
    path: Path,
    predictions: Iterable[tuple[Tensor, int, int]],
    training_samples: Iterable[tuple[Tensor, int]],
    labels: Sequence[int],
) -> None:
    """Draw held-out samples, the mistakes of the network first and in red, and training samples below them.

    Args:
        path: where to.
        predictions: images, (C, H, W) from 0 to 1, with their classes and the predicted ones.
        training_samples: the same, without predictions.
        labels: the label of each class.
    """
    found = list(predictions)
    wrong, right = ([each for each in found if (each[1] != each[2]) is is_wrong] for is_wrong in (True, False))
    room = HELD_OUT_ROWS * COLUMNS
    held_out = (wrong[: room // 2] + right)[:room]
    training = [(image, label, label) for image, label in islice(training_samples, TRAINING_ROWS * COLUMNS)]
    mistakes = " In red, the label and the prediction instead." if wrong else ""
    sections = (
        (HELD_OUT_ROWS, f"Held-out samples: {len(right):,} of {len(found):,} are recognized.{mistakes}", held_out),
        (TRAINING_ROWS, "Training samples, turned and shifted at random in each epoch", training),
    )
    figure = Figure(figsize=(10.7, 8.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[HELD_OUT_ROWS, TRAINING_ROWS])
    for part, (rows, title, samples) in zip(parts, sections, strict=True):
        part.suptitle(title, x=0.01, ha="left", color=INK, fontweight="bold")
        cells = list(part.subplots(rows, COLUMNS).flat)
        for axes in cells:
            axes.axis("off")
        for axes, (image, label, guess) in zip(cells, samples, strict=False):
            pixels = image.permute(1, 2, 0).squeeze(2) if len(image) == 1 else image.permute(1, 2, 0)
            axes.imshow(pixels.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="bicubic")
            caption = f"{labels[label]}" if label == guess else f"{labels[label]} \N{RIGHTWARDS ARROW} {labels[guess]}"
            axes.set_title(caption, y=-0.3, color=INK if label == guess else RED, fontsize=10)
    figure.savefig(path, dpi=DOTS_PER_INCH)
