"""Patches of loaders whose workers have equal shares of the data, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["copied_by_workers", "copied_data", "endless_passes"]


def copied_data() -> None:
    """Each worker and rank of ``DataLoader`` yields all items of a pipeline that no stage splits, without a word.

    With the patch, the first epoch of a loader whose pipeline has a stage of this package warns about it, like the
    loaders of this package.
    """
    from torch.utils.data import DataLoader

    from wds_datapipes.loading import splitting

    def warn_and_iterate(iterate: Any, self: Any) -> Any:
        splitting.warn_of_copies(self, self.dataset, workers=self.num_workers, ranks=splitting.ranks_of_run())
        splitting.count_declared(self.dataset, workers=self.num_workers)
        return iterate(self)

    _wrap(DataLoader, "__iter__", warn_and_iterate)
    with suppress(ImportError):
        from torchdata.stateful_dataloader import StatefulDataLoader

        _wrap(StatefulDataLoader, "__iter__", warn_and_iterate)


def copied_by_workers() -> None:
    """Each worker yields all items of a pipeline that no stage splits, without a word.

    With the patch, starting the workers warns about it if the pipeline has a stage of this package.
    """
    from torchdata.dataloader2.reading_service import MultiProcessingReadingService

    from wds_datapipes.loading.splitting import warn_of_copies

    def warn_and_initialize(initialize: Any, self: Any, datapipe: Any) -> Any:
        warn_of_copies(self, datapipe, workers=self.num_workers, ranks=1)
        return initialize(self, datapipe)

    _wrap(MultiProcessingReadingService, "initialize", warn_and_initialize)


def endless_passes() -> None:
    """``.cycle()`` never ends in a worker or a rank without a shard, and yields nothing.

    Nor does it with an empty list. With the patch, it ends in such a worker. If no worker of a rank has a shard, or the
    list is empty, it raises an ``EmptySourceError``.
    """
    from torchdata.datapipes.iter import Cycler

    from wds_datapipes.loading.torchdata_patches.cycling import EndingCycler

    setattr(Cycler, "__iter__", EndingCycler.__iter__)


def _wrap(kind: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by a function that receives it as its first argument."""
    method = getattr(kind, name)
    setattr(kind, name, functools.wraps(method)(lambda *args: wrapper(method, *args)))
