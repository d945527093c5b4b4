"""The time to import the package, relative to importing torch and torchdata's DataLoader2.

Each program runs in a new interpreter, and the three alternate. Result in CPU time: 1.08 with a warm disk cache; the
project's limit is 1.10. The command line imports the package, so its help page takes as long.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

#: The arguments of each interpreter.
PROGRAMS = {
    "torch and torchdata": ["-c", "import torch, torchdata.dataloader2, torchdata.datapipes.iter"],
    "wds_datapipes": ["-c", "import wds_datapipes"],
    "wds-datapipes --help": ["-m", "wds_datapipes.cli", "--help"],
}


def cpu_seconds(program: list[str]) -> float:
    """Return the CPU time that a new interpreter takes, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-W", "ignore", *program], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the programs in turn, and print the shortest time of each and its ratio to that of the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run 3 rounds instead of 15")
    rounds = 3 if parser.parse_args().quick else 15
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            times[name].append(cpu_seconds(program))
    shortest = {name: min(each) for name, each in times.items()}
    for name, seconds in shortest.items():
        print(f"{name:22} {seconds:.2f} s  {seconds / shortest['torch and torchdata']:.2f}")


if __name__ == "__main__":
    main()
