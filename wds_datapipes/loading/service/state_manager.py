"""The state of a reading service: it saves the position of its loop, and resumes from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.amendment import adopt, begin_run
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, checkpoints_in, state_of
from wds_datapipes.loading.checkpoint.received import counts_steps, steps_received
from wds_datapipes.loading.checkpoint.resharding import check_ranks, of_all_ranks, state_of_rank
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.epoch import EpochSeeds, is_drawn
from wds_datapipes.loading.splitting import DataParallelGroup, facts_of
from wds_datapipes.loading.workers.loop_items import LoopItems
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.pipeline_state import difference_of_ranks, replay_reason
from wds_datapipes.pipes.state.replay import ReplayedItems, is_replayed
from wds_datapipes.received_epochs import UNKNOWN, Left
from wds_datapipes.types import Instance


class StateManager:
    """Saves and loads the state of a loop.

    Args:
        group: the ranks that share the data.
        workers: the number of worker processes.

    Attributes:
        group: the ranks that share the data, which the loader determines when it starts.
        seeds: the seeds of the epochs.
        resumed_from: the checkpoint from which the next epoch resumes, if any.
        refusal: the reason why there is no state, or "".
        replay_reason: the reason why the main process replays the pipeline to resume, or "".
        replay_reason_of_workers: the reason why each worker replays its own pipeline, or "".
        is_resumed: whether the current epoch was resumed mid-epoch.
        given_rank: the rank that another reading service has assigned to the pipeline, or ``None``.
    """

    def __init__(self, group: DataParallelGroup, workers: int) -> None:
        self.seeds = EpochSeeds()
        self.resumed_from: Checkpoint | None = None
        self.refusal = ""
        self.replay_reason = self.replay_reason_of_workers = ""
        self.is_resumed = False
        self.given_rank: int | None = None
        self.group = group
        self._workers = workers
        self._pipe: Any = None  # before the split, if it is known
        self._described: list[str] = []
        self._phases: list[dict[str, Any]] = []  # of a new run
        self._alike: Any = None  # the pipeline, if one state is that of all ranks
        self._counted: Any = None  # the pipeline, if its states record the steps of the loop
        self._loaded: list[Checkpoint] = []
        self._seeds_too, self._amend = False, False
        self._seed: int | None = None

    @property
    def parts(self) -> Sequence[WorkerState | None]:
        """The state from which each worker resumes; None means the beginning of an epoch."""
        if self.resumed_from is None or not self.resumed_from.parts:
            return [None] * max(self._workers, 1)
        return self.resumed_from.parts

    def load(self, state: Any, *, seeds_too: bool = False, amend: bool = False) -> None:
        """Load a state for a pipeline that is described later.

        Args:
            state: the state of any of the loaders.
            seeds_too: whether to take the seed of the loader from the state, too.
            amend: whether the pipeline may change the run.

        Raises:
            StateError: the argument is not a state.
        """
        self._loaded = checkpoints_in(state)
        self._seeds_too, self._amend = seeds_too, amend

    def describe(self, pipe: Any) -> None:
        """Record the pipeline before the split."""
        self._pipe = pipe
        self._described = descriptions(pipe)
        self._phases = begin_run(pipe)
        self._alike = None if difference_of_ranks(pipe) else pipe
        self._counted = pipe if counts_steps(pipe) else None

    def expect(self, seed: int | None) -> None:
        """Record the seed that was set on the loader since the previous epoch began, or ``None``."""
        self._seed = seed

    def compare(self, ranks: Ranks, pipe: Any) -> None:
        """Wait for all ranks, and find the epoch in which the run resumes; it is over if it is over on all of them.

        Args:
            ranks: the ranks of the run.
            pipe: the pipeline, before the split.

        Raises:
            StateError: other ranks resume an epoch, but this rank has no state of it.
            RuntimeError: the number of workers or the list of shards differs from that of rank 0.
            RankLostError: another rank does not arrive in time.
        """
        resumed_from = [checkpoint.seed for checkpoint in self._loaded if not checkpoint.is_over]
        seed = ranks.gather(
            resumed_from[0] if resumed_from else None, facts_of(pipe, self.group, workers=self._workers)
        )
        if seed is None:
            return
        if any(checkpoint.seed != seed for checkpoint in self._loaded) or not self._loaded:
            what = "a state of another epoch" if self._loaded else "no state"
            raise StateError(
                f"Another rank resumes in the middle of an epoch, but rank {ranks.rank} has {what}. Load the states "
                f"that all ranks have saved after the same step"
            )
        # A rank that was exhausted before the others waits for the next epoch again.
        self._loaded = [replace(checkpoint, is_over=False) for checkpoint in self._loaded]

    def find(self, pipe: Any, ranks: Ranks | None) -> None:
        """Determine the position from which this rank resumes, if a state was loaded.

        Args:
            pipe: the pipeline, before the split.
            ranks: the ranks of the run.

        Raises:
            StateError: the state belongs to another pipeline, cannot be resharded to this number of ranks and workers,
                or does not show whether the epoch is over on all ranks.
        """
        if not self._loaded:
            return
        loaded, self._loaded = self._loaded, []
        instance = self._instance(ranks)
        loaded = adopt(loaded, pipe, self._described, instance.ranks, amend=self._amend)
        if self.group.is_split and ranks is None:  # only the states show whether all ranks are done
            check_ranks(loaded, instance, pipe)
            is_over = all(checkpoint.is_over for checkpoint in loaded)
            loaded = [replace(checkpoint, is_over=is_over) for checkpoint in loaded]
        self.resumed_from = state_of_rank(loaded, pipe, instance)

    def refuse(self, pipe: Any, later_stages: Sequence[Any], dispatched: Any = None) -> None:
        """Determine whether the pipeline has a state, and whether it resumes by replay.

        Args:
            pipe: the pipeline of the workers.
            later_stages: the stages after it, in the main process.
            dispatched: the pipeline of the dispatching process, if there is one.
        """
        try:
            later_stages = [stage for stage in later_stages if declared(stage).process_boundary != "ranks"]
            reason = replay_reason(pipe, later_stages, dispatched)
        except StateError as error:
            self.refusal = str(error)  # the error itself would keep its frames alive
            return
        # Each worker replays its own items, unless stages of the main process change the items that the loop receives.
        if later_stages:
            self.replay_reason = reason
        else:
            self.replay_reason_of_workers = reason
        if self.resumed_from is not None and not self.resumed_from.is_over:
            self.resumed_from.log_replay(reason)
            if self.replay_reason and any(is_replayed(part.stages) for part in self.resumed_from.parts):
                raise StateError(
                    f"This state counts the items of each worker, but this loader must replay the items of all workers "
                    f"together, in the main process: {reason}"
                )
            if self.replay_reason_of_workers and self.resumed_from.replay is not None:
                raise StateError(
                    "This state counts the items of all workers together, but each worker of this loader replays its "
                    "own. Load it into a loader with the same stages in the main process"
                )

    def begin(self, seed_generator: Any, ranks: Ranks | None, left: Left = None) -> Checkpoint | None:
        """Begin an epoch: seed the loader's generator, and return the checkpoint from which the epoch resumes, if any.

        Args:
            seed_generator: the seed generator of the loader.
            ranks: the ranks of the run.
            left: how the loop has left the previous epoch.

        Raises:
            StateError: the selected epoch is not the one in which the state was saved.
            RankLostError: another rank has failed or left, or does not arrive in time.
            RuntimeError: the ranks cannot agree on a seed, and the loader has none.
        """
        resumed_from, self.resumed_from = self.resumed_from, None
        self._seed = None  # it begins this epoch
        self.is_resumed = resumed_from is not None and not resumed_from.is_over
        if resumed_from is not None and resumed_from.is_over and self._seeds_too and resumed_from.next is not None:
            seed_generator.seed(resumed_from.next)
        own = self._instance(ranks)
        if own.ranks > 1 and ranks is None and not self.is_resumed and is_drawn(seed_generator):
            raise RuntimeError(
                "The loader has no seed, and with distributed=(rank, world_size) the ranks cannot agree on one: "
                "each would shuffle the data differently before it takes its share. Call loader.seed(n) with the "
                "same n on every rank"
            )
        meet = None if ranks is None else ranks.meet
        self.seeds.begin(seed_generator, resumed_from, meet=meet, rank=self.given_rank, left=left)
        if own.ranks > 1:
            seed_generator.spawn(own.rank, inplace=True)
        return resumed_from if resumed_from is not None and resumed_from.parts else None

    def state_dict(
        self, source: LoopItems | None, ranks: Ranks | None, replayed: ReplayedItems | None
    ) -> dict[str, str]:
        """Return the state of the loop.

        Args:
            source: the source of the loop's items; ``None`` if no epoch has begun.
            ranks: the ranks of the run.
            replayed: counts the items, if the pipeline resumes by replay.

        Raises:
            StateError: there is no state.
        """
        if self.refusal:
            raise StateError(self.refusal)
        if source is None and self._loaded:
            loaded = self._loaded
            if self._pipe is not None:  # it may amend the run
                loaded = adopt(loaded, self._pipe, self._described, amend=self._amend)
            return state_of(loaded)
        checkpoint = self._checkpoint(source, ranks, replayed)
        if self._alike is not None and checkpoint.replay is None:
            checkpoint = of_all_ranks(checkpoint, self._alike)
        return state_of([checkpoint])

    def left(self, source: LoopItems, ranks: Ranks | None, replayed: ReplayedItems | None) -> Left:
        """Return how the loop has left its epoch before the next one begins; the arguments are as in `state_dict`."""
        if self._counted is None or not source.epoch or self._seed is not None:
            return None
        try:
            saved = self._checkpoint(source, ranks, replayed)
        except StateError:
            return UNKNOWN
        return steps_received(saved, self._counted)

    def _checkpoint(self, source: LoopItems | None, ranks: Ranks | None, replayed: ReplayedItems | None) -> Checkpoint:
        instance = self._instance(ranks)
        seeds, is_over = self.seeds, source is None or (source if replayed is None else replayed).is_over
        if is_over and self._seed is not None:  # the next epoch is the first of this seed
            seeds = EpochSeeds(epoch=-1, first=self._seed, next=self._seed, wanted=self.seeds.wanted)
        replay = None if source is None or replayed is None else replayed.state_dict()
        if source is None:
            parts = []
        elif self.replay_reason:
            parts = [WorkerState()] * max(self._workers, 1)
        else:
            parts = source.states()
        received = seeds.received.rows if self._counted is not None else ()
        return Checkpoint(
            stages=self._described,
            **{**vars(seeds), "phases": seeds.phases or self._phases, "received": received},
            is_over=is_over,
            rank=instance.rank,
            ranks=instance.ranks,
            workers=instance.workers,
            turn=0 if source is None or self.replay_reason else source.turn,
            parts=parts,
            replay=replay,
        )

    def _instance(self, ranks: Ranks | None) -> Instance:
        """Return this rank and its number of workers, even before the service has started."""
        return (self.group.rank if ranks is None else ranks.instance).on_worker(0, self._workers)
