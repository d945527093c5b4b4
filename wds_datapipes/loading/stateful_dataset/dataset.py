"""`StatefulShards`: a pipeline as a dataset whose states all loaders can exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from wds_datapipes.arguments import check_integer, check_seed, checks_calls
from wds_datapipes.datapipes import IterDataPipe
from wds_datapipes.epoch import NO_EPOCH, Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.amendment import adopt, begin_run
from wds_datapipes.loading.checkpoint.counted_epoch import counts_epoch, without_counted_epoch
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, checkpoints_in, state_of, state_of_stream
from wds_datapipes.loading.checkpoint.received import counts_steps, leave, steps_received
from wds_datapipes.loading.checkpoint.resharding import check_ranks, of_all_ranks
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.epoch_run import refuse_hidden_stages
from wds_datapipes.loading.splitting import (
    SPLIT_TWICE,
    DataParallelGroup,
    Distributed,
    advice_for_torchrun,
    check_replicated,
    facts_of,
    has_own_stage,
    is_called_by_accelerate,
    ranks_of_run,
)
from wds_datapipes.loading.stateful_dataset.epochs import Epochs
from wds_datapipes.loading.stateful_dataset.tracking import (
    RecordedBatch,
    SharedEpochs,
    TrackedEpoch,
    WorkerRow,
    begin_recording,
)
from wds_datapipes.loading.unknown_length import unknown_length_error
from wds_datapipes.pipes.instance import own_worker
from wds_datapipes.pipes.sharding import advice_for_split, check_batch_sizes, is_read_by_shard
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.pipeline_state import difference_of_ranks, refusing_corrupt_states, replay_reason
from wds_datapipes.received_epochs import ReceivedEpochs
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
        refuse_hidden_stages(pipe)
        check_replicated(pipe, self._group)
        self.pipe = pipe
        self.seed = seed
        self._stages = descriptions(pipe)
        self._phases = begin_run(pipe)
        self._counts_steps = counts_steps(pipe)
        self._is_alike = not difference_of_ranks(pipe)
        self._shared = SharedEpochs()
        self.epochs = Epochs(pipe, seed, self._shared, self._group, replay_reason(pipe))
        self._tracked: TrackedEpoch | None = None
        self._is_checked = False
        self._loader_size: int | None = None  # unknown
        self._knows_ranks = distributed is not None
        self._ranks_of_run = ranks_of_run()
        self._agreement: Ranks | None = None
        if self._group.is_split and self._has_other_ranks:
            self._agreement = Ranks(pipe)
            self._agreement.compare(facts_of(pipe, self._group, seed=seed))

    def set_epoch(self, epoch: int) -> None:
        """Select the number of the next epoch, which determines its order together with the seed.

        A ``StatefulDataLoader`` does not save the selection until that epoch begins.

        Args:
            epoch: the number. If none is selected, each epoch's order follows from that of the previous epoch.
        """
        if self._has_other_ranks and is_called_by_accelerate():
            raise RuntimeError(SPLIT_TWICE)
        self._shared.choose(check_integer("epoch", epoch, 0))

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
        if not loader.num_workers:
            for batch in loader:
                self.epochs.is_over = self.epochs.is_drained = False  # the loop is not over, but the pipeline may be
                yield batch
            self.epochs.is_over, self.epochs.is_drained = True, False
            return
        self.epochs.is_tracked = True
        self._shared.set(is_tracked=True)
        iterator, tracked = None, None
        try:
            tracked = self._tracking(loader)
            iterator = begin_recording(loader)
            self._tracked = tracked
            for recorded in iterator:
                if not isinstance(recorded, RecordedBatch):
                    raise StateError(
                        "The workers of this loader do not report their positions, because an untracked loop started "
                        "them. With persistent_workers, use tracked() from the first epoch on"
                    )
                tracked.note(recorded, self._shared.read(recorded.process))
                if not recorded.is_empty:
                    yield recorded.batch
            tracked.end(self._shared.read(0))
        finally:
            if self.epochs.spans_epochs and not (tracked is not None and tracked.is_over and tracked.is_in_order):
                # Start new workers: persistent ones are past the position of the loop, or hold other workers' streams.
                loader._iterator = None
            # Workers that are still starting belong to this loop and must end before the loop is recorded as over.
            iterator = None
            self.epochs.is_tracked = False
            self._shared.set(is_tracked=False)

    def state_dict(self) -> dict[str, str]:
        """Return the position of the loop, or of the worker that calls this, as a dictionary with a single string.

        Raises:
            StateError: worker processes read the data, but the loop is not ``tracked``.
        """
        if (
            self.epochs.spans_epochs
            and get_worker_info() is not None
            and not self._shared.read(own_worker().worker).loaded
        ):
            return state_of_stream()  # StatefulDataLoader calls this with each batch, and cannot know the epoch's end
        return state_of(self._checkpoints())

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
        loaded, info = checkpoints_in(state), get_worker_info()
        worker = None if info is None else own_worker(self.epochs.rank)
        loaded = self.adopt(loaded, amend=amend)
        for checkpoint in loaded:
            checkpoint.check_run(self.seed, worker)
        if worker is None:
            check_ranks(loaded, self.epochs.rank, self.pipe)
        if info is None:
            loaded = without_counted_epoch(loaded, state, self.pipe)
        if not all(checkpoint.is_over for checkpoint in loaded):  # then it counts as over on no rank
            loaded = [replace(checkpoint, is_over=False) for checkpoint in loaded]
        self._resume_from(loaded)

    def adopt(self, loaded: Sequence[Checkpoint], *, amend: bool = False) -> list[Checkpoint]:
        """Return the checkpoints for this pipeline, and adopt the history of the run.

        Raises:
            StateError: they belong to another pipeline.
        """
        adopted = adopt(loaded, self.pipe, self._stages, self.epochs.rank.ranks, amend=amend)
        phases = adopted[0].phases
        if get_worker_info() is None or len(phases) > len(self._phases):  # the main process has all workers' states
            self._phases = phases or self._phases
        return adopted

    def end_epoch(self) -> None:
        """End the current epoch early, after a loop has received part of it: the next iteration begins the next one.

        A new loop does so anyway, but the state shows it only after the first item. Call this between two loops.
        """
        found = self._checkpoints()
        self._resume_from([replace(each.ended(), epoch=leave(each, self.pipe)) for each in found])

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
            self._leave_epoch(self._checkpoints)
        if info is None or info.id == 0:
            self._check_split(1 if info is None else info.num_workers)
        return iter(self.epochs)

    def _check_split(self, workers: int) -> None:
        """Warn once if several workers or ranks read the same data.

        Args:
            workers: the number of processes that read on this rank.

        Raises:
            RuntimeError: the dataset was created before the ranks were known.
            ValueError: the batches of the pipeline do not match the ``global_batch_size`` of its source.
        """
        if not self._knows_ranks and ranks_of_run() > self.epochs.rank.ranks:
            raise RuntimeError(
                f"There are {ranks_of_run()} ranks, but this StatefulShards was created before init_process_group was "
                "called, so each rank would read all of the data. Create it after that call"
            )
        check_batch_sizes(self.pipe, self.epochs.rank.ranks, self._loader_size)
        is_checked, self._is_checked = self._is_checked, True
        if self._agreement is not None and (get_worker_info() is None or not self._shared.loop.is_tracked):
            self._agreement.compare(facts_of(self.pipe, self._group, workers=workers))
        advice = "" if self._knows_ranks else advice_for_torchrun()
        advice = advice or advice_for_split(
            self.pipe, workers=workers, ranks=self.epochs.rank.ranks, knows_workers=True
        )
        if advice and not is_checked:
            warn_user(advice)

    def _checkpoints(self) -> list[Checkpoint]:
        """Return the position on this rank, or the loaded checkpoints of all ranks if no epoch has started since.

        Raises:
            StateError: worker processes read the data, but the loop is not ``tracked``.
        """
        info, row = get_worker_info(), self._shared.read(own_worker().worker)
        if row.loaded:
            return self.epochs.loaded
        if info is not None:
            return [self._saved(row, workers=info.num_workers, parts=[self.epochs.part], worker=self.epochs.number)]
        tracked = self._tracked
        if tracked is not None and tracked.row == self._shared.read(tracked.process):
            parts = tracked.states()
            facts: dict[str, Any] = {"is_over": tracked.is_over, "workers": len(parts), "turn": tracked.turn}
            return [self._saved(tracked.row, **facts, parts=parts, received=tracked.received)]
        if self._shared.loop.has_workers:
            raise StateError(
                "The positions of the worker processes are unknown. Loop over data.tracked(loader), call "
                "StatefulDataLoader.state_dict(), or use DataLoader2 with ShardReadingService"
            )
        facts = {"is_over": self.epochs.is_over, "is_drained": self.epochs.is_drained}
        return [self._saved(row, **facts, parts=[self.epochs.part])]

    def begin_loop(self, batch_size: int | None, last: Any) -> None:
        """Prepare for a loop over a ``StatefulDataLoader``, and record how the last loop has left its workers.

        Args:
            batch_size: the batch size of the loader.
            last: the iterator of the last loop; None if there was none, or no workers.
        """
        self._loader_size = batch_size or 1
        if last is not None and not self.epochs.is_tracked:
            self._leave_epoch(lambda: checkpoints_in(last.state_dict()))

    def _leave_epoch(self, find: Callable[[], Sequence[Checkpoint]]) -> None:
        """Record how the loop has left its epoch, before the next one begins.

        Args:
            find: returns the position of the loop.
        """
        row = self._shared.read(0)
        if not self._counts_steps or not row.begun or row.loaded:
            return
        with suppress(StateError):
            saved = find()[0]
            left = steps_received(saved, self.pipe)
            self.epochs.received, self.epochs.known = saved.epoch.received.leave(left), row.begun
            self._shared.leave(left, row.begun)

    def _saved(self, row: WorkerRow, *, received: ReceivedEpochs | None = None, **facts: Any) -> Checkpoint:
        """Return the position of the loop in the epoch of a row; before the first epoch, it is the end of epoch -1."""
        epochs, epoch = self.epochs, Epoch.before(self.seed) if row.epoch == NO_EPOCH else row.epoch
        received = epochs.received if received is None else received
        epoch = replace(epoch, wanted=self._shared.chosen(row.begun))
        saved = Checkpoint(
            stages=self._stages,
            epoch=replace(epoch, received=received) if self._counts_steps else epoch,
            rank=epochs.rank.rank,
            ranks=epochs.rank.ranks,
            phases=self._phases,
            **facts,
        )
        return of_all_ranks(saved, self.pipe) if self._is_alike else saved

    def _resume_from(self, loaded: list[Checkpoint]) -> None:
        """Resume from checkpoints at the next iteration."""
        info, shared = get_worker_info(), self._shared
        self._tracked = None
        last = loaded[0]
        begun = shared.begun if info is None else shared.read(info.id).begun
        epoch = NO_EPOCH if last.epoch.next is None else last.epoch
        row = WorkerRow(epoch, begun, loaded=self.epochs.load(loaded))
        shared.write(row, None if info is None else info.id)
        # A StatefulDataLoader loads its state when iteration begins, after the next epoch was selected.
        if info is None and shared.chosen(begun) is None:
            shared.choose(last.epoch.wanted if last.is_over else None)

    @property
    def _has_other_ranks(self) -> bool:
        """Whether there are other ranks, whether or not they share the data."""
        return max(self.epochs.rank.ranks, self._ranks_of_run) > 1

    def _tracking(self, loader: DataLoader[Any]) -> TrackedEpoch:
        """Return an object that tracks the next epoch of a loader."""
        epochs, last, row = self.epochs, self._tracked, self._shared.read(0)
        turn, parts = 0, [WorkerState()] * loader.num_workers
        self._leave_epoch(self._checkpoints)
        received, is_resumed = epochs.received_before(row), False
        epochs.before = None
        if row.loaded:
            resumed_from = epochs.placed(loader.num_workers)
            epochs.loaded = [resumed_from]  # so that workers need not reshard it again
            received, is_resumed = resumed_from.epoch.received, not resumed_from.is_over
            turn, parts = 0 if resumed_from.is_over else resumed_from.turn, [*resumed_from.parts] or parts
        elif epochs.spans_epochs:
            epochs.check_workers(row, loader.num_workers, is_tracked=True)
        if not row.loaded and epochs.spans_epochs and last is not None:
            found = last.states()
            epochs.before = self._saved(last.row or row, workers=len(found), parts=found)
            parts = [part.renewed() for part in found]
        return TrackedEpoch(parts, turn, received, is_resumed=is_resumed)


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


def missing_position(loader: Any, state: Mapping[str, Any]) -> str:
    """Return why a ``StatefulDataLoader`` cannot resume from a state that it has saved, or ""."""
    steps = state.get("_num_yielded"), state.get("_steps_since_snapshot"), state.get("_snapshot", {})
    if not (any(steps[:2]) or steps[2].get("_snapshot_step")) or not has_own_stage(loader.dataset):
        return ""
    return (
        "This state of a StatefulDataLoader was saved after the first batch, and does not contain the position of its "
        "pipeline in the epoch: some samples would be repeated and others lost. Pass StatefulShards(pipe) instead of "
        "the pipeline: the state of StatefulDataLoader(StatefulShards(pipe), ...) is exact in the middle of an epoch"
    )


def load_ended_epoch(data: Any, state: Mapping[str, Any]) -> bool:
    """Load a state of a ``StatefulDataLoader`` into its dataset if a trainer has counted its epoch.

    Otherwise, the loader would begin that epoch again without any items, and the trainer would treat it as the next
    one.

    Args:
        data: the dataset of the loader.
        state: the state to load.

    Returns:
        bool: whether the dataset has loaded it.

    Raises:
        StateError: the state belongs to another rank, or to one whose epoch ended while other ranks may have been
            mid-epoch.
    """
    if not state or not isinstance(data, StatefulShards):
        return False
    state = {**state, "_steps_since_snapshot": 0}  # the loader itself repeats these steps
    check_ranks(data.adopt(checkpoints_in(state)), data.epochs.rank, data.pipe)
    if not counts_epoch(state):
        return False
    data.load_state_dict(state)
    return True
