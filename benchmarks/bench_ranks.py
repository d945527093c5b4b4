"""Is training on indexed shards the same on any number of ranks, and does any of them wait for data?

    python benchmarks/bench_ranks.py --json ranks.json --plot ranks.svg

``torchrun`` starts ``docs/examples/train_by_index.py`` on 1, 2 and 4 ranks, with gloo, on the handwritten digits of
scikit-learn. A fourth run is killed on 2 ranks and resumes on 4. All must have the same global batches. The table shows
how much their losses differ, and the longest time that a rank waited for a batch after the first of its epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from contest import write_report
from plots import pyplot
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from wds_datapipes import ShardWriter

#: The number of epochs that the example trains for.
EPOCHS = 5
SCRIPT = Path(__file__).parents[1] / "docs/examples/train_by_index.py"
#: The step before which a run is killed, and the step from which it resumes: that of its last checkpoint.
DIE_AT, RESUME_AT = 57, 50


def train(shards: Path, folder: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    """Run the example on some ranks, and return its log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(SCRIPT), f"{shards}/train-*.tar", "--folder", str(folder), *options]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode and not options:  # with options, the run is killed
        raise RuntimeError(done.stderr)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def write_digits(folder: Path) -> None:
    """Write four fifths of scikit-learn's 1,797 scans of digits to twelve shards, and the rest to three."""
    digits = load_digits()
    order = list(range(len(digits.target)))
    Random(0).shuffle(order)
    split = len(order) * 4 // 5
    for name, numbers, shards in (("train", order[:split], 12), ("test", order[split:], 3)):
        pattern = folder / f"{name}-%03d.tar"
        with ShardWriter(pattern, maxcount=-(-len(numbers) // shards), verbose=False) as writer:
            for number in numbers:
                image = digits.images[number] / 16
                writer.write({"__key__": f"{number:04d}", "png": image, "cls": digits.target[number]})


def run_all(folder: Path, *, is_quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the log of each run."""
    write_digits(folder)
    logs = {
        f"{ranks} rank{'s' * (ranks > 1)}": train(folder, folder / str(ranks), ranks)
        for ranks in (1, 2, 4)[: 2 if is_quick else 3]
    }
    if is_quick:
        return logs
    train(folder, folder / "killed", 2, "--die-at", str(DIE_AT))
    logs["killed on 2, resumed on 4"] = train(folder, folder / "killed", 4)
    return logs


def plot(path: Path, logs: dict[str, list[dict[str, Any]]]) -> None:
    """Plot the losses of all runs, and how much each differs from the first."""
    figure, (upper, lower) = pyplot().subplots(
        2, 1, sharex=True, figsize=(8, 5.2), height_ratios=[2, 1], layout="constrained"
    )
    whole = next(iter(logs.values()))
    resumed = next((step for step, line in enumerate([*logs.values()][-1]) if line["ranks"] == 4), 0)
    for number, (name, log) in enumerate(logs.items()):
        upper.plot([line["loss"] for line in log], label=name, linewidth=7 - 2 * number, alpha=0.75)
        if number:
            errors = [max(abs(ours["loss"] - theirs["loss"]), 1e-17) for ours, theirs in zip(log, whole, strict=True)]
            lower.semilogy(errors, label=name, color=f"C{number}")
    upper.axvline(resumed, color="gray", linestyle=":")
    upper.annotate(
        "killed on 2 ranks,\nresumes on 4", (resumed, 1.6), textcoords="offset points", xytext=(6, 0), fontsize=9
    )
    upper.set_ylabel("loss of the global batch")
    upper.legend(title="the lines cover each other", frameon=False)
    lower.set_ylabel("difference\nto 1 rank")
    lower.set_ylim(1e-17, 1e-6)
    lower.set_xlabel("step")
    for panel in (upper, lower):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses and times to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the losses, as PNG, SVG or PDF")
    parser.add_argument("--quick", action="store_true", help="leave out 4 ranks and the killed run, as a smoke test")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = run_all(Path(folder), is_quick=arguments.quick)
    whole = next(iter(logs.values()))
    table = Table(
        "run", "steps", "same global batches", "difference of losses", "median wait (ms)", "longest wait (ms)"
    )
    facts = []
    for name, log in logs.items():
        same = [line["keys"] for line in log] == [line["keys"] for line in whole]
        error = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(log, whole, strict=False))
        steps = len(log)
        waits = [
            1000 * max(line["waited"])
            for step, line in enumerate(log)
            if step % (steps // EPOCHS) and step != RESUME_AT
        ]
        facts.append({"run": name, "steps": steps, "same": same, "error": error, "waits_ms": waits})
        table.add_row(
            name, str(steps), str(same), f"{error:.0e}", f"{statistics.median(waits):.2f}", f"{max(waits):.1f}"
        )
    Console().print(table)
    write_report(arguments.json, facts)
    if arguments.plot is not None:
        plot(arguments.plot, logs)


if __name__ == "__main__":
    main()
