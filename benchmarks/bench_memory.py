"""How much memory does reading take, beyond what the process has anyway?

    python benchmarks/bench_memory.py --json memory.json --plot memory.png

Each contender reads BIG (members of 4 MiB) in a process of its own, forked after the imports: it first reads a little
of SMALL, then the kernel's mark of the highest memory in use is set back, and read at the end (VmHWM, so Linux only).
A consumer holds its last sample while the next one is read, so two members, 8.4 MB, are the least to expect.

Measured, MB: 12.5 for ours, 25.0 for webdataset, 20.8 for tarfile as a stream, 8.4 for tarfile with seeking. A stage
of ours still holds the sample before while the next member is read.
"""

from __future__ import annotations

import statistics

from bench_reading import contenders
from contest import in_child, options, parse, plot_bars, write_report
from datasets import SETS, folder
from memory import in_use, peak, restart_peak
from rich.console import Console
from rich.table import Table


def extra(name: str, small: list[str], big: list[str]) -> int:
    """Return how many bytes reading ``big`` takes at the most."""
    run = {contender.name: contender.run for contender in contenders(small)}[name]
    run()
    run = {contender.name: contender.run for contender in contenders(big)}[name]
    restart_peak()
    before = in_use()
    run()
    return peak() - before


def main() -> None:
    arguments = parse(options(__doc__, rounds=3))
    data = folder(arguments.data)
    small = in_child(SETS["SMALL"].write, data, 0.02)
    big = in_child(SETS["BIG"].write, data, max(arguments.scale, 0.2))
    taken: dict[str, list[int]] = {contender.name: [] for contender in contenders(big)}
    for _ in range(arguments.rounds):
        for name, sizes in taken.items():
            sizes.append(in_child(extra, name, small, big))
    table = Table(title="Extra memory at its peak, members of 4 MiB", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("MB", "least", "most"):
        table.add_column(heading, justify="right")
    for name, sizes in taken.items():
        table.add_row(name, *(f"{size / 1e6:.1f}" for size in (statistics.median(sizes), min(sizes), max(sizes))))
    Console(width=100).print(table)
    write_report(arguments.json, taken)
    medians = {name: statistics.median(sizes) / 1e6 for name, sizes in taken.items()}
    plot_bars(arguments.plot, medians, "Extra memory at its peak, members of 4 MiB", "MB")


if __name__ == "__main__":
    main()
