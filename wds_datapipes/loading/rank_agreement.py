"""Checks that ranks which share data agree on the number of workers and on the list that is split."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from torch.utils.data import get_worker_info

from wds_datapipes.datapipes import IterableWrapper
from wds_datapipes.loading.data_parallel import DataParallelGroup
from wds_datapipes.pipes.graph import upstream
from wds_datapipes.pipes.sharding import splits, splitters
from wds_datapipes.pipes.shards.shard_list import ShardList

__all__ = ["RankAgreement", "check_facts_match", "default_store", "facts_before_workers", "facts_of"]

Facts = Mapping[str, Any]

#: How long the store may take to respond to a worker.
CONNECT = timedelta(seconds=5)

#: The number of pipelines of each kind that this process has compared. The n-th one corresponds to the n-th one of the
#: other ranks.
_numbers = Counter[str]()


class RankAgreement:
    """Compares facts that must be equal on all ranks, through the store of the default process group.

    No rank waits: each publishes its facts and compares them with those that its neighbors have published, so the rank
    that comes last finds the difference. A worker process opens its own connection if the store is a ``TCPStore``.

    Args:
        pipe: the pipeline. The n-th one of the same stages corresponds to the n-th one on the other ranks.
    """

    def __init__(self, pipe: Any) -> None:
        kind = _digest(type(stage).__name__ for stage in upstream(pipe))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store across restarts
        self._ranks, self._rank = DataParallelGroup.of(True).identity
        self._name = f"wds_datapipes/alike/{attempt}/{self._ranks}/{kind}/{_numbers[kind]}"
        self._address: tuple[str, int] | None = None
        _numbers[kind] += 1

    def compare(self, facts: Facts) -> None:
        """Publish facts, and compare them with those that other ranks have published under the same names.

        Raises:
            RuntimeError: they differ.
        """
        for rank, found in self._neighbors(facts).items():
            check_facts_match(self._rank, facts, rank, found)

    def _neighbors(self, facts: Facts) -> dict[int, Facts]:
        """Publish facts, and return those that the neighbors have published so far."""
        found: dict[int, Facts] = {}
        if self._ranks == 1:
            return found
        with suppress(RuntimeError):  # the group was destroyed, or its store is unreachable
            if (store := self._store()) is not None:
                name = f"{self._name}/{' '.join(facts)}"
                store.set(f"{name}/{self._rank}", json.dumps(facts))
                for rank in {(self._rank + step) % self._ranks for step in (1, -1)} - {self._rank}:
                    if store.check([f"{name}/{rank}"]):
                        found[rank] = json.loads(store.get(f"{name}/{rank}"))
        return found

    def _store(self) -> Any:
        """Return the store of the process group; ``None`` in a worker that cannot connect to it."""
        # A torch without distributed support lacks these. It does not list them in its __all__.
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        if get_worker_info() is not None:
            # A fork shares its connection with the main process.
            return self._address and TCPStore(*self._address, is_master=False, timeout=CONNECT)
        store = default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):
            self._address = store.host, store.port
        return store


def default_store() -> Any:
    """Return the store of the process group, through a private function of torch 2.4 to 2.13."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


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
                if type(stage) is ShardList:
                    yield stage.urls
                elif type(stage) is IterableWrapper and _is_list_of_urls(stage.iterable):
                    yield [*stage.iterable]


def _is_list_of_urls(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _summarize(urls: list[str]) -> list[Any]:
    """Return the number of URLs, a digest of their names, and the first one. Folders may differ between hosts."""
    names = [re.split("[?#]", url.rstrip("/"))[0].rpartition("/")[2] for url in urls]
    return [len(names), _digest(names), *names[:1]]


def _digest(texts: Any) -> str:
    return blake2b("\n".join(texts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _readers(workers: Any) -> str:
    return "one process" if workers == 1 else f"{workers} workers"


def _text(outline: list[Any]) -> str:
    return f"{outline[0]} shards" + (f" from {outline[2]}" if outline[2:] else "")
