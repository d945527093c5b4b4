"""How long does importing the package take, compared with torch and torchdata?

    python benchmarks/bench_import.py --json import.json --plot import.png

Each program runs in a new interpreter, and the three alternate. The reference imports torch and torchdata's
DataLoader2. Result in CPU time: 1.08 with a warm disk cache; the project's limit is 1.10. The command line imports the
package, so its help page takes as long.
"""

from __future__ import annotations

from contest import options, parse, write_report
from installation import cpu_seconds
from plots import plot_bars

REFERENCE = "torch and torchdata"
#: The arguments of each interpreter.
PROGRAMS = {
    REFERENCE: ["-c", "import torch, torchdata.dataloader2, torchdata.datapipes.iter"],
    "wds_datapipes": ["-c", "import wds_datapipes"],
    "wds-datapipes --help": ["-m", "wds_datapipes", "--help"],
}


def main() -> None:
    """Run the programs in turn, and print the shortest time of each and its ratio to that of the reference."""
    arguments = parse(options(__doc__, rounds=15))
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(arguments.rounds):
        for name, program in PROGRAMS.items():
            times[name].append(cpu_seconds(program))
    shortest = {name: min(each) for name, each in times.items()}
    for name, seconds in shortest.items():
        print(f"{name:22} {seconds:.2f} s  {seconds / shortest[REFERENCE]:.2f}")
    write_report(arguments.json, times)
    plot_bars(arguments.plot, shortest, "Time to import", "CPU seconds")


if __name__ == "__main__":
    main()
