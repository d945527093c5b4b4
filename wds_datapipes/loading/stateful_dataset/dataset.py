"""`StatefulShards`: a pipeline as a dataset whose states all loaders can exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from wds_datapipes.arguments import check_integer, check_seed, checks_calls
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.loading.checkpoint.format import checkpoints_in
from wds_datapipes.loading.data_parallel_group import DataParallelGroup, Distributed, advice_for_torchrun, ranks_of_run
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.epoch_run import refuse_hidden_stages
from wds_datapipes.loading.rank_facts import facts_of
from wds_datapipes.loading.splitting import SPLIT_TWICE, check_replicated, is_called_by_accelerate
from wds_datapipes.loading.stateful_dataset.dataset_loop import DatasetLoop
from wds_datapipes.loading.unknown_length import unknown_length_error
from wds_datapipes.pipes.graph import PipelineGraph
from wds_datapipes.pipes.sharding import check_batch_sizes
from wds_datapipes.pipes.split_advice import advice_for_split, is_read_by_shard, log_idle_processes
from wds_datapipes.pipes.state.pipeline_state import refusing_corrupt_states
from wds_datapipes.user_warnings import warn_user


@checks_calls
class StatefulShards(IterableDataset[Any]):
    """A dataset that runs a pipeline, with mid-epoch states, in torch's ``DataLoader`` or ``StatefulDataLoader``.

    It splits the shards between ranks and workers itself, at the ``.sharding_filter()`` of the pipeline. If there are
    several ranks, create it after ``init_process_group``. The order of each epoch depends on ``seed``, and is the same
    as that of a ``DataLoader2`` with that seed and a `ShardReadingService` (with the same ``distributed``, if there are
    several ranks).

    With torch's ``DataLoader``, loop over ``tracked(loader)`` and call `state_dict` on the dataset. A
    ``StatefulDataLoader`` calls it itself, unless ``with_epoch`` divides the pipeline into epochs: then loop over
    ``tracked(loader)``, too. `load_state_dict` accepts the states of both, and of ``DataLoader2``.

    Args:
        pipe: the pipeline.
        seed: the seed of the orders, the same on all ranks.
        distributed: the ranks that share the data. By default, all ranks of the default process group, if there is one.
            A ``ProcessGroup`` or a one-dimensional ``DeviceMesh``, such as ``mesh["dp"]``, is the data-parallel group
            of this rank: ranks at the same place in their groups read the same items. The pair ``(rank, world_size)``
            describes the group without a process group. ``False`` declares that the pipeline already reads only the
            share of this rank.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or this process is not in the group that it passes.
        RuntimeError: ``distributed`` is True, but there is no process group; or the ranks differ in their seeds, shards
            or groups, or, during iteration, in their workers.
        StateError: a stage of the pipeline has no position, and its epochs are not reproducible from seeds.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from wds_datapipes.testing import build_shard
        >>> shard = build_shard("train.tar", [{"__key__": str(n), "cls": str(n)} for n in range(4)])
        >>> pipe = ShardList(shard).sharding_filter().load_wds_shards().group_samples().to_tuple("__key__")
        >>> data = StatefulShards(pipe)
        >>> for batch in data.tracked(DataLoader(data, batch_size=2, num_workers=1)):
        ...     print(batch)
        ...     break
        [('0', '1')]
        >>> state = data.state_dict()
        >>> data = StatefulShards(pipe)
        >>> data.load_state_dict(state)
        >>> list(DataLoader(data, batch_size=2, num_workers=1))
        [[('2', '3')]]
    """

    def __init__(self, pipe: IterDataPipe[Any], *, seed: int = 0, distributed: Distributed = None) -> None:
        super().__init__()
        if not isinstance(pipe, IterDataPipe):
            raise TypeError(f"StatefulShards requires a pipeline, not {pipe!r}")
        seed = check_seed(seed)
        self._group = _group_of(distributed)
        graph = PipelineGraph(pipe)
        refuse_hidden_stages(graph)
        check_replicated(graph, self._group)
        self.pipe = pipe
        self.seed = seed
        self.epochs = DatasetLoop(graph, seed, self._group)
        self._is_checked = False
        self._loader_size: int | None = None  # unknown
        self._knows_ranks = distributed is not None
        self._ranks_of_run = ranks_of_run()
        self._agreement: Ranks | None = None
        if self._group.is_split and self._has_other_ranks:
            self._agreement = Ranks(graph)
            self._agreement.compare(facts_of(graph, self._group, seed=seed))

    def set_epoch(self, epoch: int) -> None:
        """Select the number of the next epoch, which determines its order together with the seed.

        A ``StatefulDataLoader`` does not save the selection until that epoch begins.

        Args:
            epoch: the number. If none is selected, each epoch's order follows from that of the previous epoch.
        """
        if self._has_other_ranks and is_called_by_accelerate():
            raise RuntimeError(SPLIT_TWICE)
        self.epochs.shared.choose(check_integer("epoch", epoch, 0))

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield one epoch from a loader of this dataset, and record the batches that the loop receives.

        Between two batches, `state_dict` returns the position of the loop. The workers continue meanwhile; the items
        that they have prefetched are not in the state, and the run that loads it produces them again.

        Args:
            loader: torch's ``DataLoader``, or a ``StatefulDataLoader``, with any ``batch_size``, ``collate_fn`` and
                number of workers.

        Raises:
            ValueError: the loader has another dataset.
            StateError: the loader's persistent workers were started by an untracked loop; or the number of workers has
                changed, although ``with_epoch`` continues the same stream.
        """
        if loader.dataset is not self:
            raise ValueError("tracked() requires a loader of this dataset")
        self._loader_size = loader.batch_size or 1
        self._check_split(max(loader.num_workers, 1))
        yield from self.epochs.track(loader)

    def state_dict(self) -> dict[str, str]:
        """Return the position of the loop, or of the worker that calls this, as a dictionary with a single string.

        Raises:
            StateError: worker processes read the data, but the loop is not ``tracked``.
        """
        return self.epochs.state_dict()

    @refusing_corrupt_states()
    def load_state_dict(self, state: Mapping[str, Any], *, amend: bool = False) -> None:
        """Resume from a state at the next iteration. Call this before a loader of the dataset starts its workers.

        If the number of ranks or workers has changed, the rest of the epoch is resharded. If there are several ranks,
        pass all of their states to `merge_states`, and load the result: the state of this rank alone suffices in the
        middle of its epoch, but not at the end.

        Args:
            state: the return value of ``state_dict()`` of a `StatefulShards`, ``StatefulDataLoader``, ``DataLoader2``
                or `ShardReadingService`, or of `merge_states`.
            amend: whether the pipeline may differ from the one that saved the state in functions, batch sizes, weights
                and datasets, as long as no sample is repeated or lost. A new phase of the run begins at this step.

        Raises:
            StateError: the argument is none of these, or belongs to another pipeline, seed or rank, or to a rank whose
                epoch ended while other ranks may have been mid-epoch. At the first item: it is not the state of all
                ranks, or the pipeline cannot be resharded.
        """
        self.epochs.load(state, amend=amend)

    def end_epoch(self) -> None:
        """End the current epoch early, after a loop has received part of it: the next iteration begins the next one.

        A new loop does so anyway, but the state shows it only after the first item. Call this between two loops.
        """
        self.epochs.end()

    def __len__(self) -> int:
        """Return the number of items of an epoch on this rank, as set by ``with_epoch(n)`` or ``with_length(n)``.

        torch's ``DataLoader`` computes its number of batches from this as if it had one worker. Several workers yield
        more batches if their shares are not multiples of ``batch_size``. The ``len()`` of a loader is exact if the
        pipeline itself batches: use ``.batch(b).with_epoch(n)`` and ``batch_size=None``.

        Raises:
            TypeError: the length of the pipeline is unknown.
        """
        try:
            return len(self.epochs.part_of_rank())
        except TypeError as error:
            raise unknown_length_error(error) from None

    def __iter__(self) -> Iterator[Any]:
        if self._has_other_ranks and is_read_by_shard():
            raise RuntimeError(SPLIT_TWICE)
        info = get_worker_info()
        if info is None and self.epochs.has_begun:
            self.epochs.leave(self.epochs.checkpoints)
        if info is None or info.id == 0:
            self._check_split(1 if info is None else info.num_workers)
        return iter(self.epochs)

    def _check_split(self, workers: int) -> None:
        """Warn once if several workers or ranks read the same data, or if some have none.

        Args:
            workers: the number of processes that read on this rank.

        Raises:
            RuntimeError: the dataset was created before the ranks were known.
            ValueError: the batches of the pipeline do not match the ``global_batch_size`` of its source.
        """
        if not self._knows_ranks and ranks_of_run() > self.epochs.state.rank.ranks:
            raise RuntimeError(
                f"There are {ranks_of_run()} ranks, but this StatefulShards was created before init_process_group was "
                "called, so each rank would read all of the data. Create it after that call"
            )
        check_batch_sizes(self.pipe, self.epochs.state.rank.ranks, self._loader_size)
        is_checked, self._is_checked = self._is_checked, True
        if self._agreement is not None and (get_worker_info() is None or not self.epochs.shared.loop.is_tracked):
            self._agreement.compare(facts_of(self.epochs.state.graph, self._group, workers=workers))
        if is_checked or self.epochs.shared.read(0).begun:  # other processes may have begun earlier epochs
            return
        ranks = self.epochs.state.rank.ranks
        advice = "" if self._knows_ranks else advice_for_torchrun()
        if advice := advice or advice_for_split(self.pipe, workers=workers, ranks=ranks, knows_workers=True):
            warn_user(advice)
        log_idle_processes(self.pipe, workers=workers, ranks=ranks)

    def begin_loop(self, batch_size: int | None, last: Any) -> None:
        """Prepare for a loop over a ``StatefulDataLoader``, and record how the last loop has left its workers.

        Args:
            batch_size: the batch size of the loader.
            last: the iterator of the last loop; None if there was none, or no workers.
        """
        self._loader_size = batch_size or 1
        if last is not None and not self.epochs.is_tracked:
            self.epochs.leave(lambda: checkpoints_in(last.state_dict()))

    @property
    def _has_other_ranks(self) -> bool:
        """Whether there are other ranks, whether or not they share the data."""
        return max(self.epochs.state.rank.ranks, self._ranks_of_run) > 1


def _group_of(distributed: Distributed) -> DataParallelGroup:
    """Return the ranks that share the data: by default, those of the default process group, if there is one."""
    group = DataParallelGroup.of(True if distributed is None else distributed)
    if group.is_known:
        return group
    if distributed is None:
        return DataParallelGroup()
    raise RuntimeError(
        "StatefulShards(distributed=True) requires a process group: first call torch.distributed.init_process_group, "
        "or pass distributed=(rank, world_size)"
    )
