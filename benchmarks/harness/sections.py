"""Sections of the report: the tables and plots that are made of the results of a question."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.plots import Bar, Panels, panels_of, plot_growth, plot_ratios

__all__ = [
    "Section",
    "rounded",
    "section_of_buckets",
    "section_of_contests",
    "section_of_growth",
    "section_of_hosts",
    "section_of_indexes",
    "section_of_memory",
    "section_of_merged_states",
    "section_of_other_hosts",
    "section_of_own_code",
    "section_of_ranks",
    "section_of_runs",
    "section_of_shuffles",
    "section_of_stages",
    "section_of_states",
    "table",
    "times",
]


class Section(NamedTuple):
    """The text of a section, and its plot."""

    text: str
    panels: Panels = MappingProxyType({})
    #: Draws a plot of another kind than bars.
    draw: Callable[[Path], None] | None = None

    def plot(self, path: Path) -> None:
        """Draw the plot, if there is one."""
        if self.draw is not None:
            self.draw(path)
        elif self.panels:
            plot_ratios(path, self.panels)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are numbers."""
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def section_of_contests(contests: Any) -> Section:
    """Return a table of ratios for all contests with the same contenders, and one for those with others."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for facts in contests:
        found = {contender["name"]: contender for contender in facts["contenders"]}
        groups.setdefault(tuple(found), {})[facts["title"]] = found
    shared = {names: columns for names, columns in groups.items() if len(columns) > 1}
    tables = [
        table(("contender", *columns), [[name, *(times(found[name]) for found in columns.values())] for name in names])
        for names, columns in shared.items()
    ]
    rows = [
        (f"{title}: {name}", times(one))
        for names, columns in groups.items() if names not in shared
        for title, found in columns.items()
        for name, one in found.items()
    ]  # fmt: skip
    if rows:
        tables.append(table(("contender", "times (in CPU time)"), rows))
    return Section("\n\n".join(tables), panels_of(contests))


def times(contender: Mapping[str, Any]) -> str:
    wall, cpu = ("times", "times_cpu") if "times" in contender else ("times_reference", "times_reference_cpu")
    return f"{contender[wall]:.2f}" + (f" ({contender[cpu]:.2f})" if cpu in contender else "")


def section_of_states(facts: Any) -> Section:
    """Return a table of what it costs to save a state and to resume."""
    rows = [
        [
            case,
            f"{costs['ours']['state_bytes']:,}",
            f"{costs['ours']['waiting']:,}",
            f"{1e3 * costs['ours']['save_s']:.2f}",
            f"{costs['save_batches']:.3f}",
            f"{recording:.2%}" if (recording := costs["ours"]["recording"]) else "",
            f"{costs['ours']['resume_s']:.2f}",
            f"{costs['gain']:.1f}" if "gain" in costs else "",
        ]
        for case, costs in facts.items()
    ]
    headings = (
        "case",
        "bytes",
        "samples waiting",
        "ms to save",
        "in batches",
        "to record",
        "s to resume",
        "times StatefulDataLoader",
    )
    return Section(table(headings, rows), {})


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
    """Return a table for each kind of growth; its plot has lines."""
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
        "copies": (
            ("copies in a shard cache", "s to find the first", "µs to find another", "s to download in place of one"),
            (1, 1, 1),
        ),
        "cached": (("samples in a sample cache", "µs per sample to fill it", "to read it"), (1, 1)),
    }
    for name, (headings, factors) in tables.items():
        rows = [
            [f"{int(size):,}", *(rounded(value * factor) for value, factor in zip(values, factors, strict=True))]
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
                    rounded(value * factor)
                    for by_size in facts[name].values()
                    for value, factor in zip(by_size[size], factors, strict=True)
                ),
            ]
            for size in sizes
        ]
        texts.append(table((headings[0], *columns), rows))
    return Section("\n\n".join(texts), {}, partial(plot_growth, facts=facts))


def rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def section_of_memory(facts: Any) -> Section:
    """Return a table of the additional memory at its peak."""
    rows = [[name, *(f"{each[size]:.1f}" for size in ("mb", "least", "most"))] for name, each in facts.items()]
    return Section(table(("contender, with members of 4 MiB", "MB", "least", "most"), rows))


def section_of_stages(facts: Any) -> Section:
    """Return a table of what chained stages take."""
    most = max(len(each["us_per_item"]) for each in facts.values())
    rows = [
        [
            kind,
            *(f"{microseconds:.2f}" for microseconds in each["us_per_item"]),
            *[""] * (most - len(each["us_per_item"])),
            f"{each['us_per_stage']:.2f}",
        ]
        for kind, each in facts.items()
    ]
    bars = {kind: Bar(*[each["us_per_stage"]] * 3) for kind, each in facts.items()}
    headings = ("stage, µs per item (best rounds) by number", *map(str, range(most)), "one more stage")
    return Section(table(headings, rows), {"µs per item for one more stage": bars})


def section_of_buckets(facts: Any) -> Section:
    """Return a table of padding, and one of ratios."""
    rows = [[name, f"{each['padding']:.1%}", f"{each['batches']:,}"] for name, each in facts["padding"].items()]
    contests = section_of_contests([facts["contest"]])
    padding = table((f"contender, {facts['samples']:,} samples", "padding", "batches or rows"), rows)
    return Section(f"{padding}\n\n{contests.text}", contests.panels)


def section_of_packing(facts: Any) -> Section:
    """Return a table for each kind of sequences: padding, and the balance of steps."""
    found = list[str]()
    for kind, contenders in facts.items():
        shapes = [name for name in next(iter(contenders.values())) if name != "seconds_per_sample"]
        rows = [
            [
                name,
                f"{each[shapes[0]]['padding']:.2%}",
                *(f"{each[shape]['busiest']:.3f}, {each[shape]['likeness']:.2f}" for shape in shapes if each[shape]),
                *("-" for shape in shapes if not each[shape]),
                f"{each['seconds_per_sample'] * 1e6:.2f}",
            ]
            for name, each in contenders.items()
        ]
        headings = (kind, "padding", *(f"{shape}: busiest, likeness" for shape in shapes), "µs per sample")
        found.append(table(headings, rows))
    return Section("\n\n".join(found))


def section_of_planning(facts: Any) -> Section:
    """Return a table of what planning rows costs a process."""
    rows = [
        [
            name,
            f"{each['window']:,}",
            f"{each['seconds_per_sample'] * 1e6:.2f}",
            f"{each['longest_pause'] * 1e3:.1f}",
            f"{each['resume'] * 1e3:.1f}",
        ]
        for name, each in facts["shapes"].items()
    ]
    headings = (f"ranks and rows of each, {facts['samples']:,} samples", "window", "µs per sample")
    return Section(table((*headings, "longest pause (ms)", "resuming at the end (ms)"), rows))


def section_of_merged_states(facts: Any) -> Section:
    """Return a table of what it costs to merge and load states."""
    text = (
        f"The state of {facts['ranks']} ranks with {facts['workers']} workers has {facts['bytes'] / 1e6:.1f} MB, "
        f"{facts['bytes'] / facts['waiting']:.2f} bytes for each waiting sample."
    )
    rows = [[name, f"{each['cpu_s']:.3f}", f"{each['grown_mb']:.0f}"] for name, each in facts["costs"].items()]
    return Section(f"{text}\n\n{table(('action', 'processor time (s)', 'memory (MB)'), rows)}")


def section_of_hosts(facts: Any) -> Section:
    """Return a table of figures: what they were, what they are, and what they should be."""
    title = f"{facts['ranks']} ranks with {facts['workers']} workers, {facts['shards']:,} shards"
    return Section(table((title, "before", "now", "goal"), facts["rows"]))


def section_of_other_hosts(facts: Any) -> Section:
    """Return tables of workers on other hosts: the median ratios within the rounds, and the CPU time per sample."""
    if not facts:
        return Section("")
    rows = []
    crops = {f"JPEG to crops, {title}": found for title, found in facts["crops"].items()}
    for title, found in {**facts["deliveries"], **crops}.items():
        own = found["RayReadingService"]
        for name, runs in found.items():
            ratio, cpu = (
                statistics.median(ours[column] / theirs[column] for ours, theirs in zip(own, runs, strict=True))
                for column in (0, 1)
            )
            medians = [statistics.median(column) for column in zip(*runs, strict=True)]
            rows.append((f"{title}: {name}", f"{medians[0]:,.0f}", f"{ratio:.2f}", f"{medians[1]:.1f}", f"{cpu:.2f}"))
    headings = ("contender", "samples/s", "ours / it", "µs of CPU", "ours / it")
    starts = [(name, f"{statistics.median(times_s):.1f}") for name, times_s in facts["starts"].items()]
    first = table((f"first item of {facts['actors']} actors", "s"), starts)
    return Section(f"{table(headings, rows)}\n\n{first}")


def section_of_ranks(facts: Any) -> Section:
    """Return a table of runs on several ranks."""
    rows = [
        [
            each["run"],
            f"{each['steps']}",
            "yes" if each["same"] else "no",
            f"{each['error']:.0e}",
            f"{statistics.median(each['waits_ms']):.2f}",
            f"{max(each['waits_ms']):.1f}",
        ]
        for each in facts
    ]
    headings = ("run", "steps", "same global batches", "difference of losses", "median wait (ms)", "longest wait (ms)")
    return Section(table(headings, rows))


def section_of_own_code(facts: Any) -> Section:
    """Return a table of what our code and libraries achieve."""
    locks = facts["locks"].items()
    figures = {
        f"lock: {heading}": {name: each[key] for name, each in locks}
        for heading, key in (
            ("µs alone", "alone_us"),
            ("ms of the longest wait", "longest_ms"),
            ("ms in all", "all_ms"),
        )
    }
    figures |= {
        f"{heading}, of {facts[kind][of]:,}": facts[kind][key]
        for heading, kind, of, key in (
            ("objects with the same fingerprint", "fingerprints", "objects", "equal"),
            ("bytes that arrive from a server that cuts connections", "retries", "bytes", "received"),
            ("credentials that are hidden", "redaction", "credentials", "hidden"),
        )
    }
    figures["µs of CPU time for a range"] = facts["answers"]
    rows = [
        (heading, f"{found['ours']:,}", ", ".join(f"{name} {n:,}" for name, n in found.items() if name != "ours"))
        for heading, found in figures.items()
    ]
    return Section(table(("figure", "ours", "libraries"), rows))
