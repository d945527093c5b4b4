"""Splitting a pipeline between ranks and workers: the splitting stages, and the share of this instance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from wds_datapipes.datapipes import SHARDING_PRIORITIES, IterDataPipe
from wds_datapipes.errors import StateError, plural
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.groups import Groups, groups_of, part_in
from wds_datapipes.pipes.inspection import attribute_of, call_of, count_yielded, name_of, sources_of
from wds_datapipes.pipes.instance import instance_in
from wds_datapipes.pipes.roles import Splitter
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.user_warnings import warn_user

Pipe = IterDataPipe[Any]
T_co = TypeVar("T_co", covariant=True)


class SplittingStage(Splitter, EngineStage[T_co]):
    """Base class of stages that themselves split the data between ranks and workers."""

    groups: Groups

    def apply_sharding(
        self, num_of_instances: int, instance_id: int, sharding_group: SHARDING_PRIORITIES = SHARDING_PRIORITIES.DEFAULT
    ) -> None:
        """Set the rank or the worker; loaders call this.

        Args:
            num_of_instances: the number of ranks or workers.
            instance_id: the index of this rank or worker.
            sharding_group: the group of ranks or of workers, or ``DEFAULT`` for both at once.

        Raises:
            ValueError: ``instance_id`` is out of range.
            RuntimeError: ``DEFAULT`` is mixed with the other groups.
        """
        if not 0 <= instance_id < num_of_instances:
            raise ValueError(f"{name_of(self)} cannot be instance {instance_id} of {num_of_instances}")
        default = SHARDING_PRIORITIES.DEFAULT
        if self.groups and (sharding_group == default) != (default in self.groups):
            raise RuntimeError(f"{name_of(self)} cannot mix DEFAULT and other sharding groups")
        self.groups[sharding_group] = (num_of_instances, instance_id)


def number_instances(pipe: Any) -> None:
    """Number the instances of every ``.sharding_filter()`` as torch's ``DataLoader`` does; see `Instance.number`.

    If ranks and workers are set separately, torch numbers all workers of rank 0 first. The rotation of
    `rotate_assignments` is kept.
    """
    for splitter in graph_of(pipe).splitters:
        declared(splitter).number_instances()


#: The calls of stages that take batches apart.
UNBATCHING = frozenset({".unbatch()", ".unbatch_samples()"})


def check_batch_sizes(pipe: Any, ranks: int, loader_size: int | None = None) -> None:
    """Check that each item of a loop is the part of its rank in a global batch, if the source declares its size.

    Args:
        pipe: the whole pipeline.
        ranks: the number of ranks that share the data.
        loader_size: the number of items that the loader combines into one; None if it is unknown.

    Raises:
        ValueError: the sizes do not match. If a stage between them may drop or add samples, or the loader may combine
            batches, this is only a warning.
    """
    size, is_sure, stage = loader_size or 1, True, pipe
    calls = [f"batch_size={size} of the loader"] if size > 1 else []
    while (source := declared(stage).phased_source()) is None:
        known, sources = declared(stage), list(sources_of(stage))
        samples = known.count_in_batch() or (known.combines_samples and attribute_of(stage, "batch_size"))
        if len(sources) != 1 or (known.combines_samples and not samples) or call_of(stage) in UNBATCHING:
            return
        if samples:
            calls.insert(0, call_of(stage).replace("()", f"({samples})"))
            size *= samples
        is_sure &= known.is_one_to_one or bool(known.count_in_batch())
        stage = sources[0]
    if (whole := source.global_batch_size) is None:
        return
    if calls and source.unit == "row" and stage is source:
        raise ValueError(
            f"{name_of(source)} plans rows of several samples, but {' and '.join(calls)} after it makes batches of "
            "samples. Put .pack_rows() in between"
        )
    ranks = max(ranks, instance_in(groups_of(source) or {}).ranks)  # the user may have split it
    share = whole // ranks
    if not calls or whole % ranks or size == share:
        return  # the source itself rejects a batch that the ranks cannot share
    accumulated = f"; or, to accumulate gradients, .batch({size}).batch({share // size})" if not share % size else ""
    message = (
        f"{name_of(source)} has a global_batch_size of {whole}, which is {plural(share, source.unit)} per rank "
        f"({plural(ranks, 'rank')}), but {' and '.join(calls)} after it makes batches of {size}. Pass .batch({share}), "
        f"or global_batch_size={size * ranks}{accumulated}"
    )
    if is_sure and (loader_size is not None or share % size):
        raise ValueError(message)
    warn_user(message)


def rotate_assignments(pipe: Any, turn: int) -> None:
    """Rotate the assignment: each instance gets the share of the instance whose number is higher by ``turn``.

    Stages that restart their source rotate the assignment by one in each pass. Each pass is still complete, and an
    instance without data in one pass, because its shards are empty or there are fewer shards than workers, gets the
    data of other instances in later passes.

    Args:
        pipe: the source of such a stage. Stages before it that count their own passes start from this rotation.
        turn: the rotation.
    """
    graph = graph_of(pipe)
    for stage in _rotating_stages(graph):
        declared(stage).rotate_assignment(turn, graph.at(stage).stages)


def rotation_period(pipe: Any) -> int:
    """Return the number of passes in which an instance gets every share once; 1 if the data is not split."""
    rotating = (stage for stage in _rotating_stages(pipe) if isinstance(declared(stage), Splitter))
    return max((part_in(groups_of(stage) or {})[0] for stage in rotating), default=1)


def _rotating_stages(pipe: Any) -> Iterator[Any]:
    """Yield a stage and those before it, except for stages whose items belong to the same instance in all passes."""
    fixed, graph = set[int](), graph_of(pipe)
    for stage in graph.stages:
        if id(stage) not in fixed:
            if declared(stage).keeps_share():
                fixed.update(map(id, graph.at(stage).stages))
            else:
                yield stage


def has_no_shards(pipe: Any) -> bool:
    """Whether a stage with a fixed assignment had nothing to assign to this instance."""
    graph = graph_of(pipe)
    rotating = {id(stage) for stage in _rotating_stages(graph) if isinstance(declared(stage), Splitter)}
    return any(
        not _has_yielded(splitter) and any(map(_has_yielded, graph.sources_of(splitter)))
        for splitter in graph.splitters
        if id(splitter) not in rotating
    )


def refuse_remote(pipe: Any, what: str) -> None:
    """Raise an error if only the loader can restart a source, because its items come from another process.

    Args:
        pipe: the source.
        what: the stage that would restart it, for the message.

    Raises:
        RuntimeError: the source is remote.
    """
    for stage in graph_of(pipe).stages:
        if declared(stage).process_boundary == "remote":
            raise RuntimeError(
                f"{what} must be able to restart its source at any time, but its source is in another process, which "
                "restarts only when the loader starts an epoch. Put this stage before the one that stays in the main "
                "process."
            )


def unsplit(pipe: Any) -> Any:
    """Return a copy of a stage that reads the whole list of shards, before the split.

    Raises:
        StateError: the stage is neither a ``.sharding_filter()`` nor a ``.map()`` after one.
    """
    found = declared(pipe).unsplit()
    if found is None:
        raise StateError(
            f"Resuming with a different number of ranks or workers requires the list of shards before the split, but "
            f"they are read from {type(pipe).__name__}. Put .sharding_filter() directly before .load_wds_shards()"
        )
    return found


def _has_yielded(stage: Any) -> bool:
    """Whether a stage has ever yielded an item, by torch's counter."""
    return not isinstance(stage, IterDataPipe) or count_yielded(stage) > 0
