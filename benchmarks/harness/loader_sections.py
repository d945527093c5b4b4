"""Sections of the report about loaders: from shards to batches, from S3, from workers to the loop, and in training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loaders.table import LOADERS, LOCAL, OURS, REFERENCE

from harness.crops import SIZE
from harness.plots import Bar, bar_of
from harness.sections import Section, rounded, table, times

__all__ = [
    "section_of_deliveries",
    "section_of_gpu",
    "section_of_loaders",
    "section_of_parts",
    "section_of_s3",
    "section_of_training",
]

#: A loader that is at least this much faster is mentioned.
AHEAD = 1.05


def section_of_loaders(contests: Any) -> Section:
    """Return a table for each dataset with the most workers, one for all numbers of workers, and those for stores."""
    most = max(facts["workers"] for facts in contests)
    texts = []
    panels: dict[str, Mapping[str, Bar]] = {}
    headings = [
        "loader",
        "times",
        "rounds",
        "times (CPU)",
        "samples/s, webdataset's",
        "CPU ms/sample",
        "s to first",
        "MB",
    ]
    for facts in contests:
        if facts["workers"] < most:
            continue
        loaders = dict(sorted(_from_store(facts, LOCAL).items(), key=lambda item: -item[1]["times"]))
        reference = loaders[REFERENCE]["runs"]
        rows = [[f"{name} {loader['version']}", *_cells(loader, reference)] for name, loader in loaders.items()]
        texts += [f"**{facts['title']}**", table([*headings, "MB/worker", "levels off"], rows)]
        texts.append(_ahead(_relative(loaders, OURS, "times"), "in throughput"))
        texts.append(_ahead(_relative(loaders, OURS, "times_cpu"), "in CPU time"))
        texts += _failures(facts, is_local=True)
        panels[f"{facts['title']}, relative to {REFERENCE}"] = {
            name: _bar(loader["runs"], reference, loader["times_cpu"]) for name, loader in loaders.items()
        }
    if len(contests) > len(panels):
        columns = {facts["title"]: _from_store(facts, LOCAL) for facts in contests}
        names = list(dict.fromkeys(name for loaders in columns.values() for name in loaders))
        rows = [
            [name, *(times(loaders[name]) if name in loaders else "" for loaders in columns.values())] for name in names
        ]
        texts.append("By number of workers, with ratios in processor time in parentheses:")
        texts.append(table(("loader", *columns), rows))
    for facts in contests:
        section = section_of_stores(facts)
        texts += [section.text] if section.text else []
        panels |= section.panels
    return Section("\n\n".join(texts), panels)


def section_of_stores(facts: Any) -> Section:
    """Return a table of the loaders that read from servers; it is empty if none did."""
    stores = list(dict.fromkeys(loader["store"] for loader in facts["loaders"].values()))
    stores.remove(LOCAL)
    if not stores:
        return Section("", {})
    rows = []
    bars = {}
    speeds: dict[str, float] = {}
    cpu_speeds: dict[str, float] = {}
    for store in stores:
        loaders = _from_store(facts, store)
        for name, loader in sorted(loaders.items(), key=lambda item: -item[1]["times"]):
            rows.append([
                name,
                times(loader),
                _rounds(loader["runs"], loaders[f"{REFERENCE}, {store}"]["runs"]),
                f"{loader['of_local']:.0%} ({loader['of_local_cpu']:.0%})",
                _paired(loader["runs"], loaders[f"{REFERENCE}, {store}"]["runs"], facts["bytes_per_sample"] / 1e6),
                f"{loader['share_of_raw_read']:.1%}",
                f"{loader['seconds_to_first']:.2f}",
            ])  # fmt: skip
            local = facts["loaders"][name.removesuffix(f", {store}")]["runs"]
            bars[name] = _bar(loader["runs"], local, loader["of_local_cpu"])
        speeds |= _relative(loaders, f"{OURS}, {store}", "times")
        cpu_speeds |= _relative(loaders, f"{OURS}, {store}", "times_cpu")
    headings = (
        "loader, store",
        "times (CPU)",
        "rounds",
        "of the local rate (CPU)",
        "MB/s, webdataset's",
        "raw read",
        "s to first",
    )
    texts = [f"**{facts['title']}, from servers on the same machine**", table(headings, rows)]
    texts += [_ahead(speeds, "from the same store"), _ahead(cpu_speeds, "from the same store in CPU time")]
    texts += _failures(facts, is_local=False)
    return Section("\n\n".join(texts), {f"{facts['title']}, from servers, relative to the disk": bars})


def _from_store(facts: Any, store: str) -> dict[str, Any]:
    return {name: loader for name, loader in facts["loaders"].items() if loader["store"] == store}


def _failures(facts: Any, *, is_local: bool) -> list[str]:
    """Return a sentence for each loader that failed on local shards, or on those of a server."""
    sentences = [(name, f"Left out: {name}: `{reason}`") for name, reason in facts["left_out"].items()]
    for name, count in facts.get("repeated", {}).items():
        sentences.append((name, f"Measurements that failed and were repeated: {name}, {count}."))
    return [sentence for name, sentence in sentences if (name in LOADERS) == is_local]


def _cells(loader: Mapping[str, Any], reference: Any) -> list[str]:
    off = loader["difference"]
    return [
        f"{loader['times']:.2f}",
        _rounds(loader["runs"], reference),
        f"{loader['times_cpu']:.2f}",
        _paired(loader["runs"], reference),
        f"{1e3 * loader['cpu_s_per_sample']:.2f}",
        f"{loader['seconds_to_first']:.2f}",
        f"{loader['memory'] / 1e6:,.0f}",
        f"{loader['worker_memory'] / 1e6:,.0f}" if loader["worker_memory"] else "threads",
        "own boxes" if off is None else f"{off:.1f}",
    ]


def _paired(runs: Any, reference: Any, factor: float = 1.0) -> str:
    """Return the rates in the round with the median ratio, since medians of rates would have another ratio."""
    rates = ([factor * run["samples_per_s"] for run in some] for some in (runs, reference))
    pairs = sorted(zip(*rates, strict=True), key=lambda pair: pair[0] / pair[1])
    ours, theirs = pairs[(len(pairs) - 1) // 2]
    return f"{ours:,.0f} / {theirs:,.0f}"


def _rounds(runs: Any, reference: Any) -> str:
    """Return the lowest and the highest ratio of all rounds."""
    bar = _bar(runs, reference)
    return f"{bar.lowest:.2f} to {bar.highest:.2f}"


def _relative(loaders: Mapping[str, Mapping[str, Any]], ours: str, figure: str) -> dict[str, float]:
    """Return a figure of each other loader relative to ours."""
    others = {name: loader for name, loader in loaders.items() if not name.startswith(OURS)}
    return {name: loader[figure] / loaders[ours][figure] for name, loader in others.items()}


def _ahead(ratios: Mapping[str, float], words: str) -> str:
    """Return the sentence about the loaders that are ahead of ours."""
    ahead = [f"{name} ({ratio:.2f} times)" for name, ratio in ratios.items() if ratio > AHEAD]
    if not ahead:
        return f"No loader is ahead of ours {words} by more than 5 %."
    return f"Ahead of ours {words}: {', '.join(ahead)}."


def _bar(runs: Any, reference: Any, ratio_cpu: float | None = None) -> Bar:
    pairs = zip(runs, reference, strict=True)
    return bar_of((ours["samples_per_s"] / theirs["samples_per_s"] for ours, theirs in pairs), ratio_cpu)


def section_of_deliveries(facts: Any) -> Section:
    """Return a table of ratios: a row for each loader, and a column for each kind of items."""
    reference = "WebLoader (webdataset)"
    deliveries: dict[str, dict[str, list[list[float]]]] = facts["deliveries"]
    panels: dict[str, dict[str, Bar]] = {}
    for title, loaders in deliveries.items():
        panels[title] = {}
        for name, runs in loaders.items():
            # The first figure of a run is its samples per second.
            pairs = zip(runs, loaders[reference], strict=True)
            panels[title][name] = bar_of(ours[0] / theirs[0] for ours, theirs in pairs)
    names = list(dict.fromkeys(name for loaders in deliveries.values() for name in loaders))
    rows = [[name, *(f"{bars[name].ratio:.2f}" if name in bars else "" for bars in panels.values())] for name in names]
    smallest = {title: loaders for title, loaders in deliveries.items() if title.startswith("SMALL")}
    costs = []
    for name in names:
        found = [loaders[name] for loaders in smallest.values() if name in loaders]
        loops = [f"{1e6 * statistics.median(run[1] for run in runs):.1f}" for runs in found]
        firsts = [f"{1e3 * statistics.median(run[3] for run in runs):.0f}" for runs in found]
        costs.append([name, *loops, *firsts])
    columns = [f"{heading}, {title}" for heading in ("µs in the loop", "ms to the first") for title in smallest]
    idle = {
        "ms until the last sample before a pause": [1e3, facts["idle"]["ms delay"]],
        "cores while the loop waits": [1, facts["idle"]["cores, loop waits"]],
        "cores while workers wait": [1, facts["idle"]["cores, workers wait"]],
    }
    waits = []
    for name in names:
        cells = [
            f"{factor * statistics.median(found[name]):.4f}" if name in found else "" for factor, found in idle.values()
        ]
        spawned = [run[3] for run in facts["spawned"].get(name, ())]
        waits.append([name, *cells, f"{1e3 * statistics.median(spawned):,.0f}" if spawned else ""])
    waiting = table(("loader", *idle, "ms to the first, spawned"), waits)
    small = [table(("loader", *columns), costs)] if columns else []
    texts = [table(("loader", *panels), rows), *small, waiting]
    return Section("\n\n".join(texts), panels)


def section_of_s3(contests: Any) -> Section:
    """Return a table of the loaders that read S3, with the figures for each latency."""
    figures = {
        "MB/s": lambda run: run["bytes"] / run["s"] / 1e6,
        "CPU s/GB": lambda run: 1e9 * run["cpu_s"] / run["bytes"],
        "requests": lambda run: run["requests"],
    }
    if all("connections" in run for facts in contests for runs in facts["runs"].values() for run in runs):
        figures["connections"] = lambda run: run["connections"]
    names = list(dict.fromkeys(name for facts in contests for name in facts["runs"]))
    rows, panels = [], {}
    for name in names:
        found = [facts["runs"].get(name) for facts in contests]
        medians = [
            rounded(statistics.median(map(figure, runs))) if runs else ""
            for figure in figures.values()
            for runs in found
        ]
        rows.append([name, *medians])
    headings = [f"{figure}, {facts['server']}" for figure in figures for facts in contests]
    left_out = {name: reason for facts in contests for name, reason in facts["left_out"].items()}
    for facts in contests:
        reference = facts["runs"][facts["reference"]]
        panels[f"{facts['server']}, relative to {facts['reference']}"] = {
            name: bar_of(
                (theirs["s"] / ours["s"] for ours, theirs in zip(runs, reference, strict=True)),
                statistics.median(
                    theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in zip(runs, reference, strict=True)
                ),
            )
            for name, runs in facts["runs"].items()
        }
    texts = [table(["loader", *headings], rows), *(f"Left out: {name}: `{why}`" for name, why in left_out.items())]
    return Section("\n\n".join(texts), panels)


def section_of_parts(facts: Any) -> Section:
    """Return the table of the loaders, and one for each server of the sizes and numbers of parts."""
    section = section_of_s3(facts["servers"])
    texts = [section.text]
    for swept in facts["sweep"]:
        cells = [name.split(", ") for name in swept["runs"]]
        sizes, counts = dict.fromkeys(size for size, _ in cells), dict.fromkeys(count for _, count in cells)
        rows = [
            [size, *(_rate_and_cost(swept["runs"].get(f"{size}, {count}", [])) for count in counts)] for size in sizes
        ]
        text = f"MB/s (CPU s/GB) with a latency of {swept['server']}, by the size of parts and their number:"
        texts += [text, table(["size", *counts], rows)]
    return Section("\n\n".join(texts), section.panels)


def _rate_and_cost(runs: Sequence[Mapping[str, float]]) -> str:
    if not runs:
        return ""
    rate = statistics.median(run["bytes"] / run["s"] / 1e6 for run in runs)
    return f"{rounded(rate)} ({statistics.median(1e9 * run['cpu_s'] / run['bytes'] for run in runs):.1f})"


def section_of_training(facts: Any) -> Section:
    """Return a table of a training step."""
    limit = facts["runs"][facts["limit"]]
    panels = {name: _bar(runs, limit) for name, runs in facts["runs"].items()}
    rows = [
        [
            name,
            f"{statistics.median(run['samples_per_s'] for run in runs):,.0f}",
            f"{panels[name].ratio:.0%}",
            f"{statistics.median(run['step_ms'] for run in runs):,.1f}",
            f"{statistics.median(run['idle'] for run in runs):.0%}",
        ]
        for name, runs in facts["runs"].items()
    ]
    text = f"**{facts['training']}**\n\n{table(('loader', 'samples/s', 'of the limit', 'ms/step', 'idle'), rows)}"
    return Section(text, {f"{facts['training']}, relative to {facts['limit']}": panels})


def section_of_gpu(facts: Any) -> Section:
    """Return a table for each model: a row for each loader, and a column for each number of workers."""
    texts = []
    panels: dict[str, dict[str, Bar]] = {}
    for model, runs in facts["runs"].items():
        numbers = sorted({run["workers"] for run in runs})
        loaders = dict.fromkeys(run["loader"] for run in runs)
        cells = {
            name: [[run for run in _runs_of(runs, name) if run["workers"] == n] for n in numbers] for name in loaders
        }
        rows = [[name, *(_gpu_cell(found) for found in cells[name])] for name in loaders]
        limits = facts["limit"][model]
        limit = statistics.median(run["samples_per_s"] for run in limits)
        rates = _range([f"{run['samples_per_s']:,.0f}" for run in limits])
        title = f"{model} on one {facts['device']}"
        texts.append(f"**{title}**: {rates} images/s with data on the device")
        texts.append(table(("loader", *(f"{n} worker{'s' * (n > 1)}" for n in numbers)), rows))
        most = {name: [found for found in row if found][-1] for name, row in cells.items()}
        if most:  # not all failed
            panels[f"{title}, relative to data on the device"] = {
                f"{name}, {found[0]['workers']} workers": bar_of(run["samples_per_s"] / limit for run in found)
                for name, found in most.items()
            }
    if copies := facts["copies"]:
        times = {name: f"{1e3 * seconds:.2f} ms" for name, seconds in copies.items()}
        texts.append(
            f"Copying a batch of {facts['batch'] * 3 * SIZE * SIZE / 1e6:.1f} MB to the GPU takes {times['pinned_s']} "
            f"from page-locked memory, and the call returns after {times['pinned_returns_s']}. From other memory, it "
            f"takes {times['pageable_s']}, and the call returns after {times['pageable_returns_s']}. Pinning the batch "
            f"takes {times['pin_s']}, in a thread."
        )
    texts += [f"Left out: {name}: `{reason}`" for name, reason in facts["left_out"].items()]
    texts.append("With " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + ".")
    return Section("\n\n".join(texts), panels)


def _runs_of(runs: Iterable[Any], loader: str) -> list[Any]:
    return [run for run in runs if run["loader"] == loader]


def _gpu_cell(runs: Sequence[Any]) -> str:
    """Return the images per second, and in parentheses the share of busy time and the number of cores."""
    if not runs:
        return ""
    rates = _range([f"{run['samples_per_s']:,.0f}" for run in runs])
    shares = _range([f"{1 - run['idle']:.0%}" for run in runs])
    cores = _range([f"{run['cores']:.0f}" for run in runs])
    return f"{rates} ({shares}, {cores})"


def _range(texts: Sequence[str]) -> str:
    """Return the figures of several rounds."""
    return " / ".join(dict.fromkeys(texts))
