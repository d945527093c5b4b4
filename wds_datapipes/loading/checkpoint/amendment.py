"""Comparison of a state with a pipeline: they must match, or the pipeline amends the run from this step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import OF_RANK, Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.resharding import check_complete, place_of
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.state.description import FREE, difference, run_source
from wds_datapipes.pipes.state.pipeline_state import refusing_corrupt_states

#: The maximum length of the description of a changed stage in the record of a phase, in characters.
SHOWN = 100


def begin_run(pipe: Any) -> list[dict[str, Any]]:
    """Return the history of a run that begins with a pipeline: the records of its first phase and of its exclusions."""
    if (source := run_source(pipe)) is not None:
        source.load_phases([])
    return _with_exclusions(pipe, [] if source is None else [source.first_phase()], 0, 0)


def _with_exclusions(pipe: Any, phases: list[dict[str, Any]], epoch: int, position: int) -> list[dict[str, Any]]:
    """Return the history of a run from which the pipeline excludes samples, from a position on.

    Raises:
        StateError: previously excluded samples return.
    """
    sources = dict.fromkeys(filter(None, (declared(stage).phased_source() for stage in graph_of(pipe).stages)))
    found = [source.exclusions for source in sources]
    return found[0].together(found[1:]).extend(phases, epoch, position) if found else phases


@refusing_corrupt_states()
def adopt(
    loaded: Sequence[Checkpoint], pipe: Any, stages: Sequence[str], ranks: int | None = None, *, amend: bool = False
) -> list[Checkpoint]:
    """Return the checkpoints from which a pipeline resumes, and pass the history of the run to its source.

    If the number of ranks has changed, the batch size may change, too: the rest of an epoch consists of samples,
    however they are batched.

    Args:
        loaded: the checkpoints of a state.
        pipe: the pipeline.
        stages: descriptions of its stages, the last one first.
        ranks: the current number of ranks; ``None`` if it is not known yet and is checked later.
        amend: whether to begin a new phase of the run if the pipeline differs from the one that saved the state in ways
            that affect no position.

    Raises:
        StateError: it is the state of a different pipeline.
    """
    for checkpoint in loaded:
        checkpoint.check_parts()
    if not any(each.stages for each in loaded):  # they were saved before a pipeline started
        return [*loaded]
    adopted = _compare(loaded, pipe, stages, ranks, amend=amend)
    phases = _with_exclusions(pipe, adopted[0].phases, *place_of(adopted, run_source(pipe))[:2])
    return [each if each.is_of_worker else replace(each, phases=phases) for each in adopted]


def _compare(
    loaded: Sequence[Checkpoint], pipe: Any, stages: Sequence[str], ranks: int | None, *, amend: bool
) -> Sequence[Checkpoint]:
    first = next(each for each in loaded if each.stages)
    if (source := run_source(pipe)) is not None:
        source.load_phases(first.phases, first.epoch)
    known, own = [*first.stages], [*stages]
    if ranks != first.instance.ranks:  # the sizes of batches may differ
        known, own = ([OF_RANK.sub("", each) for each in some] for some in (known, own))
    if not (pairs := [*_differences(known, own)]):
        return loaded
    text = "; ".join(f"stage {number} {difference(*pair)}" for number, *pair in pairs)
    text = f"The state was saved with a different pipeline. Counted from the end, {text}"
    is_fixed = _fixed(known) != _fixed(own)
    if is_fixed or not amend:
        change = "" if is_fixed else ", change the run from here on with load_state_dict(state, amend=True)"
        raise StateError(
            f"{text}. Load it into the pipeline that it was saved with{change}, or remove the checkpoint to start over"
        )
    if any(each.is_of_worker for each in loaded):
        raise StateError("This is the state of one worker. Amend the run with the whole state of the loader")
    changes = [(now or f"without {was}").replace(FREE, "")[:SHOWN] for _, was, now in pairs if now != own[-1]]
    return _amended(loaded, source, stages, changes)


def _differences(saved: Sequence[str], own: Sequence[str]) -> Iterator[tuple[int, str | None, str | None]]:
    """Yield the numbers of stages that differ, with their descriptions in the state and in this pipeline."""
    for kind, start, end, own_start, own_end in SequenceMatcher(None, saved, own, autojunk=False).get_opcodes():
        if kind != "equal":
            for number, pair in enumerate(zip_longest(saved[start:end], own[own_start:own_end]), own_start):
                yield number, *pair


def _fixed(stages: Sequence[str]) -> list[str]:
    """Return the parts of the descriptions on which positions depend."""
    return [part for each in stages if (part := each.partition(FREE)[0])]


def _amended(
    loaded: Sequence[Checkpoint], source: Any, stages: Sequence[str], changes: list[str]
) -> Sequence[Checkpoint]:
    """Return checkpoints that begin a new phase with a changed pipeline."""
    first, (epoch, position, rest) = loaded[0], place_of(loaded, source)
    if rest is not None:
        check_complete(loaded)
    record = {"epoch": epoch} if source is None else source.begin_phase(first.phases, epoch, position)
    phases = [*first.phases, {**record, **({"changes": changes} if changes else {})}]
    if source is not None:
        source.load_phases(phases, replace(first.epoch, number=epoch))
    loaded = [replace(each, stages=[*stages], phases=phases) for each in loaded]
    if rest is None or "start" not in record:
        return loaded
    if position:  # its batches may have another size
        rest["rest"]["end"] = source.timeline.end_of(epoch)

    def rest_of(part: WorkerState) -> WorkerState:
        return WorkerState.of([rest, *(part.stages or [None])[1:]])

    return [replace(each, next_worker=0, parts=[*map(rest_of, each.parts)]) for each in loaded]
