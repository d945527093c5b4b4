"""How long does importing the package take, compared with torch and torchdata?

    python benchmarks/bench_import.py --json import.json --plot import.png

Each program runs in a new interpreter, and the three alternate. The reference imports torch and torchdata's
DataLoader2. Result in CPU time: 1.08 with a warm disk cache; the project's limit is 1.10. The command line imports the
package, so its help page takes as long.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from contest import options, parse, write_report
from plots import plot_bars

REFERENCE = "torch and torchdata"
#: The arguments of each interpreter.
PROGRAMS = {
    REFERENCE: ["-c", "import torch, torchdata.dataloader2, torchdata.datapipes.iter"],
    "wds_datapipes": ["-c", "import wds_datapipes"],
    "wds-datapipes --help": ["-m", "wds_datapipes", "--help"],
}


def cpu_seconds(program: list[str]) -> float:
    """Return the CPU time that a new interpreter takes, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-W", "ignore", *program], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
