"""Virtual environments for the packages that benchmarks compare with, since their dependencies conflict.

    python benchmarks/environments.py dali nvidia-dali-cuda120==2.4.0

creates ``build/environments/dali``, which sees the packages of this interpreter, and installs what is missing.
``nox -s bench`` does so for each group ``bench_...`` of pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

__all__ = ["FOLDER", "environment_variables", "install", "python_of"]

FOLDER = Path(__file__).resolve().parent.parent / "build" / "environments"
#: Names of the libraries of FFmpeg in PyAV's wheel, such as libavutil-5809ad29.so.60.26.102.
FFMPEG = re.compile(r"(lib(?:av|sw)\w+)-[0-9a-f]+(\.so\.\d+)")


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, which may not exist."""
    return FOLDER / name / "bin" / "python"


def install(name: str, requirements: list[str]) -> int:
    """Create an environment on top of this interpreter's packages, and return the exit status of pip."""
    folder = FOLDER / name
    venv.create(folder, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # After the packages of the environment itself on the path of modules; pip counts them as installed. Unlike a path,
    # the call also finds packages that were installed with -e.
    call = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "packages-below.pth").write_text(call, encoding="utf-8")
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*pip, *requirements], check=False).returncode


def environment_variables(name: str) -> dict[str, str]:
    """Return the variables for a process in an environment.

    SPDL loads FFmpeg's libraries by their usual names. On a system without them, links to those in PyAV's wheel serve.
    """
    if name != "spdl" or not python_of(name).exists():
        return dict(os.environ)
    package = find_spec("av")
    libraries = Path(package.origin).parent.parent / "av.libs" if package and package.origin else Path()
    links = FOLDER / name / "ffmpeg"
    links.mkdir(exist_ok=True)
    for path in libraries.glob("lib*"):
        if (match := FFMPEG.match(path.name)) and not (link := links / "".join(match.groups())).exists():
            link.symlink_to(path)
    search = [os.environ.get("LD_LIBRARY_PATH", ""), str(links), str(libraries)]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(filter(None, search))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the name of the environment")
    parser.add_argument("requirements", nargs="+", help="the packages, as for pip")
    arguments = parser.parse_args()
    if status := install(arguments.name, arguments.requirements):
        # Not an error of the benchmarks, which leave the loader out and say so.
        print(f"{arguments.name} could not be installed (pip exited with {status})", file=sys.stderr)


if __name__ == "__main__":
    main()
