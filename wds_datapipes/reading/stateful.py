"""`StatefulShards`: a pipeline as a data set whose state torchdata's ``StatefulDataLoader`` saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info, graph_settings
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.utils import WorkerInfo

from wds_datapipes.core.seeds import derived_seed
from wds_datapipes.errors import StateError
from wds_datapipes.pipes.description import description
from wds_datapipes.pipes.upstream import upstream
from wds_datapipes.reading.seeding import reset_pipeline, seed_stages
from wds_datapipes.reading.state import check_state, load_state, save_state

__all__ = ["StatefulShards"]

FORMAT = "wds-datapipes stateful shards"
VERSION = 1

#: How many workers a loader may have.
MOST_WORKERS = 1024


class StatefulShards(IterableDataset[Any]):
    """Give a pipeline to torchdata's ``StatefulDataLoader``, which goes on where it was in the middle of an epoch.

    It splits the shards between ranks and workers itself, wherever the pipeline has its ``.sharding_filter()``; it has
    to be made behind ``init_process_group``, if there are ranks. The order of each epoch follows from ``seed`` and the
    number of the epoch, and is another one in each. With as many ranks and workers as before, what comes after a state
    is what would have come.

    With torch's own ``DataLoader`` and ``num_workers=0``, `state_dict` and `load_state_dict` can be called here
    directly, between two batches.

    Args:
        pipe: the pipeline.
        seed: what the orders follow from.

    Raises:
        StateError: a stage of the pipeline holds samples back, and has no state.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": str(n), "cls": str(n)} for n in range(4)])
        >>> pipe = ShardList(shard).sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
        >>> data = StatefulShards(pipe)
        >>> iterator = iter(DataLoader(data, batch_size=None))
        >>> next(iterator), next(iterator)
        (['0'], ['1'])
        >>> state = data.state_dict()
        >>> data = StatefulShards(pipe)
        >>> data.load_state_dict(state)
        >>> list(DataLoader(data, batch_size=None))
        [['2'], ['3']]
    """

    def __init__(self, pipe: IterDataPipe[Any], *, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(pipe, IterDataPipe):
            raise TypeError(f"StatefulShards takes a pipeline, not {pipe!r}")
        if not isinstance(seed, int):
            raise TypeError(f"seed is a number, not {seed!r}")
        check_state(pipe)
        self.pipe = pipe
        self.seed = seed
        ready = distributed.is_available() and distributed.is_initialized()
        self._rank, self._ranks = (distributed.get_rank(), distributed.get_world_size()) if ready else (0, 1)
        self._stages = [description(stage) for stage in upstream(pipe)]
        # The epoch that each worker has begun last, and whether any has: workers that are started anew for each epoch
        # know it only from the process that starts them.
        self._begun = _shared(torch.full((MOST_WORKERS,), -1, dtype=torch.int64))
        self._has_workers = _shared(torch.zeros((), dtype=torch.int64))
        self._loaded: Mapping[str, Any] | None = None
        self._epoch: int | None = None  # of the iteration; None before its first item
        self._items = 0
        self._is_over = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch, as some trainers want it. By default it is one more than the last."""
        if epoch < 0:
            raise ValueError(f"epoch is a number from 0, not {epoch!r}")
        self._begun.fill_(epoch - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where this process is, as values that JSON has.

        Raises:
            StateError: worker processes read the data, and this is not one of them.
        """
        if get_worker_info() is None and int(self._has_workers):
            raise StateError(
                "The places of worker processes are not known here. Ask StatefulDataLoader.state_dict(), or use "
                "DataLoader2 with ShardReadingService, or num_workers=0"
            )
        if self._loaded is not None:
            return dict(self._loaded)
        worker = self._worker.worker_id
        return {
            "format": FORMAT,
            "version": VERSION,
            "stages": self._stages,
            "seed": self.seed,
            "place": self._place,
            "epoch": int(self._begun[worker]) + 1 if self._epoch is None else self._epoch,
            "is_over": self._is_over,
            "items": self._items,
            "state": save_state(self.pipe) if self._items and not self._is_over else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state when it is iterated next.

        Raises:
            StateError: it is no state of this pipeline, or that of another place.
        """
        if (state.get("format"), state.get("version")) != (FORMAT, VERSION):
            raise StateError(f"This is no state of version {VERSION} of StatefulShards")
        own = {"stages": self._stages, "seed": self.seed, "place": self._place}
        for name, value in own.items():
            if state[name] != value:
                raise StateError(
                    f"The state was saved with another {name}: {state[name]}, and here it is {value}. A place is "
                    f"[rank, ranks, worker, workers]. Use DataLoader2 with ShardReadingService to go on with another "
                    f"number of ranks or workers"
                )
        self._loaded = dict(state)

    def __iter__(self) -> Iterator[Any]:
        in_worker = get_worker_info() is not None
        self._epoch, self._items, self._is_over = None, 0, False
        if in_worker:
            # Here, and not with the first item: a loop that is broken off at once has begun its epoch in all workers.
            self._has_workers.fill_(1)
            self._begin()
        return self._iterated()

    @property
    def _worker(self) -> Any:
        info = get_worker_info()
        return WorkerInfo(1, 0) if info is None else WorkerInfo(info.num_workers, info.id)

    @property
    def _place(self) -> list[int]:
        info = get_worker_info()
        return [self._rank, self._ranks, *((0, 0) if info is None else (info.id, info.num_workers))]

    def _begin(self) -> None:
        """Choose the epoch."""
        worker = self._worker.worker_id
        loaded = self._loaded
        self._epoch = int(self._begun[worker]) + 1 if loaded is None else int(loaded["epoch"])
        # A worker that was at its end stays there until the others are. Without workers, another epoch follows.
        if loaded is not None and loaded["is_over"] and get_worker_info() is None:
            self._epoch += 1
            self._loaded = None
        self._begun[worker] = self._epoch

    def _iterated(self) -> Iterator[Any]:
        if self._epoch is None:
            self._begin()
        loaded, self._loaded = self._loaded, None
        self._items = 0 if loaded is None else int(loaded["items"])
        self._is_over = loaded is not None and bool(loaded["is_over"])
        if self._is_over:
            return
        pipe, info = self.pipe, self._worker
        graph_settings.apply_sharding(pipe, self._ranks, self._rank, SHARDING_PRIORITIES.DISTRIBUTED)
        graph_settings.apply_sharding(pipe, info.num_workers, info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
        generator = SeedGenerator(derived_seed("epoch", self.seed, self._epoch or 0))
        generator = generator.spawn(self._rank).spawn(info.worker_id)
        if get_worker_info() is None:  # the generators of this process are those of the training
            seed_stages(pipe, generator)
        else:
            reset_pipeline(pipe, info, generator, iter_reset_fn=None, worker_reset_fn=None)
        if loaded is not None and loaded["state"] is not None:
            load_state(pipe, loaded["state"])
        for item in pipe:
            self._items += 1
            yield item
        self._is_over = True


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor to memory that the processes share which are started with it."""
    share: Callable[[], torch.Tensor] = tensor.share_memory_
    return share()
