"""Training on indexed shards with some ranks, as bench_train.py compares it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

from harness.plots import pyplot
from sklearn.datasets import load_digits

from wds_datapipes import ShardWriter

__all__ = ["ranks"]

#: The number of epochs that the example trains for.
EPOCHS = 5
SCRIPT = Path(__file__).parents[2] / "docs/examples/train.py"
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
    figure.savefig(path, metadata={"Date": None})


def ranks(arguments: Namespace) -> list[dict[str, Any]]:
    """Compare the global batches, the losses and the waits of all runs."""
    with tempfile.TemporaryDirectory() as folder:
        logs = run_all(Path(folder), is_quick=arguments.quick)
    whole = next(iter(logs.values()))
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
    if arguments.plots is not None:
        plot(arguments.plots / "ranks.svg", logs)
    return facts
