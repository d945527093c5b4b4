"""The states of loaders between two items, and the checkpoints in them, for all kinds of loaders.

A state is a dictionary with a single string. It therefore always has the same shape, and survives anything that saves
dictionaries: torch's distributed checkpoints load only the keys that they find in the state of a loader that has not
started. Each line of the string is JSON: the first holds the version and a checksum of the others; then comes one for
each rank, each followed by one for each of its workers, which only a process that resumes from it parses.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any
from zlib import crc32

from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError, plural
from wds_datapipes.pipes.state.description import PER_RANK
from wds_datapipes.pipes.state.pipeline_state import next_epoch_state, refusing_corrupt_states
from wds_datapipes.types import Instance

logger = logging.getLogger("wds_datapipes")

#: The only key of a state.
STATE = "wds_datapipes"
#: The version of the format.
VERSION = 14
#: The state of a worker that cannot know which part of its stream the loop will receive.
STREAM = "stream"
#: The key of the pickled pipeline in the state of a ``DataLoader2`` with a reading service of torchdata.
PICKLE = "serialized_datapipe"
#: The keys under which ``torchdata.nodes`` store the state of their source.
NODES = ("root", "it_state", "source", "snapshot", "iterable")
#: Matches a number in the description of a stage that depends on the number of ranks, such as a batch size.
OF_RANK = re.compile(rf"=\d+{PER_RANK}")


#: Advice for programs with several ranks.
ADVICE = (
    "Gather the states of all ranks, and load the same merge_states([...]) on each; or save each rank's state under "
    "its own name, and load it on that rank. torch.distributed.checkpoint stores one value per key, and loads that of "
    "rank 0 on all ranks"
)


@dataclass(frozen=True)
class WorkerState:
    """The state from which a worker resumes in the middle of an epoch.

    Args:
        text: the state of the pipeline, as one line of JSON; ``null`` means its beginning.
    """

    text: str = "null"

    @classmethod
    def of(cls, stages: Sequence[Mapping[str, Any] | None] | None) -> WorkerState:
        """Return the state of a pipeline, from JSON-compatible values."""
        return cls(json.dumps(stages, separators=(",", ":")))

    @cached_property
    def stages(self) -> Sequence[Mapping[str, Any] | None] | None:
        """The state of the pipeline, parsed on first use."""
        with refusing_corrupt_states():
            found: list[Mapping[str, Any] | None] = json.loads(self.text) or []
            if not all(isinstance(stage, dict | None) for stage in found):
                raise TypeError(f"the states of stages are {found!r:.100}")
        return found or None

    @property
    def mark(self) -> int | None:
        """A number that identifies the position in an epoch; ``None`` at its beginning, or if it is replayed."""
        begins = all(set(stage or ()) <= {"stream", "replayed", "digest"} for stage in self.stages or ())
        return None if begins else crc32(self.text.encode())

    def renewed(self) -> WorkerState:
        """Return the position at which the next epoch begins, if this is the end of an epoch."""
        return WorkerState.of(next_epoch_state(self.stages))


@dataclass(frozen=True)
class Checkpoint:
    """The state of an epoch on one rank, or on all ranks.

    Attributes:
        stages: descriptions of the pipeline's stages, the last one first.
        epoch: the epoch, with its seeds.
        instance: the rank, and its number of workers.
        parts: the position from which each worker resumes.
        is_over: whether the epoch has ended.
        next_worker: the worker that yields the next item.
        is_of_all_ranks: whether all ranks share this state; the number of its rank is then 0.
        is_of_worker: whether this is the state of a single worker of the rank; ``parts`` then has one element.
        is_drained: whether the epoch is over because the pipeline in the main process has ended, although the loader
            may hold its last items.
        phases: the history of the run: records of its phases, see `wds_datapipes.index.order.phase`, and of the
            samples that it excludes, see `Exclusions.extend`.
    """

    stages: list[str]
    epoch: Epoch
    instance: Instance
    parts: list[WorkerState]
    is_over: bool = False
    next_worker: int = 0
    is_of_all_ranks: bool = False
    is_of_worker: bool = False
    is_drained: bool = False
    phases: list[dict[str, Any]] = field(default_factory=list)

    def on(self, rank: Instance, **changes: Any) -> Checkpoint:
        """Return the state with other values, as that of a rank and its workers."""
        return replace(self, instance=rank, is_of_all_ranks=False, **changes)

    def is_of(self, rank: Instance) -> bool:
        """Whether this is the state of a rank among as many ranks, with as many workers, or of all of them."""
        own = self.instance
        is_rank = self.is_of_all_ranks or own.rank == rank.rank
        return is_rank and (own.ranks, own.workers) == (rank.ranks, rank.workers)

    @property
    def owner(self) -> str:
        """The rank or ranks that the state belongs to, in words."""
        rank, ranks = self.instance.rank, self.instance.ranks
        return f"all of {ranks} ranks" if self.is_of_all_ranks else f"rank {rank} of {ranks}"

    def of_all_ranks(self) -> Checkpoint:
        """Return the state as one that all ranks share."""
        return replace(self, instance=replace(self.instance, rank=0), is_of_all_ranks=True)

    def on_rank(self, rank: int) -> Checkpoint:
        """Return the state as that of one rank, if all ranks share it."""
        return self.on(replace(self.instance, rank=rank)) if self.is_of_all_ranks else self

    def instances(self) -> list[Instance]:
        """Return the instance to which each of ``parts`` belongs."""
        workers = max(self.instance.workers, 1)
        if self.is_of_worker:
            return [self.instance]
        return [self.instance.on_worker(number, workers) for number in range(workers)]

    def part_of(self, process: int) -> tuple[int, WorkerState]:
        """Return the number of the worker that a process of a loader resumes, and the worker's state."""
        if self.is_of_worker:
            return self.instance.worker, self.parts[0]
        # The loader starts with its process 0, but the epoch resumes with the worker that yields the next item.
        number = (process + self.next_worker) % len(self.parts)
        return number, self.parts[number]

    def ended(self) -> Checkpoint:
        """Return the state in which this epoch is over, so that the next one follows."""
        return replace(self, is_over=True, is_drained=False, parts=[part.renewed() for part in self.parts])

    def check_parts(self) -> None:
        """Check that there is a state for each worker.

        Raises:
            StateError: the state is corrupt.
        """
        workers = self.instance.workers
        if not self.is_over and len(self.parts) != (1 if self.is_of_worker else max(workers, 1)):
            raise StateError(f"This state is corrupt: it has {len(self.parts)} states of {workers} workers")

    def check_run(self, seed: int, worker: Instance | None) -> None:
        """Check that a `StatefulShards` can resume from this state.

        Args:
            seed: the seed of its first epoch.
            worker: the instance of this process, if it is a worker.

        Raises:
            StateError: the state was saved with another seed, or belongs to another worker.
        """
        if self.epoch.next is not None and self.epoch.first != seed:
            raise StateError(
                f"The state was saved with seed {self.epoch.first}, but the seed here is {seed}. Pass StatefulShards "
                "the seed of the loader that saved the state"
            )
        if self.is_of_worker and (worker is None or not self.is_of(worker)):
            raise StateError(
                f"This is the state of one worker, {self.instance.worker} of {self.instance.workers} on {self.owner}, "
                f"and only the same worker can resume from it. Load the whole state of the loader. {ADVICE}"
            )

    def log_replay(self, reason: str) -> None:
        """Log how many items must be produced again, if the pipeline resumes by replay.

        Args:
            reason: the reason for the replay.
        """
        stages = [stage or {} for part in self.parts for stage in part.stages or ()]
        count = sum(stage.get("replayed", 0) for stage in stages)
        if count and not self.is_over:
            logger.warning("Resuming by replay: %d items are produced again. %s", count, reason)


def is_all(numbers: Sequence[int | None], count: int) -> bool:
    """Whether sorted numbers are 0 to ``count - 1``; in a corrupt state, ``count`` may be any number."""
    return len(numbers) == count and [*numbers] == [*range(len(numbers))]


def state_of(checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Return the state that holds the checkpoints of some ranks."""
    lines = list[str]()
    for each in checkpoints:
        records = {"epoch": each.epoch.state_dict(), "instance": asdict(each.instance)}
        facts = {**vars(each), **records, "parts": len(each.parts)}
        lines += json.dumps(facts, separators=(",", ":")), *(part.text for part in each.parts)
    return {STATE: with_checksum(*lines)}


def state_of_stream() -> dict[str, str]:
    """Return the state of a worker that cannot know which part of its stream the loop will receive."""
    return {STATE: with_checksum(STREAM)}


def with_checksum(*lines: str) -> str:
    """Return the text of a state from all of its lines but the first."""
    checksum = 0
    for line in lines:  # one by one, because they may take tens of megabytes
        checksum = crc32(f"\n{line}".encode(), checksum)
    return "\n".join([f'{{"version":{VERSION},"crc32":{checksum}}}', *lines])


@refusing_corrupt_states()
def checkpoints_in(state: Any) -> list[Checkpoint]:
    """Return the checkpoints in a state, one per rank.

    Args:
        state: the state of a ``DataLoader2``, a ``StatefulDataLoader``, a `ShardReadingService` or a `StatefulShards`;
            or the result of `merge_states`; or the text of a state.

    Raises:
        StateError: it contains no checkpoint.
    """
    found = _find_checkpoints(state)
    if not found:
        raise StateError("This is not the state of a loader: it contains no ranks")
    return found


def _find_checkpoints(state: Any) -> list[Checkpoint]:
    if isinstance(state, bytes | str):
        return _decode(state)
    if not isinstance(state, Mapping):
        raise StateError(f"This is not the state of a loader, a dictionary with the key {STATE!r}: {state!r:.100}")
    if STATE in state:
        # A run that loads the state of an earlier run holds none of that run's items.
        return [replace(checkpoint, is_drained=False) for checkpoint in _decode(state[STATE])]
    if "_snapshot" in state:
        return [_of_workers(state)]
    if "dataset_state" in state:
        # The loader may end the loop before it has yielded the last items of its dataset.
        ends = bool(state["_iterator_finished"])
        found = _of_dataset(state)
        return [
            replace(each, is_over=each.is_over and (ends or not each.is_drained), is_drained=False) for each in found
        ]
    if inner := [state[key] for key in NODES if key in state]:
        if state.get("steps_since_snapshot") or state.get("batch_idx"):
            raise StateError(
                "This state of torchdata.nodes was saved some items after the position of its source, so only the "
                "same nodes can resume from it. Save it with snapshot_frequency=1, and without Unbatcher"
            )
        return _find_checkpoints(inner[0])
    if PICKLE in state:
        raise StateError(
            "This is a state of torchdata: a pickled pipeline, but no position of the loop in the epoch. Save the "
            "state of a DataLoader2 with ShardReadingService, which contains the position"
        )
    keys = ", ".join(map(repr, state)) or "none"
    raise StateError(f"This is not the state of a loader, which has the key {STATE!r}; its keys: {keys:.200}")


def _decode(text: Any) -> list[Checkpoint]:
    """Return the checkpoints in the text of a state."""
    try:
        first, end, lines = (text.decode() if isinstance(text, bytes) else text).partition("\n")
        found = json.loads(first)
        version = found["version"]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"This is not the state of a loader, a JSON text with its version: {error}") from None
    if version != VERSION:
        raise StateError(
            f"This state has version {version}, but this release of wds-datapipes reads only version {VERSION}. Load "
            "it with the release that saved it, or restart the epoch"
        )
    if found.get("crc32") != crc32(lines.encode(), crc32(end.encode())):
        raise StateError("This state of a loader is corrupt: its checksum differs. Load another one")
    if lines == STREAM:
        raise StateError(
            "A StatefulDataLoader cannot determine the position of a pipeline that with_epoch cuts into epochs. Loop "
            "over data.tracked(loader), and save and load the dataset: data.state_dict(), data.load_state_dict(state)"
        )
    rest, checkpoints = iter(lines.splitlines()), list[Checkpoint]()
    for line in rest:
        facts = json.loads(line)
        parts = [*map(WorkerState, islice(rest, facts["parts"]))]
        if len(parts) != facts["parts"]:
            raise ValueError(f"{facts['parts']} workers, but {len(parts)} states")
        records = {"epoch": Epoch.from_state(facts["epoch"]), "instance": Instance(**facts["instance"])}
        checkpoints.append(Checkpoint(**{**facts, **records, "parts": parts}))
    return checkpoints


def _of_workers(state: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint in the state of a ``StatefulDataLoader`` with workers."""
    if state["_steps_since_snapshot"]:
        raise StateError(
            "This state of a StatefulDataLoader contains the positions of its workers "
            f"{plural(state['_steps_since_snapshot'], 'step')} before it was saved, and only a StatefulDataLoader can "
            "repeat what followed. To load it elsewhere, save it with snapshot_every_n_steps=1"
        )
    snapshot = state["_snapshot"]
    found = snapshot["_worker_snapshots"]
    workers = [_of_dataset(found[f"worker_{number}"])[0] for number in range(len(found))]
    own = sorted(workers, key=lambda each: each.instance.worker)
    count, numbers = own[0].instance.workers, [each.instance.worker for each in own if each.is_of_worker]
    if not is_all(numbers, count):
        raise StateError(
            f"This state of a StatefulDataLoader is incomplete: it belongs to {count} workers, and contains the states "
            f"of these: {', '.join(map(str, numbers)) or 'none'}"
        )
    # In a resumed epoch, the numbers of processes may differ from those of their workers.
    turn = workers[(snapshot["_last_yielded_worker_id"] + 1) % len(workers)].instance.worker
    one = next((each for each in own if not each.is_of_all_ranks), own[0])
    return replace(
        own[0],
        instance=one.instance.on_worker(0, count),
        is_of_all_ranks=one.is_of_all_ranks,
        is_of_worker=False,
        next_worker=turn,
        parts=[part for each in own for part in each.parts],
        is_over=bool(state["_iterator_finished"]),
    )


def _of_dataset(state: Mapping[str, Any]) -> list[Checkpoint]:
    """Return the checkpoints in the dataset's state within that of a ``StatefulDataLoader``.

    Raises:
        StateError: the dataset is not a `StatefulShards`.
    """
    found = state.get("dataset_state")
    if not isinstance(found, Mapping) or STATE not in found:
        raise StateError("This is the state of a StatefulDataLoader whose dataset is not a StatefulShards")
    return _decode(found[STATE])
