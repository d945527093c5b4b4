"""Provenance: the data that a run has seen until a checkpoint, for model cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wds_datapipes.errors import plural
from wds_datapipes.tools.runs.steps import RunSteps


def provenance(pipeline: Any, state: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
    """Return the data that a run of `IndexedSamples` has seen until a state, as JSON-compatible values.

    Args:
        pipeline: the pipeline as it was built for training.
        state: the state.

    Returns:
        dict: the number of ``steps``; for each of the ``datasets``, its shards, samples and digest, and the samples and
        epochs that the run has seen of it; and the ``phases`` of the run, each with what has changed since the one
        before, such as the numbers and digests of excluded samples.

    Raises:
        StateError: the state belongs to another pipeline.
        ValueError: the pipeline does not begin with `IndexedSamples`, or holds samples back.
    """
    run = RunSteps(pipeline, state)
    steps, seen = run.seen()
    datasets = dict[str, Any]()
    for phase in run.saved.phases:
        datasets |= {name: known for name, known in phase.get("datasets", {}).items() if known is not None}
    every = {name: dict(zip(("shards", "samples", "digest"), known, strict=True)) for name, known in datasets.items()}
    for name, (samples, epochs) in seen.items():
        for each in [name] if name in every else every:  # datasets drawn together
            share = samples if name in every else round(epochs * every[each]["samples"])
            every[each] |= {"samples_seen": share, "epochs": round(epochs, 4)}
    return {"steps": steps, "datasets": every, "phases": run.saved.phases}


def as_markdown(facts: Mapping[str, Any]) -> str:
    """Return the result of `provenance` as tables in Markdown."""
    lines = [f"Training data of {plural(facts['steps'], 'step')}:"]
    lines += _head("dataset", "shards", "samples", "digest", "samples seen", "epochs")
    for name, known in facts["datasets"].items():
        seen, epochs = known.get("samples_seen", 0), known.get("epochs", 0)
        counts = f"{known['shards']:,}", f"{known['samples']:,}"
        lines.append(_row(_code(name), *counts, _code(known["digest"]), f"{seen:,}", f"{epochs:.4g}"))
    lines += _head("from step", "epoch", "batch", "weights", "changes")
    for phase in facts["phases"]:
        begin = phase.get("step", ""), phase["epoch"], phase.get("batch", "")
        lines.append(_row(*begin, "; ".join(_points(phase)), "; ".join(_changes(phase))))
    return "\n".join(lines)


def _points(phase: Mapping[str, Any]) -> Iterator[str]:
    """Yield the points of the schedule of a phase, with weights in percent."""
    for step, weights, *kind in phase.get("points") or ():
        if "" not in weights:
            shares = ", ".join(f"{name} {weight / sum(weights.values()):.4g}" for name, weight in weights.items())
            start = f" from step {step}" if step > phase["step"] else ""
            yield shares + (f" until step {step}, linearly" if kind else start)


def _changes(phase: Mapping[str, Any]) -> Iterator[str]:
    """Yield what has changed in a phase."""
    for name, known in phase.get("datasets", {}).items():
        of = f"{_code(name)} of " if name else ""
        yield f"without {_code(name)}" if known is None else f"{of}{known[1]:,} samples"
    for name, (count, digest) in phase.get("excluded", {}).items():
        place = f"from position {phase['position']:,} on"
        yield f"without {count:,} of {_code(name) or 'the samples'} ({_code(digest)}) {place}"
    yield from map(_code, phase.get("changes", ()))


def _head(*columns: str) -> list[str]:
    return ["", _row(*columns), _row(*["---"] * len(columns))]


def _row(*cells: object) -> str:
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
