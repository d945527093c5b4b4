"""Plots of the benchmarks: bars of ratios to a reference, and lines of what grows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Bar", "Panels", "bar_of", "panels_of", "plot_growth", "plot_ratios", "pyplot"]

#: The largest range of ratios for a linear scale.
LINEAR = 40


class Bar(NamedTuple):
    """A bar of a plot: a ratio to the reference, its range over the rounds, and the ratio in CPU time."""

    ratio: float
    lowest: float
    highest: float
    ratio_cpu: float | None = None


#: The bars of a panel by their names, and the panels of a plot by their titles.
Panels = Mapping[str, Mapping[str, Bar]]


def bar_of(ratios: Iterable[float], ratio_cpu: float | None = None) -> Bar:
    """Return the bar for the ratios within each round."""
    found = list(ratios)
    return Bar(statistics.median(found), min(found), max(found), ratio_cpu)


def panels_of(contests: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Bar]]:
    """Return a panel for the results of each contest: the speed relative to the reference."""
    panels = {}
    for facts in contests:
        found = {contender["name"]: contender for contender in facts["contenders"]}
        reference = found[facts["reference"]]["wall_s"]
        panels[f"{facts['title']}, relative to {facts['reference']}"] = {
            name: bar_of(
                (theirs / ours for ours, theirs in zip(contender["wall_s"], reference, strict=True)),
                contender.get("times_reference_cpu"),
            )
            for name, contender in found.items()
        }
    return panels


def plot_ratios(path: Path, panels: Panels) -> None:
    """Plot bars of ratios in a panel each, with the range over the rounds, and a mark for the ratio in CPU time."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(panels), 1, squeeze=False, layout="constrained",
        figsize=(8, sum(0.27 * len(bars) + 0.9 for bars in panels.values())),
        height_ratios=[len(bars) + 2 for bars in panels.values()],
    )  # fmt: skip
    for axis, (title, bars) in zip(axes[:, 0], panels.items(), strict=True):
        shown = sorted(bars.items(), key=lambda item: item[1].ratio_cpu or item[1].ratio)
        for row, (name, bar) in enumerate(shown):
            axis.barh(row, bar.ratio, color=_color_of(name))
            axis.plot([bar.lowest, bar.highest], [row, row], color="black", linewidth=1)
            if bar.ratio_cpu is not None:
                axis.plot(bar.ratio_cpu, row, marker="D", color="white", markeredgecolor="black", markersize=4)
            end = max(bar.highest, bar.ratio_cpu or 0)
            axis.annotate(f"{bar.ratio:.2f}", (end, row), (6, 0), textcoords="offset points", va="center", fontsize=8)
        if max(bar.ratio for bar in bars.values()) > LINEAR * min(bar.ratio for bar in bars.values()):
            axis.set_xscale("log")
        axis.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=8)
        axis.set_title(title, loc="left", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def plot_growth(path: Path, facts: Mapping[str, Any]) -> None:
    """Plot the memory in the epoch, and the rate and memory by the number of workers."""
    figure, (memory, rates, sizes) = pyplot().subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    memory.plot([point[0] / 1e6 for point in facts["epoch"]], [point[2] / 1e6 for point in facts["epoch"]], marker="o")
    memory.set_xlabel("million samples of an epoch")
    memory.set_ylabel("MB of all processes")
    cores = facts["cores"]
    for name, by_workers in facts["workers"].items():
        workers = [int(number) for number in by_workers]
        rates.plot(workers, [rate for rate, _ in by_workers.values()], marker="o", label=name)
        sizes.plot(workers, [size / 1e6 for _, size in by_workers.values()], marker="o", label=name)
    rates.axvline(cores, color="tab:gray", linestyle=":")
    rates.annotate(f"{cores} cores", (cores, 0), (4, 4), textcoords="offset points", fontsize=8, color="tab:gray")
    rates.set_ylabel("samples/s")
    sizes.set_ylabel("MB per worker")
    rates.legend(frameon=False)
    for axis in (rates, sizes):
        axis.set_xlabel("workers")
        axis.set_xscale("log", base=2)
        axis.set_xticks(workers, [str(number) for number in workers])
    for axis in (memory, rates, sizes):
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])  # room above a line that is flat
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def pyplot() -> Any:
    """Import matplotlib's pyplot, which only plots need."""
    import matplotlib

    matplotlib.use("Agg")  # writes files, and needs no display
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"})  # reproducible, and small
    return plt


def _color_of(name: str) -> str:
    return "tab:blue" if "ours" in name else "tab:orange" if "webdataset" in name else "tab:gray"
