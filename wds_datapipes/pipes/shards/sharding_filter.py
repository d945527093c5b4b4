"""``.sharding_filter()`` of a list of shards, which reads only its share of a long list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from wds_datapipes.datapipes import ShardingFilter
from wds_datapipes.pipes.foreign_stages import declared


class ShardingFilterIterDataPipe(ShardingFilter):
    """torch's ``.sharding_filter()`` of a list of shards: it takes its share of a long list without reading the rest.

    The name is that of torch's class, because states record it.

    Yields:
        Any: every n-th item of ``source_datapipe``.
    """

    def __iter__(self) -> Iterator[Any]:
        count, first = self.num_of_instances, self.instance_id
        share = declared(self.source_datapipe).read_share(count, first)
        yield from islice(self.source_datapipe, first, None, count) if share is None else share
