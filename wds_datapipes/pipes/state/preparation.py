"""What a loader inserts into a pipeline and adapts at the beginning of an epoch: in this pipeline, and in no class."""

from __future__ import annotations

from typing import Any

from wds_datapipes.counters import Counters
from wds_datapipes.pipes.foreign_calls import adapt_stage
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.state.empty_passes import watch_empty_passes
from wds_datapipes.pipes.state.shard_order import guard_listings


def prepare_stages(
    graph: PipelineGraph, seed: int, counters: Counters | None = None, whole: Any = None
) -> PipelineGraph:
    """Prepare the stages of a pipeline for an epoch: guard its lists, adapt its stages, and watch for empty passes.

    Args:
        graph: the pipeline.
        seed: the seed of the epoch, which all workers and ranks share.
        counters: the counters of all stages; by default, each keeps its own.
        whole: the pipeline with the stages that come after it in this process, if there are any.

    Returns:
        PipelineGraph: that of the pipeline with what was inserted.
    """
    graph = guard_listings(graph, seed)
    for each in (graph, *([] if whole is None else [PipelineGraph(whole)])):
        adapt_stages(each)
    if counters is not None:
        graph.share_counters(counters)
    return graph


def adapt_stages(pipe: Any) -> None:
    """Adapt the stages of other packages, which are then faster and say why they fail, and watch for empty passes.

    Args:
        pipe: the last stage, or the graph of the pipeline.
    """
    graph = graph_of(pipe)
    for stage in graph.stages:
        adapt_stage(stage)
    watch_empty_passes(graph)
