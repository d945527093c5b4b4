"""Write the tables and plots of docs/explanation/benchmarks.md from the JSON files of the benchmarks.

    python benchmarks/report.py benchmarks/results/*.json
    python benchmarks/report.py --check benchmarks/results/*.json

A file is named after its program: ``end_to_end.json`` is from ``bench_end_to_end.py --json``. Each has a section in the
page, between two comments, which is replaced; sections without a file stay as they are. Plots go to ``docs/images``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench_growth import plot as plot_growth
from crops import SIZE
from loaders import LOADERS, LOCAL, OURS, REFERENCE
from plots import Bar, Panels, bar_of, panels_of, plot_ratios

__all__ = ["SECTIONS", "section_of_s3", "write_page"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
#: A loader that is at least this much faster is mentioned.
AHEAD = 1.05


class Section(NamedTuple):
    """The text of a section, and its plot."""

    text: str
    panels: Panels
    #: Draws a plot of another kind than bars.
    draw: Callable[[Path], None] | None = None


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are numbers."""
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def section_of_loaders(contests: Any) -> Section:
    """Return a table for each dataset with the most workers, one for all numbers of workers, and those for stores."""
    most = max(facts["workers"] for facts in contests)
    texts = []
    panels: dict[str, Mapping[str, Bar]] = {}
    headings = ["loader", "times", "rounds", "times (CPU)", "samples/s", "CPU ms/sample", "s to first", "MB"]
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
            [name, *(_times(loaders[name]) if name in loaders else "" for loaders in columns.values())]
            for name in names
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
                _times(loader),
                _rounds(loader["runs"], loaders[f"{REFERENCE}, {store}"]["runs"]),
                f"{loader['of_local']:.0%} ({loader['of_local_cpu']:.0%})",
                f"{loader['bytes_per_s'] / 1e6:,.0f}",
                f"{loader['share_of_raw_read']:.1%}",
                f"{loader['seconds_to_first']:.2f}",
            ])  # fmt: skip
            local = facts["loaders"][name.removesuffix(f", {store}")]["runs"]
            bars[name] = _bar(loader["runs"], local, loader["of_local_cpu"])
        speeds |= _relative(loaders, f"{OURS}, {store}", "times")
        cpu_speeds |= _relative(loaders, f"{OURS}, {store}", "times_cpu")
    headings = ("loader, store", "times (CPU)", "rounds", "of the local rate (CPU)", "MB/s", "raw read", "s to first")
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
        f"{loader['samples_per_s']:,.0f}",
        f"{1e3 * loader['cpu_s_per_sample']:.2f}",
        f"{loader['seconds_to_first']:.2f}",
        f"{loader['memory'] / 1e6:,.0f}",
        f"{loader['worker_memory'] / 1e6:,.0f}" if loader["worker_memory"] else "threads",
        "own boxes" if off is None else f"{off:.1f}",
    ]


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


def section_of_contests(contests: Any) -> Section:
    """Return a table of ratios for all contests with the same contenders, and one for those with others."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for facts in contests:
        found = {contender["name"]: contender for contender in facts["contenders"]}
        groups.setdefault(tuple(found), {})[facts["title"]] = found
    shared = {names: columns for names, columns in groups.items() if len(columns) > 1}
    tables = [
        table(("contender", *columns), [[name, *(_times(found[name]) for found in columns.values())] for name in names])
        for names, columns in shared.items()
    ]
    rows = [
        (f"{title}: {name}", _times(one))
        for names, columns in groups.items() if names not in shared
        for title, found in columns.items()
        for name, one in found.items()
    ]  # fmt: skip
    if rows:
        tables.append(table(("contender", "times (in CPU time)"), rows))
    return Section("\n\n".join(tables), panels_of(contests))


def _times(contender: Mapping[str, Any]) -> str:
    wall, cpu = ("times", "times_cpu") if "times" in contender else ("times_reference", "times_reference_cpu")
    return f"{contender[wall]:.2f}" + (f" ({contender[cpu]:.2f})" if cpu in contender else "")


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
    return Section(f"{table(('loader', *panels), rows)}\n\n{table(('loader', *columns), costs)}", panels)


def section_of_states(facts: Any) -> Section:
    """Return a table of what it costs to save a state and to resume."""
    rows = [
        [
            case,
            f"{costs['ours']['state_bytes']:,}",
            f"{1e3 * costs['ours']['save_s']:.2f}",
            f"{costs['save_batches']:.3f}",
            f"{costs['ours']['resume_s']:.2f}",
            f"{costs['gain']:.1f}" if "gain" in costs else "",
        ]
        for case, costs in facts.items()
    ]
    headings = ("case", "bytes", "ms to save", "in batches", "s to resume", "times StatefulDataLoader")
    return Section(table(headings, rows), {})


def section_of_s3(contests: Any) -> Section:
    """Return a table of the loaders that read S3, with the figures for each latency."""
    figures = {
        "MB/s": lambda run: run["bytes"] / run["s"] / 1e6,
        "CPU s/GB": lambda run: 1e9 * run["cpu_s"] / run["bytes"],
        "requests": lambda run: run["requests"],
    }
    names = list(dict.fromkeys(name for facts in contests for name in facts["runs"]))
    rows, panels = [], {}
    for name in names:
        found = [facts["runs"].get(name) for facts in contests]
        medians = [
            _figure(statistics.median(map(figure, runs))) if runs else ""
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


def section_of_shuffles(facts: Any) -> Section:
    """Return a table of how well the ways of shuffling mix an epoch, and what they hold."""
    shares = ("same_shard", 1), ("spread", 0), ("distance", 0)
    rows = [
        [
            order,
            f"{quality['shards_in_a_batch']:.1f}",
            *(f"{100 * quality[name]:.{digits}f} %" for name, digits in shares),
            f"{quality['held']:.0f}",
            f"{quality['open']:.0f}",
        ]
        for order, quality in facts.items()
    ]
    shards = ("shards in a batch", "neighbors from one shard", "spread of a shard", "distance of its neighbors")
    return Section(table(("order", *shards, "samples held", "open shards"), rows), {})


def section_of_indexes(facts: Any) -> Section:
    """Return a table of ratios, and one of what it costs to begin an epoch."""
    contests = section_of_contests([each for each in facts if "contenders" in each])
    plans = [each for each in facts if "contenders" not in each]
    rows = [
        [each["order"], f"{1e3 * each['begin_s']:.0f}", f"{1e3 * each['find_s']:.2f}", f"{each['grown_mb']:.0f}"]
        for each in plans
    ]
    headings = ("order of 10¹⁰ samples in 10⁶ shards", "ms to begin an epoch", "ms to find 256 samples", "memory (MB)")
    return Section(f"{contests.text}\n\n{table(headings, rows)}", contests.panels)


def section_of_runs(facts: Any) -> Section:
    """Return a table of what it costs to explain a step, one of ratios, and the size of a state."""
    rows = [
        [
            f"{each['order']}, {each['lanes']} lane{'s' * (each['lanes'] > 1)}",
            f"{each['cpu_s']:.2f}",
            f"{each['grown_mb']:.0f}",
        ]
        for each in facts["explained"]
    ]
    text = (
        f"A step of {facts['batch']:,} samples, of {facts['shards']:,} shards of {facts['samples']:,} samples, without "
        "keys:"
    )
    contests = section_of_contests(facts["contests"])
    state = f"The state of a run with {facts['phases']} phases has {facts['state_bytes']:,} bytes."
    texts = text, table(("order", "processor time (s)", "memory (MB)"), rows), contests.text, state
    return Section("\n\n".join(texts), {})


def section_of_growth(facts: Any) -> Section:
    """Return a table for each kind of growth; bench_growth.py draws the plot."""
    _, first, *_, last = facts["epoch"]  # buffers grow up to the first point
    per_sample = (last[2] - first[2]) / (last[0] - first[0])
    sizes = [point[3] for point in facts["epoch"]]
    text = (
        f"In an epoch of {round(last[0] * 11 / 10, -4):,.0f} samples from two workers, the memory of all processes "
        f"changed from {first[2] / 1e6:.0f} MB after {first[0]:,} samples to {last[2] / 1e6:.0f} MB after "
        f"{last[0]:,}: by {per_sample:.2f} bytes per sample. A state had {min(sizes):,} to {max(sizes):,} bytes."
    )
    texts = [text]
    tables = {
        "states": (("shards in the list", "bytes of a state", "ms to save", "s to resume"), (1, 1e3, 1)),
        "copies": (("copies in a shard cache", "µs to find one", "s to download in place of one"), (1, 1)),
        "cached": (("samples in a sample cache", "µs per sample to fill it", "to read it"), (1, 1)),
    }
    for name, (headings, factors) in tables.items():
        rows = [
            [f"{int(size):,}", *(_figure(value * factor) for value, factor in zip(values, factors, strict=True))]
            for size, values in facts[name].items()
        ]
        texts.append(table(headings, rows))
    for name, headings in (
        ("skipping", ("members skipped in a shard", "µs per member", "MB")),
        ("listing", ("shards in a list", "s to the first", "bytes per URL")),
        ("workers", ("workers", "samples/s", "MB per worker")),
    ):
        sizes = list(next(iter(facts[name].values())))
        factors = (1, 1e-6) if name != "listing" else (1, 1)
        columns = [f"{heading}, {loader}" for loader in facts[name] for heading in headings[1:]]
        rows = [
            [
                f"{int(size):,}",
                *(
                    _figure(value * factor)
                    for by_size in facts[name].values()
                    for value, factor in zip(by_size[size], factors, strict=True)
                ),
            ]
            for size in sizes
        ]
        texts.append(table((headings[0], *columns), rows))
    return Section("\n\n".join(texts), {}, partial(plot_growth, facts=facts))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def section_of_training(facts: Any) -> Section:
    """Return a table of a training step."""
    limit = facts["runs"][facts["limit"]]
    panels = {name: _bar(runs, limit) for name, runs in facts["runs"].items()}
    rows = [
        [
            name,
            f"{statistics.median(run['samples_per_s'] for run in runs):,.0f}",
            f"{panels[name].ratio:.0%}",
            f"{statistics.median(run['idle'] for run in runs):.0%}",
        ]
        for name, runs in facts["runs"].items()
    ]
    text = f"**{facts['training']}**\n\n{table(('loader', 'samples/s', 'of the limit', 'idle'), rows)}"
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
        bars = panels[f"{title}, relative to data on the device"] = {}
        for name, row in cells.items():
            most = [found for found in row if found][-1]
            bars[f"{name}, {most[0]['workers']} workers"] = bar_of(run["samples_per_s"] / limit for run in most)
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


SECTIONS: dict[str, Callable[[Any], Section]] = {
    "end_to_end": section_of_loaders,
    "reading": section_of_contests,
    "indexed": section_of_indexes,
    "remote": section_of_contests,
    "s3": section_of_s3,
    "decoding": section_of_contests,
    "delivery": section_of_deliveries,
    "writing": section_of_contests,
    "state": section_of_states,
    "runs": section_of_runs,
    "growth": section_of_growth,
    "shuffle_quality": section_of_shuffles,
    "training": section_of_training,
    "gpu": section_of_gpu,
}


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return where and with what results were measured."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    return (
        f"Measured on {cores} ({machine.get('processor') or 'unknown processor'}) with a load of "
        f"{machine['load'][0]:.1f}, Python {machine['python']}, {versions}."
    )


def with_results(text: str, name: str, section: Section, machine: Mapping[str, Any]) -> str:
    """Return the text of a page with another content of a section."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page lacks the comments {begin} and {end}")
    return f"{before}{begin}\n\n{section.text}\n\n{machine_line(machine)}\n\n{end}{after}"


def write_page(files: Iterable[Path], page: Path, images: Path | None) -> bool:
    """Replace the sections of a page for which there are results, and draw their plots; return whether it changed.

    Without a folder for plots, nothing is written.
    """
    text = old = page.read_text(encoding="utf-8")
    for file in files:
        if (section_of := SECTIONS.get(file.stem)) is None:
            print(f"{file}: the page has no section for it")
            continue
        results = json.loads(file.read_text(encoding="utf-8"))
        section = section_of(results["results"])
        text = with_results(text, file.stem, section, results["machine"])
        if images is None:
            continue
        image = images / f"benchmarks-{file.stem.replace('_', '-')}.svg"
        if section.draw is not None:
            section.draw(image)
        elif section.panels:
            plot_ratios(image, section.panels)
    if images is not None:
        page.write_text(text, encoding="utf-8")
    return text != old


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="the results in JSON")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to change (docs/explanation/benchmarks.md)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="the folder for plots (docs/images)")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page has other figures")
    arguments = parser.parse_args()
    is_changed = write_page(arguments.files, arguments.page, None if arguments.check else arguments.images)
    if arguments.check and is_changed:
        sys.exit(f"{arguments.page} has other figures than the results: run this without --check")


if __name__ == "__main__":
    main()
