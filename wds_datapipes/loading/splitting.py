"""Which shards or samples a rank and a worker get, and the data-parallel group of a rank.

A stage that splits a list gives instance i of n every n-th item, beginning with item i, where i is `Instance.number`.
Stages that split in another way do so themselves: `IndexedSamples` by a `BatchShare`, and `DirectoryShards` by a lock
for each shard.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wds_datapipes.datapipes import SHARDING_PRIORITIES, IterDataPipe
from wds_datapipes.errors import plural
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.groups import groups_of
from wds_datapipes.pipes.inspection import call_of
from wds_datapipes.pipes.instance import own_rank
from wds_datapipes.pipes.sharding import number_instances
from wds_datapipes.types import ALONE, Instance
from wds_datapipes.user_warnings import callers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def split_by_rank(pipe: Any, instance: Instance) -> Any:
    """Assign a rank its share of the data."""
    graph = graph_of(pipe)
    _split(graph, instance.ranks, instance.rank, SHARDING_PRIORITIES.DISTRIBUTED)
    return graph.pipe


def split_by_worker(pipe: Any, instance: Instance) -> Any:
    """Assign a worker its share of the data of its rank.

    Stages whose ``apply_sharding`` takes no sharding group are split between all workers of all ranks, because only the
    last split counts for them.
    """
    graph = graph_of(pipe)
    _split(graph, max(instance.workers, 1), instance.worker, SHARDING_PRIORITIES.MULTIPROCESSING)
    number_instances(graph)
    for splitter in graph.splitters if instance.ranks > 1 else ():
        if not _takes_group(splitter):
            splitter.apply_sharding(instance.count, instance.number)
    return graph.pipe


def _split(graph: PipelineGraph, count: int, number: int, group: SHARDING_PRIORITIES) -> None:
    """Assign an instance its share of the data, as torch's ``apply_sharding`` does.

    Raises:
        RuntimeError: data that one stage has split would be split again by another one.
    """
    for splitter in graph.splitters:
        before = graph.at(splitter)
        if any(declared(stage).process_boundary == "remote" for stage in before.stages):
            continue  # its items were already split between the workers
        splitter.apply_sharding(count, number, **({"sharding_group": group} if _takes_group(splitter) else {}))
        if others := [each for each in before.splitters if each is not splitter]:
            names = f"{call_of(splitter)} comes after {call_of(others[0])}"
            raise RuntimeError(f"Sharding twice would lose data: {names}, which splits it already. Remove one of them")


def _takes_group(splitter: Any) -> bool:
    """Whether a stage that splits the data knows ranks from workers; the same check as in torch."""
    return len(inspect.signature(splitter.apply_sharding).parameters) >= 3


SPLIT_TWICE = (
    "StatefulShards assigns each rank its share of the data. accelerate or the Trainer would split this share again "
    "and skip most samples. Do not pass the loader to accelerator.prepare(), and move batches to the device in the "
    "loop; or pass the pipeline to DataLoader2 with a ShardReadingService"
)


def has_own_stage(data: Any) -> bool:
    """Whether a dataset is a pipeline with a stage of this package."""
    return isinstance(data, IterDataPipe) and any(
        type(stage).__module__.partition(".")[0] == "wds_datapipes" for stage in graph_of(data).stages
    )


def is_split_by_rank(pipe: Any) -> bool:
    """Whether the program, or torchdata's ``DistributedReadingService``, has already assigned this rank its share."""
    graph = graph_of(pipe)
    return given_rank(graph) != ALONE or any(map(groups_of, graph.splitters))


def advice_for_torchrun() -> str:
    """Return advice if torchrun has started several ranks, but torch knows only one; otherwise ""."""
    started = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if started == "1" or ranks_of_run() > 1:
        return ""
    return (
        f"torchrun has started {started} ranks, but torch.distributed.init_process_group has not been called, so each "
        "rank reads all of the data. Call it before you create the loader, which then splits the data between ranks; "
        "distributed=False declares that the list belongs to this rank alone"
    )


def is_called_by_accelerate() -> bool:
    """Whether the caller was called by accelerate, whose loaders set the epoch of their dataset."""
    _, caller, *_ = callers()
    return str(caller.f_globals.get("__name__")).partition(".")[0] == "accelerate"


def given_rank(pipe: Any) -> Instance:
    """Return the rank that torchdata's ``DistributedReadingService`` has assigned to a pipeline."""
    is_given = ranks_of_run() > 1 and any(
        declared(stage).process_boundary == "ranks" for stage in graph_of(pipe).stages
    )
    return own_rank() if is_given else ALONE


def ranks_of_run() -> int:
    """Return the number of ranks of the run that torch knows of in this process."""
    return own_rank().ranks


Distributed: TypeAlias = "bool | ProcessGroup | DeviceMesh | tuple[int, int] | None"
"""The data-parallel group that an argument ``distributed`` describes; see `DataParallelGroup.of`."""


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


@dataclass(frozen=True)
class DataParallelGroup:
    """The ranks that share the data, and the rank of this process among them.

    It holds numbers instead of torch's group, because a group cannot be copied to a worker.

    Attributes:
        is_split: whether the data is split between ranks.
        given: this rank in the group; ``None`` means all ranks of the default process group, which may
            be initialized later.
        is_synchronized: whether all ranks of the default process group take part, so that they can agree on a seed.
            Otherwise, the program must pass the same seed to each rank.
    """

    is_split: bool = False
    given: Instance | None = None
    is_synchronized: bool = False

    @classmethod
    def of(cls, distributed: Distributed) -> DataParallelGroup:
        """Return the group that an argument ``distributed`` describes.

        Args:
            distributed: ``True`` for all ranks of the default process group; a process group, or a mesh with one
                dimension; the pair ``(rank, world_size)``; ``False`` or ``None`` for this process alone.

        Raises:
            TypeError: it is none of these.
            ValueError: the mesh has several dimensions, the rank is out of range, or this process is not in the group.

        Examples:
            >>> DataParallelGroup.of((1, 4)).rank
            Instance(rank=1, ranks=4, worker=0, workers=1)
        """
        if distributed is None or isinstance(distributed, bool):
            return cls(is_split=distributed is True, is_synchronized=distributed is True)
        if isinstance(distributed, tuple):
            return cls(is_split=True, given=_rank_of_pair(distributed))
        if isinstance(distributed, DeviceMesh):
            if distributed.ndim != 1:
                raise ValueError(
                    f"distributed must be a DeviceMesh with one dimension, but this one has {distributed.ndim}: "
                    f"{distributed.mesh_dim_names}. Pass the data-parallel dimension, such as mesh['dp']; flatten "
                    f"several into one"
                )
            ranks, rank = distributed.size(), (distributed.get_coordinate() or [-1])[0]
        elif dist.is_available() and isinstance(distributed, dist.ProcessGroup):
            ranks, rank = distributed.size(), distributed.rank()
        elif dist.is_available() and distributed == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            ranks, rank = 0, -1
        else:
            raise TypeError(
                "distributed must be True, False, None, a ProcessGroup, a DeviceMesh with one dimension or the pair "
                f"(rank, world_size), not {distributed!r}"
            )
        if rank < 0:
            raise ValueError(
                f"Rank {dist.get_rank()} is not in the process group or mesh that was passed as distributed. Pass the "
                f"data-parallel group that it belongs to. If only some ranks load data, pass the pair (rank, "
                f"world_size) on those"
            )
        return cls(is_split=True, given=Instance(rank, ranks), is_synchronized=True)

    @property
    def is_known(self) -> bool:
        """Whether this rank and the number of ranks are known already."""
        return not self.is_split or self.given is not None or (dist.is_available() and dist.is_initialized())

    @property
    def rank(self) -> Instance:
        """This rank among those that share the data; the only one if that is not known yet."""
        if not (self.is_split and self.is_known):
            return ALONE
        return self.given or own_rank()

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks of the default process group read the same data, as far as this process can know."""
        return self.is_split and self.is_known and self.rank.ranks < ranks_of_run()


def _rank_of_pair(pair: tuple[Any, ...]) -> Instance:
    """Return the rank described by a pair ``(rank, world_size)``."""
    if len(pair) != 2 or not all(isinstance(number, Integral) and not isinstance(number, bool) for number in pair):
        raise TypeError(f"distributed must be a pair of integers, (rank, world_size), not {pair!r}")
    rank, ranks = map(int, pair)
    if not 0 <= rank < ranks:
        raise ValueError(
            f"distributed={pair!r} is the pair (rank, world_size), whose rank must be from 0 to world_size - 1"
        )
    return Instance(rank, ranks)


def check_replicated(pipe: Any, group: DataParallelGroup) -> None:
    """Check that the pipeline lets several ranks read the same data, if the group requires it.

    Raises:
        ValueError: a stage gives each shard to one process.
    """
    if group.is_replicated and any(declared(stage).shard_access == "claimed" for stage in graph_of(pipe).stages):
        raise ValueError(
            f"{ranks_of_run()} ranks share the data between {group.rank.ranks}, so some must read the same, but "
            "DirectoryShards gives each shard to one process. List the shards with ShardList"
        )


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
