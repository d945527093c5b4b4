"""The command line of all programs: the questions to answer, the data to use, and where the answers go.

A program answers one or more questions. Each has a name, which is that of its file of results, of the function in
report.py that makes tables of them, and of their section in docs/explanation/benchmarks.md if they have one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from html import unescape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

from report import SECTIONS
from rich.console import Console

__all__ = ["Question", "answer", "options", "write_results"]

#: The packages whose versions a file of results includes.
PACKAGES = ("wds-datapipes", "webdataset", "torch", "torchdata", "numpy", "pillow")
#: The size of the data with ``--quick``.
QUICK_SCALE = 0.02


class Question(NamedTuple):
    """A question that a program answers.

    Attributes:
        name: the name.
        ask: measures, and returns the results.
        rounds: the number of rounds by default.
    """

    name: str
    ask: Callable[[argparse.Namespace], Any]
    rounds: int = 1


def options(document: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs; ``document`` is the docstring of the program."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="the number of rounds (that of each question)")
    parser.add_argument("--scale", type=float, default=1.0, help="the size of the data, relative to the default")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(gettempdir(), "wds-datapipes-benchmarks"),
        help="the folder for the data, kept for the next run (%(default)s)",
    )
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write all results to QUESTION.json there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="plot the results as QUESTION.svg there")
    parser.add_argument("--quick", action="store_true", help="use little data and one round, as a smoke test")
    return parser


def answer(parser: argparse.ArgumentParser, *questions: Question) -> None:
    """Answer the questions that the command line selects: measure, print tables, and write results and plots."""
    names = [question.name for question in questions]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="the questions to answer (all)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.scale = 1, min(arguments.scale, QUICK_SCALE)
    for folder in filter(None, (arguments.data, arguments.results, arguments.plots)):
        folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=165, soft_wrap=True)
    for question in questions:
        if question.name not in arguments.only:
            continue
        rounds = question.rounds if arguments.rounds is None else arguments.rounds
        results = question.ask(argparse.Namespace(**{**vars(arguments), "rounds": rounds}))
        write_results(arguments.results, question.name, results)
        section = SECTIONS[question.name](json.loads(json.dumps(results)))
        console.print(f"{question.name}\n\n{unescape(section.text)}\n", markup=False, highlight=False)
        if arguments.plots is not None:
            section.plot(arguments.plots / f"{question.name}.svg")


def write_results(folder: Path | None, name: str, results: Any) -> None:
    """Write the results of a question as JSON, with a description of the machine."""
    if folder is not None:
        text = json.dumps({"machine": machine(), "results": results}, indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Describe the machine on which results were measured."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _processor() -> str:
    """Return the model of the processor, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
