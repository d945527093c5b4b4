"""The stage ``.resample_wds_shards()``: draw shards with replacement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from wds_datapipes.arguments import check_integer, check_optional_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import EmptySourceError
from wds_datapipes.pipes.groups import Groups
from wds_datapipes.pipes.instance import instance_in
from wds_datapipes.pipes.sharding import SplittingStage
from wds_datapipes.pipes.state.empty_passes import EmptyPassGuard
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.seeds import derived_seed


class ShardResampler(SeededStage, SplittingStage[str]):
    """Draw shards at random with replacement, endlessly by default (functional name: ``resample_wds_shards``).

    Each worker of each rank draws from all shards independently. This stage therefore replaces ``.sharding_filter()``;
    loaders refuse to split the data twice. The draws depend on the seed of the loader, which differs in each epoch, and
    on the rank and the worker. Use ``.with_epoch()`` to end the epochs of an endless stream.

    Yields:
        str: the URLs drawn from ``source``.

    Args:
        source: yields URLs of shards. It is read once, at the start of an epoch.
        count: the number of shards that the workers of a rank draw together in an epoch; unlimited by default.
        seed: a number that is combined with the seed of the loader; change it to draw other shards.

    Raises:
        EmptySourceError: ``source`` yields nothing; or no item has left the pipeline after ten times as many draws as
            there are shards.

    Examples:
        >>> drawn = list(ShardList("{a..c}.tar").resample_wds_shards(10))
        >>> len(drawn), set(drawn) <= {"a.tar", "b.tar", "c.tar"}
        (10, True)
    """

    def __init__(self, source: IterDataPipe[str], count: int | None = None, *, seed: int = 0) -> None:
        self.source = source
        self.count = check_optional_integer("count", count, 1)
        self.seed = check_integer("seed", seed)
        self.groups: Groups = {}
        #: The rotation of its share of ``count`` (see `rotate_assignments`).
        self.turn = 0
        self._rng = Random()
        self._empty_passes = EmptyPassGuard()

    def repeats_shards(self) -> bool:
        """Whether a shard may occur more than once in an epoch."""
        return True

    def rotate_assignment(self, turn: int, stages: Sequence[Any]) -> None:  # noqa: ARG002
        """Rotate the shares of ``count`` by ``turn`` workers."""
        self.turn = turn

    def reset(self) -> None:
        """Start an epoch with the seed that was set for it, or one from torch's generator."""
        instance = instance_in(self.groups)
        self._rng.seed(derived_seed("resample_wds_shards", self.seed, self.take_seed(), instance.rank, instance.worker))

    def __iter__(self) -> Iterator[str]:
        urls = list(self.source)
        if not urls:
            raise EmptySourceError("resample_wds_shards has no shards to draw from: its source is empty")
        count = self._share()
        for number in itertools.count() if count is None else range(count):
            if number % len(urls) == 0:
                self._empty_passes.check(self)
            yield urls[int(self._rng.random() * len(urls))]

    def __len__(self) -> int:
        count = self._share()
        if count is None:
            raise TypeError("resample_wds_shards draws shards endlessly; it has a length only if count is set")
        return count

    def _share(self) -> int | None:
        if self.count is None:
            return None
        instance = instance_in(self.groups)
        turned = (instance.worker + self.turn) % instance.workers
        return instance.on_worker(turned, instance.workers).share_of(self.count)
