"""Shards drawn with replacement, by each worker of each rank for itself."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from random import Random

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from wds_datapipes.pipes.sharding import Groups, place_in, share
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.pipes.state.empty_passes import EmptyPassGuard
from wds_datapipes.pipes.state.seeding import SeededStage
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.listing import resample_wds_shards

__all__ = ["ShardResampler"]


@register_stage("resample_wds_shards")
class ShardResampler(SeededStage, Stage[str]):
    """Draw shards at random, with replacement, for ever (functional name: ``resample_wds_shards``).

    Each worker of each rank draws its own from all shards. So it takes the place of ``.sharding_filter()``, and the two
    exclude each other: loaders refuse to split twice. What is drawn follows from the seed of the loader, another one
    for each epoch, and from rank and worker. Let ``.with_epoch()`` end the epochs of an endless stream.

    Yields:
        str: URLs of ``source``, each as often as it is drawn.

    Args:
        source: yields URLs of shards. It is read once, when an epoch begins.
        count: how many shards the workers of a rank draw together in an epoch; for ever by default.
        seed: another number draws other shards under the same seed of the loader.

    Raises:
        EmptySourceError: ``source`` yields nothing. Or ten times as many shards as there are were drawn, and no
            item has left the pipeline.

    Examples:
        >>> drawn = list(ShardList("{a..c}.tar").resample_wds_shards(10))
        >>> len(drawn), set(drawn) <= {"a.tar", "b.tar", "c.tar"}
        (10, True)
    """

    repeats_shards = True
    moves_share = True

    def __init__(self, source: IterDataPipe[str], count: int | None = None, *, seed: int = 0) -> None:
        super().__init__()
        try:
            count = None if count is None else operator.index(count)
        except TypeError:
            raise TypeError(f"count is a number of shards from 1, or None, not {count!r}") from None
        if count is not None and count < 1:
            raise ValueError(f"count is a number of shards from 1, or None, not {count!r}")
        if not isinstance(seed, int):
            raise TypeError(f"seed is a number, not {seed!r}")
        self.source = source
        self.count = count
        self.seed = seed
        self.groups: Groups = {}
        #: By how many workers its share of ``count`` has moved on (see `turn_shares`).
        self.turn = 0
        self._rng = Random()
        self._deliveries = EmptyPassGuard()

    def apply_sharding(
        self,
        num_of_instances: int,
        instance_id: int,
        sharding_group: SHARDING_PRIORITIES = SHARDING_PRIORITIES.DEFAULT,
    ) -> None:
        """Take note of the rank or the worker; loaders call this.

        Args:
            num_of_instances: how many there are.
            instance_id: which of them this is.
            sharding_group: whether they are ranks or workers, or ``DEFAULT`` for both at once.

        Raises:
            ValueError: there is no such instance.
            RuntimeError: both kinds of group were applied.
        """
        if not 0 <= instance_id < num_of_instances:
            raise ValueError(f"resample_wds_shards cannot be instance {instance_id} of {num_of_instances}, from 0")
        default = SHARDING_PRIORITIES.DEFAULT
        if self.groups and (sharding_group == default) != (default in self.groups):
            raise RuntimeError("resample_wds_shards cannot mix DEFAULT and other sharding groups")
        self.groups[sharding_group] = (num_of_instances, instance_id)

    def move_share(self, turn: int) -> None:
        """Take the share of ``count`` of the worker that is ``turn`` numbers further."""
        self.turn = turn

    def reset(self) -> None:
        """Begin an epoch, with the seed that was set for it or one from torch's generator."""
        place = place_in(self.groups)
        self._rng.seed(derived_seed("resample_wds_shards", self.seed, self.take_seed(), place.rank, place.worker))

    def __iter__(self) -> Iterator[str]:
        yield from resample_wds_shards(
            self.source, rng=self._rng, count=self._share(), on_round=lambda: self._deliveries.check(self)
        )

    def __len__(self) -> int:
        count = self._share()
        if count is None:
            raise TypeError("resample_wds_shards draws shards for ever, and has a length only where a count is given")
        return count

    def _share(self) -> int | None:
        if self.count is None:
            return None
        place = place_in(self.groups)
        return share(self.count, place._replace(worker=(place.worker + self.turn) % place.workers))
