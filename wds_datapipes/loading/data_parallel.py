"""The data-parallel group of a process, as given by the argument ``distributed``, and what its ranks have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wds_datapipes.loading.splitting import ONLY_RANK, RankIdentity, ranks_of_run
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import splits, upstream
from wds_datapipes.pipes.sharding import splitters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Distributed: TypeAlias = "bool | ProcessGroup | DeviceMesh | tuple[int, int] | None"
"""The data-parallel group that an argument ``distributed`` describes; see `DataParallelGroup.of`."""


Facts: TypeAlias = "Mapping[str, Any]"
"""What must be equal on all ranks, by its name."""

NOT_IN_GROUP = (
    "Rank {} is not in the process group or mesh that was passed as distributed. Pass the data-parallel group that it "
    "belongs to. If only some ranks load data, pass the pair (rank, world_size) on those"
)


@dataclass(frozen=True)
class DataParallelGroup:
    """The ranks that share the data, and the place of this process among them.

    It holds numbers instead of torch's group, which could not be copied to a worker.

    Attributes:
        is_split: whether the data is split between ranks.
        given: the identity of this rank in the group; ``None`` for all ranks of the default process group, which may
            be initialized later.
        is_synchronized: whether all ranks of the default process group take part, and so can agree on a seed. Otherwise
            the program must give each rank the same seed.
    """

    is_split: bool = False
    given: RankIdentity | None = None
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
            >>> DataParallelGroup.of((1, 4)).identity
            RankIdentity(ranks=4, rank=1)
        """
        if distributed is None or isinstance(distributed, bool):
            return cls(is_split=distributed is True, is_synchronized=distributed is True)
        if isinstance(distributed, tuple):
            return cls(is_split=True, given=_identity_of_pair(distributed))
        if isinstance(distributed, DeviceMesh):
            return cls(is_split=True, given=_identity_in_mesh(distributed), is_synchronized=True)
        if dist.is_available():
            if isinstance(distributed, dist.ProcessGroup):
                identity = _identity_in(distributed.size(), distributed.rank())
                return cls(is_split=True, given=identity, is_synchronized=True)
            if distributed == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(NOT_IN_GROUP.format(dist.get_rank()))
        raise TypeError(
            "distributed must be True, False, None, a ProcessGroup, a DeviceMesh with one dimension or the pair (rank, "
            f"world_size), not {distributed!r}"
        )

    @property
    def is_known(self) -> bool:
        """Whether the identity of this rank is known already."""
        return not self.is_split or self.given is not None or (dist.is_available() and dist.is_initialized())

    @property
    def identity(self) -> RankIdentity:
        """The identity of this rank; that of the only rank, if it is not known yet."""
        if not (self.is_split and self.is_known):
            return ONLY_RANK
        return self.given or RankIdentity(dist.get_world_size(), dist.get_rank())

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks of the default process group read the same data, as far as it is known here."""
        return self.is_split and self.is_known and self.identity.ranks < ranks_of_run()


def _identity_of_pair(pair: tuple[Any, ...]) -> RankIdentity:
    """Return the identity that a pair ``(rank, world_size)`` describes."""
    if len(pair) != 2 or not all(isinstance(number, Integral) and not isinstance(number, bool) for number in pair):
        raise TypeError(f"distributed must be a pair of integers, (rank, world_size), not {pair!r}")
    rank, ranks = map(int, pair)
    if not 0 <= rank < ranks:
        raise ValueError(
            f"distributed={pair!r} is the pair (rank, world_size), whose rank must be from 0 to world_size - 1"
        )
    return RankIdentity(ranks, rank)


def _identity_in_mesh(mesh: DeviceMesh) -> RankIdentity:
    """Return the identity of this process in a mesh, which must have one dimension."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        example = f'mesh["{names[0] if names else "dp"}"]'
        raise ValueError(
            f"distributed must be a DeviceMesh with one dimension, but this one has {mesh.ndim}: "
            f"{', '.join(map(repr, names)) or 'without names'}. Pass the data-parallel dimension, such as {example}; "
            "flatten several into one"
        )
    coordinate = mesh.get_coordinate()
    return _identity_in(mesh.size(), -1 if coordinate is None else coordinate[0])


def _identity_in(ranks: int, rank: int) -> RankIdentity:
    """Return the identity of a rank in a group; its number is negative if it is not in it."""
    if rank < 0:
        raise ValueError(NOT_IN_GROUP.format(dist.get_rank()))
    return RankIdentity(ranks, rank)


def check_replicated(pipe: Any, group: DataParallelGroup) -> None:
    """Check that several ranks can read the same data, if they must.

    Raises:
        ValueError: a stage gives each shard to one process.
    """
    if group.is_replicated and any(declared(stage).claims_shards for stage in upstream(pipe)):
        raise ValueError(
            f"{ranks_of_run()} ranks share the data between {group.identity.ranks}, so some must read the same, but "
            "DirectoryShards gives each shard to one process. List the shards with ShardList"
        )


def facts_of(pipe: Any, workers: int, group: DataParallelGroup) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks.

    Args:
        pipe: the pipeline, before it is split.
        workers: the number of processes of this rank that run it.
        group: the ranks that share the data.
    """
    return {**facts_before_workers(pipe, group), **({"workers": max(workers, 1)} if _must_agree(pipe, group) else {})}


def facts_before_workers(pipe: Any, group: DataParallelGroup, seed: int | None = None) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks, other than the number of workers.

    Args:
        pipe: the pipeline, before it is split.
        group: the ranks that share the data.
        seed: the seed of this rank, unless the ranks agree on one.
    """
    facts = {"ranks": group.identity.ranks, "lists": [_summarize(urls) for urls in _lists(pipe)]}
    return {**facts, "seed": seed} if seed is not None and _must_agree(pipe, group) else facts


def _must_agree(pipe: Any, group: DataParallelGroup) -> bool:
    """Whether all ranks need the same seed and number of workers, as they read from one order."""
    return group.is_replicated or any(map(splits, upstream(pipe)))


def check_facts_match(rank: int, facts: Facts, other: int, others: Facts) -> None:
    """Check that two ranks have the same facts.

    Raises:
        RuntimeError: they differ.
    """
    if not (facts and others):
        return
    if (own := facts.get("ranks")) != (found := others.get("ranks")) and None not in (own, found):
        raise RuntimeError(
            f"Rank {rank} shares the data between {own} ranks, and rank {other} between {found}. On every rank, pass "
            "the data-parallel group of that rank as distributed"
        )
    if (own := facts.get("seed")) != (found := others.get("seed")) and None not in (own, found):
        raise RuntimeError(
            f"Rank {rank} has the seed {own}, and rank {other} the seed {found}. Each shuffles the data differently "
            "before it takes its share, so some samples would be read twice and others never. Give every rank the same "
            "seed"
        )
    if (own := facts.get("workers")) != (found := others.get("workers")) and None not in (own, found):
        raise RuntimeError(
            f"Rank {rank} reads with {_readers(own)}, and rank {other} with {_readers(found)}. The data is split "
            "between the same number of processes on each rank, so some samples would be read twice and others never. "
            "Give every rank the same num_workers"
        )
    for mine, theirs in zip(facts.get("lists", ()), others.get("lists", ()), strict=False):
        if mine != theirs:
            raise RuntimeError(
                f"Rank {rank} lists {_text(mine)}, and rank {other} lists {_text(theirs)}. A list that the program "
                "has already split by rank would be split again, and most of it would never be read. Give all ranks "
                "the same list, in the same order, without urls[rank::ranks]; or let each rank read its own list with "
                "DataLoader2 and ShardReadingService(distributed=False)"
            )


def _lists(pipe: Any) -> Iterator[list[str]]:
    """Yield the lists before the split, if they are known before reading."""
    seen = set()
    for splitter in splitters(pipe):
        for stage in upstream(splitter):
            if id(stage) not in seen:
                seen.add(id(stage))
                if urls := declared(stage).known_list():
                    yield [*urls]


def _summarize(urls: list[str]) -> list[Any]:
    """Return the number of URLs, a digest of their names, and the first one. Folders may differ between hosts."""
    names = [re.split("[?#]", url.rstrip("/"))[0].rpartition("/")[2] for url in urls]
    return [len(names), digest(names), *names[:1]]


def digest(texts: Any) -> str:
    """Return a digest of some texts."""
    return blake2b("\n".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _readers(workers: Any) -> str:
    return "one process" if workers == 1 else f"{workers} workers"


def _text(outline: list[Any]) -> str:
    return f"{outline[0]} shards" + (f" from {outline[2]}" if outline[2:] else "")
