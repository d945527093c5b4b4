"""Provenance: what a run has seen of which data until a checkpoint, for model cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wds_datapipes.runs.steps import RunSteps


def provenance(pipeline: Any, state: Mapping[str, Any] | str | bytes) -> dict[str, Any]:
    """Return what a run of `IndexedSamples` has seen until a state, as JSON-compatible values.

    Args:
        pipeline: the pipeline, as it was built for training.
        state: the state.

    Returns:
        dict: the number of ``steps``; for each of the ``datasets``, its shards, samples and digest, and the samples and
        epochs that the run has seen of it; the ``phases`` of the run, each with what has changed since the one before;
        and the numbers and digests of ``excluded`` samples, with the epochs and positions from which on.

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
        for each in [name] if name in every else every:  # datasets that are drawn together
            share = samples if name in every else round(epochs * every[each]["samples"])
            every[each] |= {"samples_seen": share, "epochs": round(epochs, 4)}
    return {"steps": steps, "datasets": every, "phases": run.saved.phases, "excluded": run.saved.excluded}


def as_markdown(facts: Mapping[str, Any]) -> str:
    """Return the result of `provenance` as tables in Markdown."""
    datasets = [
        (
            f"`{name}`" if name else "",
            f"{known['shards']:,}",
            f"{known['samples']:,}",
            f"`{known['digest']}`",
            f"{known.get('samples_seen', 0):,}",
            f"{known.get('epochs', 0):.4g}",
        )
        for name, known in facts["datasets"].items()
    ]
    phases = [
        (
            str(each.get("step", "")),
            str(each["epoch"]),
            str(each.get("batch", "")),
            "; ".join(_points(each)),
            "; ".join(
                [*map(_dataset, each.get("datasets", {}).items()), *(f"`{text}`" for text in each.get("changes", ()))]
            ),
        )
        for each in facts["phases"]
    ]
    rows = [
        (
            str(epoch),
            str(position),
            ", ".join(f"{count:,} of `{name}` (`{digest}`)" for name, (count, digest) in note.items()),
        )
        for epoch, position, note in facts["excluded"]
    ]
    tables = [
        _table(("dataset", "shards", "samples", "digest", "samples seen", "epochs"), datasets),
        _table(("from step", "epoch", "batch", "weights", "changes"), phases),
        *([_table(("from epoch", "position", "excluded"), rows)] if rows else []),
    ]
    return "\n\n".join([f"Training data of {facts['steps']:,} steps:", *tables])


def _points(phase: Mapping[str, Any]) -> Iterator[str]:
    """Yield the points of the schedule of a phase, with weights in percent."""
    for step, weights, *kind in phase.get("points") or ():
        if "" not in weights:
            shares = ", ".join(f"{name} {weight / sum(weights.values()):.4g}" for name, weight in weights.items())
            start = f" from step {step}" if step > phase["step"] else ""
            yield shares + (f" until step {step}, linearly" if kind else start)


def _dataset(item: tuple[str, Sequence[Any] | None]) -> str:
    name, known = item
    return f"without `{name}`" if known is None else f"{f'`{name}` of ' if name else ''}{known[1]:,} samples"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
