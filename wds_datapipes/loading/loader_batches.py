"""The batches of a loader, as the source of a pipeline in the main process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

from torch.utils.data import get_worker_info

from wds_datapipes.loading.stateful_dataset.dataset import StatefulShards
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.roles import Loader
from wds_datapipes.pipes.stage import EngineStage, OpaqueValue
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.seeding import SeededStage


class LoaderRun(NamedTuple):
    """The pipeline and the settings that determine the epochs of a loader.

    Attributes:
        pipe: its pipeline, before the split.
        seed: its seed, or ``None`` if it has none.
        workers: the number of its worker processes.
        set_epoch: selects the number of its next epoch.
    """

    pipe: Any
    seed: int | None
    workers: int
    set_epoch: Callable[[int], object]


class LoaderBatches(Loader, SeededStage, EngineStage[Any]):
    """The batches of a loader, for stages that run after it in the main process.

    Such stages shuffle and batch the samples of all workers together. A `StatefulShards` over the last of them has
    states that are exact between two items: its epoch selects the epoch of the loader, so a state holds both, and
    resumes by replay. The loader must read the same pipeline, with the same seed and number of workers.

    Yields:
        Any: the batches of ``loader``, unchanged.

    Args:
        loader: a ``DataLoader2`` with a `ShardReadingService`, which ``loader.seed(n)`` has seeded; or torch's
            ``DataLoader``, or a ``StatefulDataLoader``, over a `StatefulShards`.

    Raises:
        TypeError: ``loader`` is another object.
        RuntimeError: a worker process iterates over this stage.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from wds_datapipes.testing import build_shard
        >>> for name in "ab":
        ...     _ = build_shard(f"{name}.tar", [{"__key__": f"{name}{n}", "cls": str(n)} for n in range(4)])
        >>> pipe = ShardList("{a,b}.tar").sharding_filter().load_wds_shards().group_samples()
        >>> data = StatefulShards(pipe.to_tuple("__key__", "cls").batch(2).collate(), seed=1)
        >>> loader = DataLoader(data, batch_size=None, num_workers=2)
        >>> mixed = StatefulShards(LoaderBatches(loader).unbatch_samples().shuffle_samples(8).batch(3))
        >>> [len(batch) for batch in mixed]
        [3, 3, 2]
        >>> state = mixed.state_dict()
    """

    #: Only the loader can restart its items; stages that restart their source check this.
    process_boundary = "remote"
    #: Each rank has the epoch of its own loader, which the seeds of the pipeline after it do not change.
    shares_seed = True
    argument_uses: ClassVar = {"hidden": "ignored"}

    def __init__(self, loader: Any) -> None:
        run = _run_of(loader)
        self._hidden = OpaqueValue((loader, run))
        # What a state compares.
        self.num_workers, self.seed, self.pipeline = run.workers, run.seed, descriptions(run.pipe)

    def replay_obstacle(self, stages: Sequence[Any]) -> str:  # noqa: ARG002
        """Return why the loader cannot make its epoch again."""
        _, run = self._hidden.value
        if run.seed is None:
            return "reads a loader that has no seed: call loader.seed(n) before you pass it to LoaderBatches"
        obstacle = PipelineGraph(run.pipe).replay_obstacle
        return obstacle and f"reads a loader in which {obstacle}"

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "LoaderBatches cannot read its loader in a worker process. Use num_workers=0 for the loader after it"
            )
        loader, run = self._hidden.value
        if (epoch := self.take_epoch()) is not None:
            run.set_epoch(epoch.number)
        yield from loader

    def __len__(self) -> int:
        """Return the number of batches of the loader."""
        return len(self._hidden.value[0])

    def __deepcopy__(self, _: object) -> NoReturn:
        raise TypeError(
            "LoaderBatches reads a loader, which cannot be copied, and DataLoader2 copies its pipeline. Iterate over "
            "the pipeline itself, or over StatefulShards(pipeline)"
        )


def _run_of(loader: Any) -> LoaderRun:
    """Return what determines the epochs of a loader.

    Raises:
        TypeError: it is another object.
    """
    data = getattr(loader, "dataset", None)
    if isinstance(data, StatefulShards):
        return LoaderRun(data.pipe, data.seed, loader.num_workers, data.set_epoch)
    if "torchdata.dataloader2" in sys.modules:
        from wds_datapipes.loading.service.loader import ShardDataLoader

        if isinstance(loader, ShardDataLoader):
            return LoaderRun(*loader.origin, loader.set_epoch)
    raise TypeError(
        "LoaderBatches requires a DataLoader2 with a ShardReadingService, or a DataLoader over a StatefulShards, not "
        f"{loader!r}. IterableWrapper(loader, deepcopy=False), of torch, takes any loader, but then there is no state"
    )
