"""The base class of stages that list shards."""

from __future__ import annotations

from typing import Any, TypeVar

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import Shuffler
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.roles import Source
from wds_datapipes.pipes.shards.sharding_filter import ShardingFilterIterDataPipe
from wds_datapipes.pipes.shards.shuffle import ShufflerIterDataPipe
from wds_datapipes.pipes.stage import EngineStage

T_co = TypeVar("T_co", covariant=True)


class ListingStage(Source, EngineStage[T_co]):
    """Base class of stages that list shards."""

    def shuffle(self, buffer_size: int | None = None, *, lanes: int = 1, unbatch_level: int = 0) -> Shuffler[T_co]:
        """Shuffle the whole list, however long it is.

        Args:
            buffer_size: the number of shards to choose from, as in torch's ``.shuffle()``; by default, all.
            lanes: move shards only by multiples of this number of places. If the number of ranks divides it,
                ``.sharding_filter()`` gives each shard to the same rank in all epochs, so that its copy in the cache of
                the host is used again. Choose a number with many divisors that the number of ranks will never exceed,
                such as 64, 512 or 4,096; each lane needs several shards to be shuffled.
            unbatch_level: as in torch's ``.shuffle()``.

        Raises:
            ValueError: ``buffer_size`` or ``lanes`` is not positive, both are given, there are fewer shards than lanes,
                or the shards change from epoch to epoch.

        Examples:
            >>> urls = list(ShardList("{0..8}.tar").shuffle(lanes=3))
            >>> [int(url[0]) % 3 for url in urls]
            [0, 1, 2, 0, 1, 2, 0, 1, 2]
        """
        lanes = check_integer("lanes", lanes, 1)
        if lanes > 1 and (buffer_size is not None or lanes > len(self.known_list())):
            raise ValueError(
                f"shuffle(lanes={lanes}) divides a whole list that is the same in each epoch, but {name_of(self)} has "
                f"{len(self.known_list())} such shards, with buffer_size={buffer_size}. Choose fewer lanes and no "
                "buffer_size"
            )
        if buffer_size is None:
            shuffler: ShufflerIterDataPipe[T_co] = ShufflerIterDataPipe(self, unbatch_level=unbatch_level)
            if lanes > 1:
                shuffler.lanes = lanes
            return shuffler
        buffer_size = check_integer("buffer_size", buffer_size, 1)
        return Shuffler(self, buffer_size=buffer_size, unbatch_level=unbatch_level)

    def sharding_filter(self, sharding_group_filter: Any = None) -> ShardingFilterIterDataPipe:
        """Split the list between ranks and workers."""
        return ShardingFilterIterDataPipe(self, sharding_group_filter)
