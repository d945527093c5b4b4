"""Facts that must be equal on all ranks, such as the list of shards, and what to do if they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from wds_datapipes.errors import plural
from wds_datapipes.loading.data_parallel_group import DataParallelGroup
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of

Facts: TypeAlias = "Mapping[str, str]"
"""Facts that must be equal on all ranks, by name; each completes a message that begins with "Rank 0"."""

#: Why a difference between two ranks is an error, and how to fix it.
ADVICE = {
    "ranks": "On every rank, pass the data-parallel group of that rank as distributed",
    "seed": "Each rank shuffles the data differently before it takes its share, so some samples would be read twice "
    "and others never. Give every rank the same seed",
    "workers": "The data is split between the same number of processes on each rank, so some samples would be read "
    "twice and others never. Give every rank the same num_workers",
    "lists": "A list that the program has already split by rank would be split again, and most of it would never be "
    "read. Give all ranks the same list, in the same order, without urls[rank::ranks]; or let each rank read its own "
    "list with DataLoader2 and ShardReadingService(distributed=False)",
}


def facts_of(
    pipe: Any, group: DataParallelGroup, *, workers: int | None = None, seed: int | None = None
) -> dict[str, str]:
    """Return the facts that must be equal on all ranks.

    Args:
        pipe: the pipeline, before it is split.
        group: the ranks that share the data.
        workers: the number of processes that run it on this rank, if known.
        seed: the seed of this rank, unless the ranks agree on one.
    """
    graph = graph_of(pipe)
    lists = [
        f"{plural(len(urls), 'shard')} from {_name(urls[0])} #{digest(map(_name, urls))}" for urls in _lists(graph)
    ]
    facts = {
        "ranks": f"shares the data between {group.rank.ranks} ranks",
        "lists": f"lists {' and '.join(lists)}" if lists else "",
    }
    if group.is_replicated or graph.splitters:  # the ranks read from one order
        if workers is not None:
            facts["workers"] = f"reads with {workers} workers" if workers > 1 else "reads with one process"
        if seed is not None:
            facts |= fact_of_seed(seed)
    return facts


def fact_of_seed(seed: int) -> dict[str, str]:
    """Return the seed as a fact."""
    return {"seed": f"has the seed {seed}"}


def check_facts_match(rank: int, facts: Facts, other: int, others: Facts) -> None:
    """Check that two ranks have the same facts.

    Raises:
        RuntimeError: they differ.
    """
    for name, advice in ADVICE.items():
        own, found = facts.get(name), others.get(name)
        if own and found and own != found:
            raise RuntimeError(f"Rank {rank} {own}, and rank {other} {found}. {advice}")


def _lists(graph: PipelineGraph) -> list[Sequence[str]]:
    """Return the shard lists of the stages before the split, if they are known without reading."""
    before = {id(stage): stage for splitter in graph.splitters for stage in graph.at(splitter).stages}
    return [urls for stage in before.values() if (urls := declared(stage).known_list())]


def _name(url: str) -> str:
    """Return the name of a shard without its folder, because folders may differ between hosts."""
    return re.split("[?#]", url.rstrip("/"))[0].rpartition("/")[2]


def digest(texts: Iterable[str]) -> str:
    """Return a digest of some texts."""
    return blake2b("\n".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
