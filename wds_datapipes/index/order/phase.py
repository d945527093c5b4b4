"""A phase of a run: the datasets that it reads from a step on, their weights and batches, and its record in states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wds_datapipes.errors import StateError, plural

if TYPE_CHECKING:
    from wds_datapipes.index.order.timeline import RunTimeline

#: The attributes of a `Phase` that a record may contain, apart from its datasets and beginning.
FACTS = ("count", "batch", "points")


@dataclass(frozen=True)
class Phase:
    """A part of a run with the same datasets, schedule and batches.

    Attributes:
        count: the number of samples in an epoch.
        batch: the number of samples in a global batch.
        datasets: for each dataset, the numbers of its shards and samples, and their digest.
        points: the schedule of weights, by step; None if an epoch has each sample once.
        epoch: the epoch in which the phase begins.
        start: the position in this epoch at which it begins.
        step: the step at which it begins.
    """

    count: int
    batch: int
    datasets: Mapping[str, Sequence[Any]]
    points: Sequence[Sequence[Any]] | None = None
    epoch: int = 0
    start: int = 0
    step: int = 0

    def drawn_datasets(self, name: str) -> dict[str, int]:
        """Return the number of shards of each dataset that has a weight; ``""`` means all datasets together."""
        return {each: shards for each, (shards, *_) in self.datasets.items() if name in ("", each)}


def record_of(phase: Phase, before: Phase | None = None) -> dict[str, Any]:
    """Return the record of a phase after another one, without its datasets, schedule and batches if they are equal."""
    facts = json.loads(json.dumps(asdict(phase)))
    known = {} if before is None else json.loads(json.dumps(asdict(before)))
    datasets, others = facts["datasets"], known.get("datasets", {})
    changed = {name: datasets.get(name) for name in {**others, **datasets} if datasets.get(name) != others.get(name)}
    found = {name: facts[name] for name in FACTS if name not in known or facts[name] != known[name]}
    found |= {"datasets": changed} if changed else {}
    begin = {"epoch": phase.epoch, "step": phase.step}
    return {**begin, "start": phase.start, **found} if found else begin


def phases_in(records: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Return the phases of some records, apart from those that only change functions."""
    found, facts, datasets = list[Phase](), dict[str, Any](), dict[str, Any]()
    for record in records:
        if "start" in record:
            facts |= {name: record[name] for name in FACTS if name in record}
            datasets = {**datasets, **record.get("datasets", {})}
            datasets = {name: known for name, known in datasets.items() if known is not None}
            found.append(Phase(**facts, datasets=datasets, **{key: record[key] for key in ("epoch", "start", "step")}))
    return found


def check_amendment(timeline: RunTimeline, new: Phase, digest: Callable[[str, int], str]) -> None:
    """Check that a phase can follow others: no sample is repeated, and none is lost.

    Args:
        timeline: the earlier phases.
        new: the phase.
        digest: returns the digest of the first shards of a dataset in their current state.

    Raises:
        StateError: a dataset was replaced or has lost samples, or the phase needs a different kind of order.
    """
    last = timeline.phases[-1]
    problems = list[str]()
    if (last.epoch, last.start) > (new.epoch, new.start):
        problems.append(f"a later phase has begun in epoch {last.epoch}, but this state is of epoch {new.epoch}")
    if {*map(_kind, (last.points, new.points))} - {"weights"} and _kind(last.points) != _kind(new.points):
        problems.append(f"the run has {_kind(last.points)}, and a change to {_kind(new.points)} would repeat samples")
    known = {name: each for phase in timeline.phases for name, each in phase.datasets.items()}
    for name, (shards, samples, old) in known.items():
        own = new.datasets.get(name)
        owner = f"the dataset {name!r}" if name else "the dataset"
        if own is None and name in last.datasets and new.start and last.points is None:
            problems.append(f"{owner} has samples in the rest of this epoch and can be removed at its end")
        elif own is not None and (own[0] < shards or digest(name, shards) != old):
            problems.append(
                f"{owner} had {plural(samples, 'sample')} in {plural(shards, 'shard')} (#{old}), but now has others in "
                f"the first {shards:,} of {plural(own[0], 'shard')}, or other columns for bucket_by or pack. A "
                "dataset may only grow, by shards at its end"
            )
    if problems:
        raise StateError(f"This pipeline would repeat or lose samples of the run: {'; '.join(problems)}")


def _kind(points: Sequence[Sequence[Any]] | None) -> str:
    if points is None:
        return "epochs with each sample once"
    return "epochs of all datasets together" if "" in points[0][1] and len(points[0][1]) == 1 else "weights"
