"""What the demo draws: the curves of a training, and a sheet of samples with what the network takes them for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wds_datapipes.cli.demo_training import Epoch

__all__ = ["COLUMNS", "Section", "Shown", "draw_curves", "draw_sheet"]

INK, FAINT, BLUE, ORANGE, RED = "#1f2933", "#7b8794", "#1f6fb2", "#d9730d", "#c8102e"
DOTS_PER_INCH = 150

#: How a curve looks; without markers a run of one epoch would show nothing.
LINE: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4}

#: How many samples stand side by side.
COLUMNS = 12
#: The measures of a sheet, in inches.
MARGIN, IMAGE, HEADING, CAPTION, GAP = 0.5, 0.68, 0.72, 0.36, 0.14


@dataclass(frozen=True)
class Shown:
    """A sample to show: an image, (H, W) or (H, W, 3) from 0 to 1, and what its label is."""

    image: NDArray[np.float32]
    label: int
    #: What the network takes it for, if it was asked.
    predicted: int | None = None

    @property
    def wrong(self) -> bool:
        """Whether the network takes it for something else."""
        return self.predicted not in (None, self.label)


@dataclass(frozen=True)
class Section:
    """A part of a sheet."""

    title: str
    subtitle: str
    samples: Sequence[Shown]

    @property
    def height(self) -> float:
        """Its height in inches."""
        return HEADING + -(-len(self.samples) // COLUMNS) * (IMAGE + CAPTION)


def draw_curves(path: Path, epochs: Sequence[Epoch]) -> None:
    """Draw loss and accuracy over the epochs."""
    figure = new_figure(9.5, 3.9)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.97, top=0.83, bottom=0.15, wspace=0.16)
    numbers = [epoch.number for epoch in epochs]
    left.plot(numbers, [epoch.loss for epoch in epochs], color=BLUE, **LINE)
    left.set_ylim(bottom=0)
    style(left, "Training loss")
    for name, color, parts in (
        ("training", BLUE, [epoch.training_accuracy for epoch in epochs]),
        ("held out", ORANGE, [epoch.held_out_accuracy for epoch in epochs]),
    ):
        label = f"{name}, {parts[-1]:.1%} at the end"
        right.plot(numbers, [100 * part for part in parts], color=color, label=label, **LINE)
    right.legend(loc="lower right", frameon=False, labelcolor="linecolor", fontsize=10)
    style(right, "Accuracy in %")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def style(axes: Axes, title: str) -> None:
    """Give a plot its title and take away what is not needed to read it."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=INK, fontsize=11.5, pad=12, fontweight="bold")
    axes.set_xlabel("epoch", color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.tick_params(colors=FAINT, length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color("#cbd2d9")


def draw_sheet(path: Path, sections: Sequence[Section]) -> None:
    """Draw samples with their labels below them, the wrong ones in red."""
    width = 2 * MARGIN + COLUMNS * (IMAGE + GAP) - GAP
    height = MARGIN + sum(section.height + MARGIN for section in sections) - CAPTION / 2
    figure = new_figure(width, height)
    top = height - MARGIN
    for section in sections:
        figure.text(MARGIN / width, top / height, section.title, color=INK, fontsize=14, fontweight="bold", va="top")
        figure.text(MARGIN / width, (top - 0.3) / height, section.subtitle, color=FAINT, fontsize=10, va="top")
        for number, sample in enumerate(section.samples):
            row, column = divmod(number, COLUMNS)
            left = MARGIN + column * (IMAGE + GAP)
            bottom = top - HEADING - row * (IMAGE + CAPTION) - IMAGE
            draw_sample(figure.add_axes((left / width, bottom / height, IMAGE / width, IMAGE / height)), sample)
        top -= section.height + MARGIN
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw_sample(axes: Axes, sample: Shown) -> None:
    """Draw one sample and its caption."""
    axes.imshow(sample.image, cmap="gray", vmin=0, vmax=1, interpolation="bicubic")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(RED if sample.wrong else "#cbd2d9")
        spine.set_linewidth(2.5 if sample.wrong else 0.6)
    caption = f"{sample.label} \N{RIGHTWARDS ARROW} {sample.predicted}" if sample.wrong else f"{sample.label}"
    axes.set_xlabel(caption, color=RED if sample.wrong else INK, fontsize=10, labelpad=4)


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of so many inches that saves itself as PNG, and that no global state of matplotlib knows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure
