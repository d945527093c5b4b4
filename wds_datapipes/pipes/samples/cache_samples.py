"""The stage that caches samples across epochs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from torch.utils.data import get_worker_info

from wds_datapipes.arguments import check_integer
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.errors import CacheError
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.groups import groups_of, part_in
from wds_datapipes.pipes.inspection import splits, takes_seed
from wds_datapipes.pipes.roles import Transform
from wds_datapipes.pipes.stage import EngineStage
from wds_datapipes.pipes.state.description import FREE, descriptions
from wds_datapipes.samples.caching import CachedPart, MemoryCache, cached_on_disk
from wds_datapipes.seeds import derived_seed


class SampleCacher(Transform, EngineStage[Any]):
    """Cache the samples of the first complete pass for all later passes (functional name: ``cache_samples``).

    Later passes yield the same samples in the same order without reading the source. An incomplete pass is not cached.
    In-place changes by later stages do not affect the cache.

    Each worker caches its part of the data: put this stage after ``.sharding_filter()``. Random stages before the cache
    use the seed of the cache instead of the loader's. As a result, the data is split in the same way in every epoch,
    and each sample is yielded exactly once per epoch, even if only some workers have completed their first pass.
    Shuffle after the cache, with ``.shuffle_samples()``.

    The source must be finite. In memory, the cache belongs to one process, so workers must persist: use
    `ShardReadingService`, or ``DataLoader(persistent_workers=True)``. On disk, each part is a file that is written
    during the first pass and appears under its name once it is complete. A different number of ranks or workers creates
    a new set of files; a different pipeline before the cache (stages, shards, arguments, code of functions) is an
    error.

    A pipeline with this stage resumes by replay: from a complete cache on disk, or else from the source.

    The directory must be trusted: samples are pickled, and unpickling can run arbitrary code.

    Yields:
        Any: the items of ``source``, and copies of them from the second pass on.

    Args:
        source: yields samples, or anything else that can be pickled.
        path: the directory of the cache, created if necessary. By default, the cache is in memory.
        seed: the seed of the random stages before the cache.

    Raises:
        CacheError: the file cannot be written, is damaged, or belongs to another pipeline; a sample cannot be pickled;
            or a stage before the cache splits the data in an unknown way.

    Examples:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> pipe = IterableWrapper([{"__key__": "a", "cls": 1}, {"__key__": "b", "cls": 2}]).cache_samples("kept")
        >>> [sample["cls"] for _ in range(2) for sample in pipe]
        [1, 2, 1, 2]
        >>> import os
        >>> os.listdir("kept")
        ['part-00000-of-00001.samples']
    """

    is_stateless = False
    argument_uses: ClassVar = {"path": "ignored"}

    def __init__(self, source: IterDataPipe[Any], path: str | os.PathLike[str] | None = None, *, seed: int = 0) -> None:
        self.path = None if path is None else os.fspath(path)
        self.seed = check_integer("seed", seed)
        self.source = source
        self._cached = MemoryCache().cached if self.path is None else partial(cached_on_disk, self.path)
        self._described: list[str] | None = None

    def __iter__(self) -> Iterator[Any]:
        graph = PipelineGraph(self.source)
        part = _part(graph)
        yield from self._cached(lambda: self._begin(graph, part), part, self._describe)

    def restarts_once(self) -> bool:
        """Whether it restarts its source exactly once in each epoch."""
        return False

    def keeps_share(self) -> bool:
        """Whether every pass assigns each item to the same rank and worker."""
        return type(self).__iter__ is SampleCacher.__iter__

    def _describe(self) -> list[str]:
        """Describe the cached pipeline once, before later stages can change items that are arguments of a stage."""
        if self._described is None:
            self._described = [f"seed {self.seed}", *(each.replace(FREE, "") for each in descriptions(self.source))]
        return self._described

    def _begin(self, graph: PipelineGraph, part: CachedPart) -> Any:
        """Set the seeds of all stages before this one: the same in every pass and run, and on every rank."""
        for position, stage in enumerate(graph.stages):
            if takes_seed(stage):
                own = () if id(stage) in graph.before_split else part
                stage.set_seed(derived_seed("cache_samples", self.seed, position, *own))
        return self.source

    def __len__(self) -> int:
        return len(self.source)


def _part(graph: PipelineGraph) -> CachedPart:
    """Return the part of the data that a pipeline yields in this process."""
    parts = set()
    for stage in graph.stages:
        if declared(stage).process_boundary == "remote":
            raise CacheError(
                "cache_samples cannot cache the items of other processes, because they change in each epoch. Put the "
                "cache before the stage that stays in the main process"
            )
        if splits(stage):
            groups = groups_of(stage)
            if not isinstance(groups, dict):
                raise CacheError(
                    f"cache_samples cannot determine which part of the data this worker has, because "
                    f"{type(stage).__name__}, which splits it, has no attribute 'groups' like torch's ShardingFilter"
                )
            parts.add(CachedPart(*part_in(groups)))
    if len(parts) > 1:
        raise CacheError(f"cache_samples has sources that are split in different ways: {sorted(parts)}")
    info = get_worker_info()
    # Without a splitting stage, the source itself may split the data by torch's worker info.
    return parts.pop() if parts else CachedPart() if info is None else CachedPart(info.num_workers, info.id)
