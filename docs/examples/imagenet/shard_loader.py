"""Load images from shards: as a stream of whole shards, or by index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from batches import Batch, Settings

from wds_datapipes import IndexedSamples, ShardList, ShardReadingService
from wds_datapipes.integrations.ranks import gather_states

from torchdata.dataloader2 import DataLoader2  # isort: skip - the import above silences its deprecation warning

#: The number of samples that each worker shuffles, besides the order of the shards.
SHUFFLE_BUFFER = 2000
#: The time after which a silent worker or a missing rank is an error.
TIMEOUT_S = 600


def stream_samples(settings: Settings, split: str) -> Any:
    """Read whole shards: for training in random order, for validation in their own."""
    shards = ShardList(f"{settings.data}/{split}-*.tar")
    if split != "train":
        return shards.sharding_filter().load_wds_shards().group_samples()
    samples = shards.shuffle().sharding_filter().load_wds_shards().group_samples()
    return samples.shuffle_samples(SHUFFLE_BUFFER)


def index_samples(settings: Settings, split: str) -> Any:
    """Read by index: for training global batches of equal size, for validation each sample once."""
    urls = f"{settings.data}/{split}-*.tar"
    if split != "train":
        return IndexedSamples(urls, order="sequential", global_batch_size=settings.batch_size, remainder="keep")
    return IndexedSamples(urls, global_batch_size=settings.batch_size, remainder="pad")


def make_batch(columns: dict[str, Any]) -> Batch:
    """Return the batch of decoded columns."""
    labels = columns["cls"]
    padding = columns.get("__padding__", torch.zeros(len(labels), dtype=torch.bool))
    return Batch(columns["__key__"], columns["jpg"], labels, padding)


class ShardLoader:
    """Loads batches of samples with ``DataLoader2``. Its state fits any number of ranks and workers."""

    def __init__(self, samples: Any, settings: Settings, split: str) -> None:
        self._settings = settings
        batches = samples.batch(settings.rank_batch_size).decode_batch(settings.decoder(split)).map(make_batch)
        service = ShardReadingService(
            num_workers=settings.workers, pin_memory=torch.cuda.is_available(), distributed=True, timeout_s=TIMEOUT_S
        )
        self._loader: DataLoader2[Any] = DataLoader2(batches, reading_service=service)
        self._loader.seed(settings.seed)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, which all of them request."""
        return gather_states(self._loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a merged state."""
        self._loader.load_state_dict(state)

    def shutdown(self) -> None:
        """End the workers."""
        self._loader.shutdown()


class StreamLoader(ShardLoader):
    """Loads a stream for training, whose ranks have different numbers of batches, because shards are not divided.

    A rank without a batch, while others have some, gets its last one again as padding.
    """

    def __init__(self, samples: Any, settings: Settings, split: str) -> None:
        super().__init__(samples, settings, split)
        self._group = dist.new_group(backend="gloo")  # to agree on the end of an epoch without waiting for a GPU

    def __iter__(self) -> Iterator[Batch]:
        size, rows = self._settings.size, self._settings.rank_batch_size
        last = Batch(
            [""] * rows,
            torch.zeros(rows, 3, size, size, dtype=torch.uint8),
            torch.zeros(rows, dtype=torch.int64),
            torch.ones(rows, dtype=torch.bool),
        )
        for batch in chain(super().__iter__(), repeat(None)):
            is_any_left = torch.tensor(batch is not None, dtype=torch.int32)
            dist.all_reduce(is_any_left, dist.ReduceOp.MAX, group=self._group)
            if not is_any_left:
                return
            last = batch or last._replace(is_padding=torch.ones_like(last.is_padding))
            yield last
