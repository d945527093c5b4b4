"""The ranks of a distributed run: who has which part of the data, which seed they share, and who is missing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.errors import RankLost

__all__ = ["Ranks"]

#: How long ranks wait for each other when nothing else is said, in seconds; that of torch's process groups.
DEFAULT_TIMEOUT_S = 1800.0

#: What the gate to an epoch says when all ranks have come; anything else is why it stays shut.
OPEN = "open"

_numbers = itertools.count()


class Ranks:
    """Lets the ranks of a run meet at the beginning of each epoch, and only there.

    They meet at the store that torch's process group was set up with, so nothing is sent for each item, and no
    process group has to be kept. All ranks must make their services, and begin their epochs, in the same order.

    Args:
        timeout_s: how long a rank waits for the others, in seconds.

    Attributes:
        rank: the number of this one.
        size: how many there are.
    """

    def __init__(self, timeout_s: float | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ShardReadingService(distributed=True) needs torch.distributed.init_process_group to have been called, "
                'as `init_process_group("gloo")` under torchrun does.'
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        default_store = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"wds_datapipes/{next(_numbers)}", default_store)
        self._epoch = 0

    def split(self, pipe: Any) -> Any:
        """Give this rank its share of the data."""
        return graph_settings.apply_sharding(pipe, self.size, self.rank, SHARDING_PRIORITIES.DISTRIBUTED)

    def meet(self, seed: int) -> int:
        """Wait until all ranks have come to the next epoch, and return the seed of rank 0.

        Raises:
            RankLost: one of them has failed, has left, or does not come in time.
        """
        self._epoch += 1
        epoch, store = self._epoch, self._store
        with self._patiently():
            store.set(f"{epoch}/{self.rank}", json.dumps(seed))
            if store.add(f"{epoch}/present", 1) == self.size:
                store.compare_set(f"{epoch}/gate", "", OPEN)  # unless it is shut
            store.wait([f"{epoch}/gate"], timedelta(seconds=self._timeout_s))
            reason = store.get(f"{epoch}/gate").decode()
            if reason != OPEN:
                raise RankLost(f"The ranks cannot begin epoch {epoch} of a ShardReadingService together: {reason}")
            shared = int(json.loads(store.get(f"{epoch}/0")))
        self._forget(epoch - 1)
        return shared

    def leave(self, why: str) -> None:
        """Tell the others, once they wait for it at their next meeting, that this rank will not come."""
        with suppress(RuntimeError):  # the store goes with the process that has it
            self._store.set(f"{self._epoch + 1}/gate", f"rank {self.rank} {why}")

    def _forget(self, epoch: int) -> None:
        """Delete what nobody reads any more, now that all have come to the epoch after it."""
        names = [f"{epoch}/{self.rank}", *([f"{epoch}/present", f"{epoch}/gate"] if self.rank == 0 else [])]
        with suppress(RuntimeError):
            for name in names:
                self._store.delete_key(name)

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        """Say who is missing when the store has waited for too long, or has gone itself."""
        try:
            yield
        except RankLost:
            raise
        except RuntimeError as error:
            missing: list[int] | None = None
            with suppress(RuntimeError):
                names = [f"{self._epoch}/{rank}" for rank in range(self.size)]
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
            who = (
                f"Rank {', '.join(map(str, missing))} did not come to epoch {self._epoch} within {self._timeout_s:g} s "
                "(timeout_s): it has died, or it is still at the epoch before."
                if missing
                else f"The ranks' store does not answer, so the rank that has it is gone ({error})."
            )
            raise RankLost(who) from error
