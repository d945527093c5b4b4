"""Advice on how the data of a pipeline is split: processes that read the same data, or none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from operator import methodcaller
from typing import Any

from torch.utils.data import get_worker_info

from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import plural
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.groups import groups_of
from wds_datapipes.pipes.inspection import attribute_of, call_of, name_of, sources_of, splits
from wds_datapipes.pipes.instance import own_rank
from wds_datapipes.user_warnings import callers, warn_user

LOGGER = logging.getLogger("wds_datapipes")
#: Whether this worker process of torch's ``DataLoader`` has logged idle processes; it has one pipeline.
_logged: list[bool] = []


def advice_for_split(
    pipe: Any, *, workers: int, ranks: int, knows_workers: bool = False, dispatches: bool = False
) -> str:
    """Return advice on a pipeline that several processes run without splitting the data; otherwise "".

    Streams with ``.with_epoch()`` are exempt, because each process may draw from all data.

    Args:
        pipe: the last stage.
        workers: the number of processes that run it on each rank.
        ranks: the number of ranks that share the data.
        knows_workers: whether a source may get its worker from torch and split the data itself.
        dispatches: whether one process of each rank runs the stages before ``.sharding_round_robin_dispatch()``.
    """
    for source, instances in _unsplit_sources(pipe, workers * ranks, ranks if dispatches else workers * ranks):
        is_users = type(source).__module__.partition(".")[0] not in ("torch", "torchdata", "wds_datapipes")
        if instances > 1 and not (knows_workers and is_users):
            counts = {"ranks": ranks, "workers": instances // ranks}
            readers = " and ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
            return (
                f"{readers} read all of {name_of(source)}, because no stage splits it: each sample is yielded "
                f"{instances} times per epoch. Put .sharding_filter() after the list of shards and its .shuffle(), "
                "before .load_wds_shards(); or draw shards with .resample_wds_shards(), and end epochs with "
                ".with_epoch(n)"
            )
    return ""


def log_idle_processes(pipe: Any, *, workers: int, ranks: int) -> None:
    """Log that there are fewer shards than processes, so that some of these read nothing.

    A stage that restarts its source is exempt, because it gives each process the share of another one in its next pass;
    so is a source that splits samples, as by index.

    Args:
        pipe: the last stage.
        workers: the number of processes that run it on each rank.
        ranks: the number of ranks that share the data.
    """
    graph = graph_of(pipe)
    restarted = [branch for stage in graph.stages for branch in declared(stage).nested_sources()]
    dispatched = [stage for stage in graph.stages if declared(stage).process_boundary == "dispatched"]
    exempt = {id(stage) for each in (*restarted, *dispatched) for stage in graph.at(each).stages}
    processes = workers * ranks
    for splitter in graph.splitters:
        shards = 0 if id(splitter) in exempt else _count_shards(graph.at(splitter))
        if 0 < shards < processes:
            LOGGER.warning(
                "%s splits %s between %d processes, which leaves %d of them without data. Use fewer workers, write "
                "smaller shards (wds-datapipes split), or read by index (IndexedSamples), which splits samples",
                call_of(splitter),
                plural(shards, "shard"),
                processes,
                processes - shards,
            )


def _count_shards(graph: PipelineGraph) -> int:
    """Return how many shards the last stage of a graph splits; 0 if it splits something else, or that is unknown."""
    before = [declared(stage) for stage in graph.stages[1:]]
    if any(map(methodcaller("known_list"), before)) and not any(map(methodcaller("declares_length"), before)):
        with suppress(Exception):  # of a stage that has no length
            return sum(map(len, graph.sources_of(graph.pipe)))
    return 0


def warn_of_copies(pipe: Any) -> None:
    """Warn if several workers or ranks of torch's ``DataLoader`` read all shards, or log that some read none.

    Args:
        pipe: the source of shards, before iteration.
    """
    found = graph_of(pipe).splitters
    info = get_worker_info()
    hidden = next((each for each in found if groups_of(each) == {}), None)
    if hidden is None:
        # The dataset is the whole pipeline, whose later stages may split.
        advice = ""
        if info is not None and info.id == 0 and isinstance(info.dataset, IterDataPipe):
            if not found:
                advice = advice_for_split(info.dataset, workers=info.num_workers, ranks=1, knows_workers=True)
            elif not _logged:
                _logged.append(True)
                log_idle_processes(info.dataset, workers=info.num_workers, ranks=own_rank().ranks)
        if advice:
            warn_user(advice)
        return
    splitter, ranks = call_of(hidden), own_rank().ranks
    workers = 1 if info is None else info.num_workers
    if info is not None and workers > 1:
        if info.id == 0:
            warn_user(
                f"Each of {workers} workers reads all shards, because the DataLoader did not find the "
                f"{splitter}: its dataset is a {type(info.dataset).__name__}, which wraps the pipeline. Pass "
                "the pipeline or StatefulShards(pipeline) to the DataLoader, and do not pass the loader to "
                "accelerator.prepare(), which wraps the pipeline in an IterableDatasetShard"
            )
    elif ranks > 1 and is_read_by_shard():
        warn_user(
            f"Each of {ranks} ranks reads all shards, in a different order, and takes every "
            f"{ranks}th item or batch, so samples are repeated on several ranks or missing on all: the "
            "DataLoader was passed to accelerator.prepare(), which wraps the pipeline in an IterableDatasetShard. Use "
            "StatefulShards(pipeline), which splits between ranks itself, and do not pass the loader to prepare()"
        )


def is_read_by_shard() -> bool:
    """Whether the caller is accelerate's or transformers' ``IterableDatasetShard``."""
    # Read only the locals of this function, because reading them keeps them alive.
    return any(
        frame.f_code.co_name == "__iter__" and type(frame.f_locals.get("self")).__name__ == "IterableDatasetShard"
        for frame in callers()
    )


def _unsplit_sources(pipe: Any, instances: int, dispatching: int) -> Iterator[tuple[Any, int]]:
    """Yield the sources that no stage splits, with the number of processes that read each.

    Args:
        pipe: the last stage.
        instances: the number of processes that run it.
        dispatching: the number of those that run the stages before ``.sharding_round_robin_dispatch()``.
    """
    seen, found = set[int](), [(pipe, instances)]
    while found:
        stage, readers = found.pop()
        known = declared(stage)
        is_remote = known.process_boundary == "remote"
        if id(stage) in seen or splits(stage) or known.spans_epochs or is_remote or not _is_replicated(stage):
            continue
        seen.add(id(stage))
        if known.process_boundary == "dispatched":
            readers = dispatching
        sources = [source for source in sources_of(stage) if isinstance(source, IterDataPipe)]
        if not sources:
            yield stage, readers
        found += [(source, readers) for source in reversed(sources)]


def _is_replicated(stage: Any) -> bool:
    """Whether workers may run a stage, rather than only the main process; torchdata uses the same check."""
    is_replicable = attribute_of(stage, "is_replicable")
    return not (callable(is_replicable) and not is_replicable() and not list(sources_of(stage)))
