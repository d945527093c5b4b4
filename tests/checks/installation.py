"""Does an installation without extras work, and how long does importing the package take, compared with torch?

    python tests/checks/installation.py 0.1.0

`nox -s compatibility` runs this in an empty folder, in an environment that only has the package and what it depends on.
It writes shards, and runs the first block of the README on them, as `readme.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions, requires
from pathlib import Path

import numpy as np
from import_time import shortest_times

import wds_datapipes
from wds_datapipes import TarWriter

ROOT = Path(__file__).parents[2]
#: How many new interpreters import each package; the shortest time counts.
ROUNDS = 5


def main() -> None:
    """Check the installation, and print the versions and the times."""
    installed = Path(wds_datapipes.__file__)
    if not installed.is_relative_to(sysconfig.get_path("purelib")) or wds_datapipes.__version__ != sys.argv[1]:
        sys.exit(f"{installed} is version {wds_datapipes.__version__}, not an installation of version {sys.argv[1]}")
    versions = {normalized(each.name): each.version for each in distributions()}
    core, extra = set[str](), set[str]()
    for requirement in requires("wds-datapipes") or []:
        (extra if "extra ==" in requirement else core).add(normalized(re.split(r"[\s<>=~!;\[]", requirement)[0]))
    if others := (extra - core - {"wds-datapipes"}) & versions.keys():
        sys.exit(f"The environment has packages of extras: {sorted(others)}")
    for name in wds_datapipes.__all__:
        getattr(wds_datapipes, name)
    write_shards()
    block = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"))[0]
    Path("readme.py").write_text(block, "utf-8")
    subprocess.run([sys.executable, "readme.py"], check=True)
    print(f"Python {sys.version.split()[0]}", *(f"{name} {versions[name]}" for name in sorted(core)), sep=", ")
    times = shortest_times(["torch", "wds_datapipes"], ROUNDS)
    ratio = times["wds_datapipes"] / times["torch"]
    print(f"CPU time to import torch: {times['torch']:.2f} s; wds_datapipes, with torch: {ratio:.2f} times as long")


def normalized(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return name.lower().replace("_", "-")


def write_shards() -> None:
    """Write shards like those of `wds-datapipes demo`, which needs an extra."""
    folder = Path("wds-datapipes-demo")
    folder.mkdir()
    for shard in range(12):
        with TarWriter(folder / f"train-{shard:03d}.tar") as writer:
            for number in range(100):
                pixels = np.full((64, 64, 3), number, np.uint8)
                writer.write({"__key__": f"{shard}-{number}", "jpg": pixels, "cls": number % 2})


if __name__ == "__main__":
    main()
