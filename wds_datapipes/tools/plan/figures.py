"""The figures of plans, as a row of a table and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wds_datapipes.extras import require
from wds_datapipes.parallel.progress import human_bytes
from wds_datapipes.tools.plan.training_run import RunPlan

#: The figures of the table and of the plot, with their titles.
FIGURES = {
    "opens_per_sample": "opens per sample",
    "shards_per_host": "shards per host",
    "shards_per_batch": "shards per batch",
    "bytes_per_epoch": "bytes of the last epoch",
    "hit_rates": "hits",
}


def row_of(name: str, found: RunPlan) -> tuple[str, ...]:
    """Return a row of the table of plans."""
    return (
        name,
        f"{found.opens_per_sample:.4g}",
        f"{found.shards_per_host[1]:,}",
        f"{found.shards_per_batch:,}",
        human_bytes(found.bytes_per_epoch[-1]),
        f"{found.hit_rates[-1]:.1%}" if found.hit_rates else "-",
    )


def draw(path: str, names: Sequence[str], plans: Sequence[RunPlan]) -> None:
    """Draw the figures of some plans, one below the other."""
    pyplot: Any = require("matplotlib.pyplot", extra="plot", purpose="draw plans")
    pyplot.switch_backend("agg")
    shown = {name: title for name, title in FIGURES.items() if name != "hit_rates" or plans[0].hit_rates}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(2.2 * len(shown) + 2, 0.4 * len(names) + 1.2), sharey=True)
    texts = list(zip(*(row_of("", each)[1:] for each in plans), strict=True))
    for axis, (name, title), labels in zip(axes, shown.items(), texts, strict=False):
        values = [getattr(each, name) for each in plans]
        bars = axis.barh(names, [value[-1] if isinstance(value, tuple) else value for value in values])
        axis.bar_label(bars, labels, padding=2)
        axis.set_title(title, fontsize="medium", loc="left")
        axis.margins(x=0.3)
        axis.tick_params(bottom=False, labelbottom=False, left=False)
        axis.spines[:].set_visible(False)
    axes[0].invert_yaxis()
    try:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    finally:
        pyplot.close(figure)
