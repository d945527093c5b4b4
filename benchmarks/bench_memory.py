"""How much additional memory does reading take at its peak?

    python benchmarks/bench_memory.py --json memory.json --plot memory.png

Each contender reads BIG (members of 4 MiB) in a separate process, forked after the imports. It first reads some samples
of SMALL; then the kernel's record of the peak memory (VmHWM, on Linux only) is reset, and read at the end. A consumer
holds its last sample while the next one is read, so two members, 8.4 MB, are the minimum to expect.

Results in MB: 12.5 for ours, 25.0 for webdataset, 20.8 for tarfile as a stream, 8.4 for tarfile with seeking. One of
our stages still holds the previous sample while the next member is read.
"""

from __future__ import annotations

import statistics

from bench_reading import contenders
from contest import in_child, options, parse, write_report
from datasets import SETS, folder
from memory import in_use, peak, reset_peak
from plots import plot_bars
from rich.console import Console
from rich.table import Table


def extra(name: str, small: list[str], big: list[str]) -> int:
    """Return the peak memory of reading ``big``, in bytes."""
    run = {contender.name: contender.run for contender in contenders(small)}[name]
    run()
    run = {contender.name: contender.run for contender in contenders(big)}[name]
    reset_peak()
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
    table = Table(title="Additional peak memory, members of 4 MiB", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("MB", "least", "most"):
        table.add_column(heading, justify="right")
    for name, sizes in taken.items():
        table.add_row(name, *(f"{size / 1e6:.1f}" for size in (statistics.median(sizes), min(sizes), max(sizes))))
    Console(width=100).print(table)
    write_report(arguments.json, taken)
    medians = {name: statistics.median(sizes) / 1e6 for name, sizes in taken.items()}
    plot_bars(arguments.plot, medians, "Additional peak memory, members of 4 MiB", "MB")


if __name__ == "__main__":
    main()
