"""The plot of a benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from wds_datapipes.benchmark.measure import ShardBenchmark
from wds_datapipes.extras import require

__all__ = ["plot_results", "require_matplotlib"]


def require_matplotlib() -> ModuleType:
    """Import matplotlib, or raise an error that says how to install it."""
    return require("matplotlib", extra="plot", purpose="plot results")


def plot_results(path: Path, found: ShardBenchmark) -> None:
    """Plot the time of each stage, and the rate of each number of workers."""
    matplotlib = require_matplotlib()
    matplotlib.use("Agg")  # needs no display
    plt = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names = list(found.stages)[::-1]
    bars = left.barh(names, [1e3 * found.stages[name] for name in names], color="tab:blue")
    left.bar_label(bars, fmt="{:.3g}", padding=3)
    left.set_xlabel("ms per sample in one process")
    left.margins(x=0.15)
    workers = [str(each.workers) for each in found.deliveries]
    bars = right.bar(workers, [each.samples_per_s for each in found.deliveries], color="tab:blue")
    right.bar_label(bars, fmt="{:,.0f}", padding=2)
    right.set_xlabel("workers")
    right.set_ylabel("samples/s")
    right.margins(y=0.12)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
