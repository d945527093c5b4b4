"""The ranks that share the data, as an argument ``distributed`` describes them, and the ranks of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.instance import own_rank
from wds_datapipes.types import ALONE, Instance

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Distributed: TypeAlias = "bool | ProcessGroup | DeviceMesh | tuple[int, int] | None"
"""The data-parallel group that an argument ``distributed`` describes; see `DataParallelGroup.of`."""


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


def given_rank(pipe: Any) -> Instance:
    """Return the rank that torchdata's ``DistributedReadingService`` has assigned to a pipeline."""
    is_given = ranks_of_run() > 1 and any(
        declared(stage).process_boundary == "ranks" for stage in graph_of(pipe).stages
    )
    return own_rank() if is_given else ALONE


def ranks_of_run() -> int:
    """Return the number of ranks of the run that torch knows of in this process."""
    return own_rank().ranks


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
