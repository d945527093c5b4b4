"""Keeping samples from one epoch to the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, get_worker_info

from wds_datapipes.errors import CacheError
from wds_datapipes.pipes.sharding import groups_of, instance_of, splits
from wds_datapipes.pipes.stage import Stage, register_stage
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.graph import takes_seed, upstream
from wds_datapipes.samples.caching import CachedPart, CachePosition, DiskCache, MemoryCache, SampleCache
from wds_datapipes.seeds import derived_seed
from wds_datapipes.shards.position import SamplePosition

if TYPE_CHECKING:
    from wds_datapipes.pipes.state.recording import Form, Recorder

__all__ = ["SampleCacher"]

#: Where the stages come from that stand for a pipeline in another process.
REMOTE = ("torchdata.dataloader2.", "wds_datapipes.loading.")


@register_stage("cache_samples")
class SampleCacher(Stage[Any]):
    """Keep the samples of the first complete pass for all later ones (functional name: ``cache_samples``).

    Later passes have the same samples in the same order, duplicates included, and read nothing from the source. A pass
    that is broken off keeps nothing. What stages behind change in place changes nothing that is kept.

    Workers keep a part each: place it behind ``.sharding_filter()``. All that is random before the cache has the seed
    of the cache, and not that of the loader. So the data is split in the same way in every epoch, and each sample comes
    exactly once in an epoch, also if some workers have come to the end of their first pass and others have not. Shuffle
    behind the cache, with ``.shuffle_samples()``.

    The source has to end. In memory, the samples are those of one process, so workers have to live on: as in
    `ShardReadingService`, or with ``DataLoader(persistent_workers=True)``. On disk, a file for each part is written
    while the first pass goes on, and gets its name once it is whole. Another number of ranks or workers makes another
    set of files; another pipeline before the cache (its stages, shards, arguments, and the code of its functions) is
    an error.

    A state of the pipeline has how many samples of the pass were yielded. To go on from it, these are passed over in
    the cache if it is whole there, as on a disk; or the pass is read from the source again, from its beginning, and is
    kept.

    A directory that is given here has to be trusted: samples are pickled, and unpickling runs code.

    Yields:
        Any: the items of ``source``; from the second pass on, copies of them.

    Args:
        source: yields samples, or anything else that can be pickled.
        path: the directory to keep them in, which is made if need be; in memory by default.
        max_bytes: the most bytes of pickled samples that are kept for a part. If there are more, nothing is kept, with
            a warning, and every pass reads from the source.
        seed: of all that is random before the cache.

    Raises:
        CacheError: the file cannot be written, is damaged in the middle, or was made by another pipeline; a sample
            cannot be pickled; or a stage splits the data before the cache and does not tell how. A file that is cut off
            is a warning, and is made again.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> pipe = IterableWrapper([{"__key__": "a", "cls": 1}, {"__key__": "b", "cls": 2}]).cache_samples("kept")
        >>> [sample["cls"] for _ in range(2) for sample in pipe]
        [1, 2, 1, 2]
        >>> import os
        >>> os.listdir("kept")
        ['part-00000-of-00001.samples']
    """

    rereads_source = True

    def __init__(
        self,
        source: IterDataPipe[Any],
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes is a number of bytes, not {max_bytes!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is a whole number, not {seed!r}")
        self.source = source
        self.max_bytes = max_bytes
        self.seed = seed
        self._cache: SampleCache = MemoryCache(max_bytes) if self.path is None else DiskCache(self.path, max_bytes)
        self._described: list[str] | None = None
        self._position = CachePosition()
        self._loaded: CachePosition | None = None

    def position_reader(self) -> Callable[[], SamplePosition]:
        """Return a function that returns the number of the sample that was yielded last, as if it were a shard."""
        return lambda: SamplePosition(self._position.at, 0, -1)

    def state_dict(self) -> dict[str, Any]:
        """Return how many samples of this pass were yielded, and a checksum of the key of the last of them."""
        position = self._loaded or self._position
        return {"passed": position.passed, "check": position.check}

    def record_state(self, recorder: Recorder) -> Form:
        """Return the form of what `state_dict` returns."""
        return recorder.keep_values(self, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], again: Iterable[SamplePosition] = ()) -> None:
        """Go on from a state when it is iterated next.

        Args:
            state: what `state_dict` has returned; or ``{}``, where only samples that come again are left.
            again: samples that wait in later stages, and are yielded first.
        """
        numbers = {address.shard for address in again}
        self._loaded = CachePosition(state.get("passed", 0), state.get("check", 0), numbers, ends="passed" not in state)

    def reset_state(self) -> None:
        """Begin anew when it is iterated next."""
        self._loaded = None

    def __iter__(self) -> Iterator[Any]:
        stages = list(upstream(self.source))
        part = _part(stages)
        self._position, self._loaded = self._loaded or CachePosition(), None
        samples = self._cache.cached(
            lambda: self._begin(stages, part),
            part,
            self._describe,
            self._position.wants,
        )
        yield from self._position.counted(samples)

    def _describe(self) -> list[str]:
        """Describe what is kept, once: items that later stages change in place may be arguments of a stage."""
        if self._described is None:
            self._described = [f"seed {self.seed}", *descriptions(self.source)]
        return self._described

    def _begin(self, stages: list[Any], part: CachedPart) -> IterDataPipe[Any]:
        """Give all stages before this one the seeds that they have in every pass, on every rank, in every run."""
        before = {id(stage) for splitter in stages if splits(splitter) for stage in upstream(splitter)}
        for position, stage in enumerate(stages):
            if takes_seed(stage):
                place = () if id(stage) in before else part
                stage.set_seed(derived_seed("cache_samples", self.seed, position, *place))
        return self.source

    def __len__(self) -> int:
        return len(self.source)


def _part(stages: list[Any]) -> CachedPart:
    """Return the part of the data that comes out of the last of ``stages``, as those tell that split it."""
    parts = set()
    for stage in stages:
        if type(stage).__module__.startswith(REMOTE):
            raise CacheError(
                "cache_samples cannot keep what another process deals out (sharding_round_robin_dispatch), since a "
                "worker gets other items each time. Put the cache before that, or use .sharding_filter()"
            )
        if splits(stage):
            groups = groups_of(stage)
            if not isinstance(groups, dict):
                raise CacheError(
                    f"cache_samples has to know which part of the data this is, and {type(stage).__name__}, which "
                    f"splits it, does not tell: it has no 'groups' as torch's ShardingFilter has"
                )
            parts.add(CachedPart(*instance_of(groups)))
    if len(parts) > 1:
        raise CacheError(f"cache_samples has sources that are split in different ways: {sorted(parts)}")
    info = get_worker_info()
    # A source may split by itself what no stage splits, and asks torch for its worker then.
    return parts.pop() if parts else CachedPart() if info is None else CachedPart(info.num_workers, info.id)
