"""What ``DataLoader2`` lacks with a `ShardReadingService`: states without pickle, ``set_epoch`` and a length.

It applies once the first `ShardReadingService` is made. A loader with another reading service works as before.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.dataloader2 import DataLoader2Iterator

from wds_datapipes.loading.service import loader as extension
from wds_datapipes.loading.torchdata_patches.local_functions import copy_pipeline, find_local_classes
from wds_datapipes.loading.workers.in_process import users_part


@functools.cache
def extend() -> None:
    """Extend ``DataLoader2``."""
    find_local_classes()
    # pickle copies no lambda, and DataLoader2 copies its pipeline even if it has no workers.
    setattr(importlib.import_module("torchdata.dataloader2.dataloader2"), "clone", copy_pipeline)
    state_dict, load_state_dict = DataLoader2.state_dict, DataLoader2.load_state_dict
    from_state, iterate, next_item = DataLoader2.from_state.__func__, DataLoader2.__iter__, DataLoader2Iterator.__next__

    @functools.wraps(state_dict)
    def save(self: Any) -> dict[str, Any]:
        service = extension.own_service(self)
        return dict(state_dict(self)) if service is None else extension.save_state(self, service)

    @functools.wraps(load_state_dict)
    def load(self: Any, state_dict: Any) -> None:
        if (service := extension.own_service(self)) is not None:
            extension.load_state(self, service, state_dict)
        else:
            extension.refuse_state(state_dict)
            load_state_dict(self, state_dict)

    @functools.wraps(from_state)
    def load_without_pipeline(cls: Any, state: Any, reading_service: Any) -> Any:
        extension.refuse_pipeline(reading_service, state)
        return from_state(cls, state, reading_service)

    @functools.wraps(iterate)
    def iterate_and_count(self: Any) -> Any:
        # Users look at the last stage, and call its methods. So the stages that count its items are there only here.
        running = vars(self).get("_running")
        if running is not None and self.datapipe is users_part(running):
            self.datapipe = running
        try:
            return iterate(self)
        finally:
            self._running, self.datapipe = self.datapipe, users_part(self.datapipe)

    @functools.wraps(next_item)
    def next_or_restart(self: Any) -> Any:
        loader = self.dataloader
        if vars(loader).pop("_restarts", False) and self.iterator_id == loader.valid_iterator_id:
            loader._reset_iter = True
            self.iterator_id = iter(loader).iterator_id
        return next_item(self)

    setattr(DataLoader2, "state_dict", save)
    setattr(DataLoader2, "load_state_dict", load)
    setattr(DataLoader2, "from_state", classmethod(load_without_pipeline))
    setattr(DataLoader2, "__iter__", iterate_and_count)
    setattr(DataLoader2, "set_epoch", property(extension.epoch_setter))
    setattr(DataLoader2, "__len__", extension.length_of)
    setattr(DataLoader2, "__bool__", lambda _: True)
    setattr(DataLoader2Iterator, "__next__", next_or_restart)
