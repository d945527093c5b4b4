"""The service that replaces torchdata's ``MultiProcessingReadingService``."""

from __future__ import annotations

import multiprocessing
from typing import Any

from wds_datapipes.loading.service.service import ShardReadingService


class MultiProcessingService(ShardReadingService):
    """Replaces torchdata's ``MultiProcessingReadingService``, with the same arguments and defaults.

    Each rank reads all of the data, unless a ``DistributedReadingService`` comes first.
    """

    multiprocessing_context: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, distributed=False)
        # The default of torchdata is the start method of the program.
        self.multiprocessing_context = self.multiprocessing_context or multiprocessing.get_start_method(allow_none=True)
