"""How long does importing the package take, compared with torch, and with torchdata?

    python tests/checks/import_time.py

Each program runs in a new interpreter, in turn, and its shortest CPU time counts. With a warm disk cache, the package
takes 1.08 times as long as torch and torchdata's DataLoader2 together; the project's limit is 1.10. The command line
imports the package, so its help page takes as long.
"""

from __future__ import annotations

import resource
import subprocess
import sys

ROUNDS = 15
#: The arguments of each interpreter. The first is the reference.
PROGRAMS = {
    "torch and torchdata": ["-c", "import torch, torchdata.dataloader2, torchdata.datapipes.iter"],
    "torch": ["-c", "import torch"],
    "wds_datapipes": ["-c", "import wds_datapipes"],
    "wds-datapipes --help": ["-m", "wds_datapipes", "--help"],
}


def shortest_times(names: list[str], rounds: int) -> dict[str, float]:
    """Return the shortest CPU time of some of the programs, in seconds."""
    turns = [{name: cpu_seconds(PROGRAMS[name]) for name in names} for _ in range(rounds)]
    return {name: min(turn[name] for turn in turns) for name in names}


def cpu_seconds(program: list[str]) -> float:
    """Return the CPU time that a new interpreter takes, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-W", "ignore", *program], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the time of each program, and its ratio to that of the reference."""
    reference, *others = PROGRAMS
    times = shortest_times([reference, *others], ROUNDS)
    for name, seconds in times.items():
        print(f"{name:22} {seconds:.2f} s  {seconds / times[reference]:.2f}")


if __name__ == "__main__":
    main()
