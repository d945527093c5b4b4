"""`StatefulShards`: a pipeline as a data set whose state is that of the other loaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in, state_of, state_of_stream
from wds_datapipes.loading.lengths import unknown_length
from wds_datapipes.loading.lightning import without_ended_epoch
from wds_datapipes.loading.philox import SeedGenerator
from wds_datapipes.loading.rank_agreement import RankAgreement, facts_of, lists_of
from wds_datapipes.loading.rank_and_worker import RankIdentity, own_worker
from wds_datapipes.loading.service.split_checks import (
    SPLIT_TWICE,
    advice_for_split,
    advice_for_torchrun,
    is_called_by_accelerate,
    is_called_by_shard,
    ranks_of_run,
)
from wds_datapipes.loading.stateful_dataset.epochs import Epochs
from wds_datapipes.loading.stateful_dataset.shared_state import SharedEpochs, WorkerRow
from wds_datapipes.loading.stateful_dataset.state_checks import (
    check_place,
    check_ranks,
    check_replay,
    check_seed,
    ends_together,
)
from wds_datapipes.loading.stateful_dataset.tracking import RecordedBatch, TrackedEpoch, begin_recording
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.pipeline_state import replay_reason
from wds_datapipes.pipes.state.replay import ReplayedItems
from wds_datapipes.user_warnings import warn_user

__all__ = ["StatefulShards"]


class StatefulShards(IterableDataset[Any]):
    """Give a pipeline to torch's ``DataLoader``, or torchdata's ``StatefulDataLoader``, with a state in mid-epoch.

    It splits the shards between ranks and workers itself, wherever the pipeline has its ``.sharding_filter()``; it has
    to be made behind ``init_process_group``, if there are ranks. The orders of the epochs follow from ``seed``, and are
    those of a ``DataLoader2`` of that seed with a `ShardReadingService` (``distributed=True``, if there are ranks).

    With torch's ``DataLoader``, loop over ``tracked(loader)``, and ask `state_dict` here. A ``StatefulDataLoader`` asks
    itself, unless ``with_epoch`` cuts the pipeline: then loop over ``tracked(loader)``, too. `load_state_dict` takes
    the states of both, and of ``DataLoader2``.

    Args:
        pipe: the pipeline.
        seed: what the orders follow from.

    Raises:
        StateError: a stage of the pipeline has no position, and an epoch does not follow from its seeds.

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

    def __init__(self, pipe: IterDataPipe[Any], *, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(pipe, IterDataPipe):
            raise TypeError(f"StatefulShards takes a pipeline, not {pipe!r}")
        if not isinstance(seed, int):
            raise TypeError(f"seed is a number, not {seed!r}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is a number from 0 with at most 64 bits, not {seed}")
        if reason := replay_reason(pipe):
            pipe = ReplayedItems(pipe, reason)
        self.pipe = pipe
        self.seed = seed
        self._stages = descriptions(pipe)
        self._board = SharedEpochs()
        self._epochs = Epochs(pipe, seed, self._board)
        self._tracked: TrackedEpoch | None = None
        self._is_checked = False
        self._agreement: RankAgreement | None = None
        if self._epochs.ranks > 1:
            self._agreement = RankAgreement(pipe, RankIdentity(self._epochs.ranks, self._epochs.rank))
            self._agreement.compare(lists_of(pipe))

    def set_epoch(self, epoch: int) -> None:
        """Have the order of the next epoch follow from its number and the seed, as some trainers want it.

        A ``StatefulDataLoader`` does not save the choice before that epoch begins.

        Args:
            epoch: the number. Without it, the order of an epoch follows from that of the epoch before.
        """
        if self._epochs.ranks > 1 and is_called_by_accelerate():
            raise RuntimeError(SPLIT_TWICE)
        if epoch < 0:
            raise ValueError(f"epoch is a number from 0, not {epoch!r}")
        self._board.choose(epoch)

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield what a loader of this data set yields, for an epoch, and take note of what the loop gets.

        Between two batches, `state_dict` tells where the loop is. The workers go on meanwhile; what they have made
        ahead is not in the state, and is made again by the run that loads it.

        Args:
            loader: torch's ``DataLoader``, or a ``StatefulDataLoader``, with any ``batch_size``, ``collate_fn`` and
                number of workers.

        Raises:
            ValueError: the loader is that of another data set.
            StateError: its workers were started by a loop that was not tracked, and stay for all epochs; or there
                was another number of them before, and ``with_epoch`` goes on from there.
        """
        if loader.dataset is not self:
            raise ValueError("tracked() takes a loader of this very data set")
        self._check_split(max(loader.num_workers, 1))
        if not loader.num_workers:
            for batch in loader:
                self._epochs.is_over = self._epochs.is_drained = False  # the loop is not, even if the pipeline is
                yield batch
            self._epochs.is_over, self._epochs.is_drained = True, False
            return
        self._board.is_tracked = self._epochs.is_tracked = True
        iterator, tracked = None, None
        try:
            tracked = self._tracking(loader)
            iterator = begin_recording(loader)
            self._tracked = tracked
            for told in iterator:
                if not isinstance(told, RecordedBatch):
                    raise StateError(
                        "The workers of this loader do not tell where they are, since they were started by a loop "
                        "that was not tracked. With persistent_workers, use tracked() from the first epoch on"
                    )
                tracked.note(told, self._board.read(told.process))
                if not told.is_empty:
                    yield told.batch
            tracked.end(self._board.read(0))
        finally:
            if self._epochs.lasts and not (tracked is not None and tracked.is_over and tracked.is_in_order):
                # Workers that stay are not where the loop has stopped, or have each other's streams. Others begin.
                loader._iterator = None
            # Workers that have only now begun are still of this loop, and have ended before it is said to be over.
            iterator = None
            self._board.is_tracked = self._epochs.is_tracked = False

    def state_dict(self) -> dict[str, str]:
        """Return where the loop is, or, in a worker, where the worker is, as a dictionary of one text.

        Raises:
            StateError: worker processes read the data, and the loop is not ``tracked``.
        """
        if self._epochs.lasts and get_worker_info() is not None and not self._board.read(own_worker().worker_id).loaded:
            return state_of_stream()  # a StatefulDataLoader asks with each batch, and cannot know where the epoch ends
        return state_of(self._checkpoints())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state when it is iterated next. It comes before a loader of the data set starts its workers.

        With another number of ranks or workers than before, what is left of the epoch is dealt anew. If there are
        ranks, load `merge_states` of what all of them have saved: the state of this one alone is enough in the middle
        of its epoch, and not where that has ended.

        Args:
            state: what ``state_dict()`` of a `StatefulShards`, ``StatefulDataLoader``, ``DataLoader2`` or
                `ShardReadingService` has returned; or `merge_states`.

        Raises:
            StateError: it is none of these, or that of another pipeline, seed or rank, or that of a rank whose epoch
                ended while those of others may have gone on. When the first item is asked for: it is not that of all
                ranks, or the pipeline cannot be dealt anew.
        """
        loaded, info, board = checkpoints_in(state), get_worker_info(), self._board
        place = None if info is None else self._epochs.place(info.num_workers)
        for checkpoint in loaded:
            checkpoint.check(self._stages, self._epochs.ranks)
            check_seed(checkpoint, self._seeds)
            check_replay(checkpoint)
            check_place(checkpoint, place)
        if place is None:
            self.check_ranks(loaded)
        if info is None:
            loaded = without_ended_epoch(loaded)
        if not all(checkpoint.is_over for checkpoint in loaded):  # on no rank, then
            loaded = [replace(checkpoint, is_over=False) for checkpoint in loaded]
        self._tracked = None
        last = loaded[0]
        begun = board.begun if info is None else board.read(info.id).begun
        row = WorkerRow(begun=begun, loaded=self._epochs.load(loaded))
        if last.next is not None:
            row = row._replace(epoch=last.epoch + 1, seed=last.seed, first=last.first, next=last.next)
        board.write(row, None if info is None else info.id)
        # A StatefulDataLoader loads its state when it is iterated, after the next epoch was chosen.
        if info is None and board.chosen(begun) is None:
            board.choose(last.wanted if last.is_over else None)

    def check_ranks(self, loaded: Sequence[Checkpoint]) -> None:
        """Make sure that this rank can go on from what was loaded.

        Raises:
            StateError: it cannot.
        """
        check_ranks(loaded, self._epochs.rank, self._epochs.ranks, lambda: ends_together(self.pipe))

    def told(self, batch: Any) -> Any:
        """Return a batch, in a worker, with the place of the worker behind it if the loop is tracked."""
        return self._epochs.told(batch)

    def told_end(self, *batch: Any) -> Any:
        """Return the last batch of a worker, if there is one more, with the place where its epoch has ended."""
        return self._epochs.told_end(*batch)

    def __len__(self) -> int:
        """Return how many items an epoch has on this rank, as ``with_epoch(n)`` or ``with_length(n)`` tells.

        torch's ``DataLoader`` computes from it how many batches it makes, as if it had one worker. Several make more
        where their shares are no multiples of ``batch_size``. The ``len()`` of a loader is exact where the pipeline
        makes the batches: with ``.batch(b).with_epoch(n)``, and ``batch_size=None``.

        Raises:
            TypeError: the pipeline does not know.
        """
        try:
            return len(self.pipe)
        except TypeError as error:
            raise unknown_length(error) from None

    def __iter__(self) -> Iterator[Any]:
        if self._epochs.ranks > 1 and is_called_by_shard():
            raise RuntimeError(SPLIT_TWICE)
        info = get_worker_info()
        if info is None or info.id == 0:
            self._check_split(1 if info is None else info.num_workers)
        return iter(self._epochs)

    def _check_split(self, workers: int) -> None:
        """Warn, once, where several workers or ranks read the same.

        Args:
            workers: how many processes of this rank read.

        Raises:
            RuntimeError: the ranks of the run are not known here.
        """
        if ranks_of_run() > self._epochs.ranks:
            raise RuntimeError(
                f"There are {ranks_of_run()} ranks, and this StatefulShards was made before init_process_group was "
                "called, so that each of them would read all data. Make it after that call"
            )
        is_checked, self._is_checked = self._is_checked, True
        if self._agreement is not None and (get_worker_info() is None or not self._board.is_tracked):
            self._agreement.compare(facts_of(self.pipe, workers))
        advice = advice_for_torchrun() or advice_for_split(
            self.pipe, workers=workers, ranks=self._epochs.ranks, knows_workers=True
        )
        if advice and not is_checked:
            warn_user(advice)

    def _checkpoints(self) -> list[Checkpoint]:
        """Return where the loop is on this rank; or what was loaded, for all of its ranks, if it has not begun since.

        Raises:
            StateError: worker processes read the data, and the loop is not ``tracked``.
        """
        info, row = get_worker_info(), self._board.read(own_worker().worker_id)
        if row.loaded:
            return self._epochs.loaded
        if info is not None:
            return [self._saved(row, workers=info.num_workers, parts=[self._epochs.part], worker=self._epochs.number)]
        tracked = self._tracked
        if tracked is not None and tracked.row == self._board.read(tracked.process):
            parts = tracked.states()
            facts = {"is_over": tracked.is_over, "workers": len(parts), "turn": tracked.turn}
            return [self._saved(tracked.row, **facts, parts=parts)]
        if self._board.has_workers:
            raise StateError(
                "The places of worker processes are not known here. Loop over data.tracked(loader), ask "
                "StatefulDataLoader.state_dict(), or use DataLoader2 with ShardReadingService"
            )
        facts = {"is_over": self._epochs.is_over, "is_drained": self._epochs.is_drained}
        return [self._saved(row, **facts, parts=[self._epochs.part])]

    def _saved(self, row: WorkerRow, **facts: Any) -> Checkpoint:
        """Return where the loop is in the epoch of a row; before the first one, the one before that is over."""
        begun, epochs = row.epoch > 0, self._epochs
        place = {"rank": epochs.rank, "ranks": epochs.ranks, "distributed": epochs.distributed, "workers": 0, "turn": 0}
        return Checkpoint(
            stages=self._stages,
            seed=row.seed if begun else self.seed,
            epoch=row.epoch - 1,
            first=row.first if begun else self._seeds[0],
            next=row.next if begun else self.seed,
            engines=None,
            wanted=self._board.chosen(row.begun),
            **{"is_over": False, **place, **facts},
        )

    @property
    def _seeds(self) -> list[int]:
        """The seed of the first epoch; and the one that it has with ranks if there are none, or the reverse."""
        # Ranks draw the first seed from the one that is given; and there may have been ranks, and are none now.
        seeds = [self.seed, SeedGenerator(self.seed).generate_shared_seed()]
        return seeds[::-1] if self._epochs.distributed else seeds

    def _tracking(self, loader: DataLoader[Any]) -> TrackedEpoch:
        """Return what keeps track of an epoch."""
        epochs, last, row = self._epochs, self._tracked, self._board.read(0)
        turn, parts = 0, [WorkerState(None)] * loader.num_workers
        epochs.before = None
        if row.loaded:
            going_on = epochs.placed(loader.num_workers)
            epochs.loaded = [going_on]  # so that not each worker deals anew
            turn, parts = 0 if going_on.is_over else going_on.turn, [*going_on.parts] or parts
        elif epochs.lasts:
            epochs.check_stream(row, loader.num_workers, is_tracked=True)
        if not row.loaded and epochs.lasts and last is not None:
            found = last.states()
            epochs.before = self._saved(last.row or row, workers=len(found), parts=found)
            parts = [part.renewed() for part in found]
        return TrackedEpoch(parts, turn)
