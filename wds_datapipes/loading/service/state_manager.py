"""The state of a reading service: the position of its loop, and how to resume there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import distributed as dist
from torchdata.datapipes.iter import FullSync

from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState
from wds_datapipes.loading.checkpoint.loader_states import checkpoints_in, text_of
from wds_datapipes.loading.checkpoint.resharding import state_of_rank
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.philox import SeedGenerator
from wds_datapipes.loading.rank_agreement import facts_of
from wds_datapipes.loading.seeding import EpochSeeds
from wds_datapipes.loading.service.split_checks import ranks_of_run
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.pipeline_state import replay_reason
from wds_datapipes.pipes.state.replay import ReplayedItems, is_replayed

__all__ = ["ItemSource", "StateManager", "describe_loader_pipeline"]


class ItemSource(Protocol):
    """Makes the items of the loop."""

    is_over: bool
    turn: int

    def states(self) -> list[WorkerState]:
        """Return where each worker would have to go on behind what the loop has."""


class StateManager:
    """Saves the state of a loop, and finds out where it goes on.

    Args:
        distributed: whether the service splits the data among ranks.
        workers: how many worker processes there are.

    Attributes:
        seeds: of the epochs.
        going_on: where the next epoch goes on, if a state was loaded and no epoch has begun since.
        refusal: why there is no state, or "" if there is one.
        replay_reason: why the pipeline resumes by replay, or "" if its position is known.
        is_resumed: whether the present epoch was begun in its middle.
    """

    def __init__(self, distributed: bool, workers: int) -> None:
        self.seeds = EpochSeeds()
        self.going_on: Checkpoint | None = None
        self.refusal = ""
        self.replay_reason = ""
        self.is_resumed = False
        self._distributed = distributed
        self._workers = workers
        self._described: list[str] = []
        self._loaded: list[Checkpoint] = []
        self._seeds_too = False
        self._seed: int | None = None
        self._first = 0

    @property
    def parts(self) -> Sequence[WorkerState | None]:
        """Where each worker goes on; None is the beginning of an epoch."""
        if self.going_on is None or not self.going_on.parts:
            return [None] * max(self._workers, 1)
        return self.going_on.parts

    def load(self, state: Any, *, seeds_too: bool = False) -> None:
        """Take a state, for a pipeline that is yet to be described.

        Args:
            state: of any of the loaders.
            seeds_too: whether the seed of the loader comes from it as well.

        Raises:
            StateError: it is none.
        """
        self._loaded = checkpoints_in(state)
        self._seeds_too = seeds_too

    def describe(self, pipe: Any) -> None:
        """Take note of the pipeline, before it is split."""
        self._described = describe_loader_pipeline(pipe)

    def expect(self, seed: int | None, *, is_shared: bool) -> None:
        """Take note of the seed that the loader was given since the last epoch began.

        Args:
            seed: it; None if there is none.
            is_shared: whether another reading service draws the seed that all ranks share from it.
        """
        self._seed = seed
        if seed is not None:
            is_drawn = is_shared or self._distributed
            self._first = SeedGenerator(seed).generate_shared_seed() if is_drawn else seed

    def compare(self, ranks: Ranks, pipe: Any) -> None:
        """Let the ranks gather, and find out in which epoch the run goes on: it is over when it is on all ranks.

        Args:
            ranks: of the run.
            pipe: the pipeline, before it is split.

        Raises:
            StateError: other ranks go on in the middle of an epoch that this rank has no state of.
            RuntimeError: this rank has another number of workers than rank 0, or another list of shards.
            RankLostError: another rank does not come in time.
        """
        going_on = [checkpoint.seed for checkpoint in self._loaded if not checkpoint.is_over]
        seed = ranks.gather(going_on[0] if going_on else None, facts_of(pipe, self._workers))
        if seed is None:
            return
        if any(checkpoint.seed != seed for checkpoint in self._loaded) or not self._loaded:
            what = "a state of another epoch" if self._loaded else "no state"
            raise StateError(
                f"Another rank goes on in the middle of an epoch, and rank {ranks.rank} has {what}. Load what "
                f"all ranks have saved between the same steps"
            )
        # A rank that had no more, while others had, waits for the next epoch once more.
        self._loaded = [replace(checkpoint, is_over=False) for checkpoint in self._loaded]

    def find(self, pipe: Any, ranks: Ranks | None) -> None:
        """Find out where this rank resumes, if a state was loaded.

        Args:
            pipe: the pipeline, before it is split.
            ranks: of the run.

        Raises:
            StateError: the state is of another pipeline, or cannot be dealt to so many ranks and workers.
        """
        if not self._loaded:
            return
        loaded, self._loaded = self._loaded, []
        for checkpoint in loaded:
            checkpoint.check(self._described, self._place(ranks)[1])
        self.going_on = state_of_rank(loaded, pipe, (*self._place(ranks), self._distributed, self._workers))
        if any(part is not None and is_replayed(part.state) for part in self.parts):
            raise StateError(
                "This state is one of StatefulShards, whose pipeline resumes by replay in each worker. Load it there"
            )

    def refuse(self, pipe: Any, behind: Sequence[Any]) -> None:
        """Find out whether there is a state, and whether it is one to replay.

        Args:
            pipe: what workers run.
            behind: the stages of the main process after it.
        """
        if self.refusal:
            return
        try:
            self.replay_reason = replay_reason(pipe, [stage for stage in behind if not isinstance(stage, FullSync)])
        except StateError as error:
            self.refusal = str(error)  # the error itself would keep all that its frames hold

    def begin(self, seed_generator: Any, ranks: Ranks | None) -> Checkpoint | None:
        """Begin an epoch: seed the generator of the loader; return where it goes on, if it does not begin anew.

        Raises:
            StateError: another epoch was chosen than that in which the state was saved.
            RankLostError: another rank will not come, or does not come in time.
        """
        going_on, self.going_on = self.going_on, None
        self._seed = None  # it begins this epoch
        beginning = None  # of an epoch, if it goes on where the one before has ended
        chosen = self.seeds.wanted  # since the state was loaded
        if going_on is not None and not going_on.is_over and chosen not in (None, going_on.epoch):
            raise StateError(
                f"set_epoch({chosen}) was called, and the state was saved in the middle of epoch {going_on.epoch}. To "
                f"go on there, call set_epoch({going_on.epoch}), or do not call it before this epoch"
            )
        if going_on is not None and going_on.is_over:
            wanted = going_on.wanted if chosen is None else chosen
            self.seeds.follow(epoch=going_on.epoch, first=going_on.first, next=going_on.next, wanted=wanted)
            if self._seeds_too and going_on.next is not None:
                seed_generator.seed(going_on.next)
            beginning = going_on if going_on.parts else None
            going_on = None
        meet = None if ranks is None else ranks.meet
        self.is_resumed = going_on is not None
        if going_on is None:
            self.seeds.begin(seed_generator, meet, rank=_rank())
        else:
            if meet is not None:
                meet(0)
            self.seeds.resume(
                seed_generator,
                seed=going_on.seed,
                epoch=going_on.epoch,
                first=going_on.first,
                engines=going_on.engines,
                wanted=going_on.wanted,
            )
        if ranks is not None:
            seed_generator.spawn(ranks.rank, inplace=True)
        return going_on or beginning

    def dumps(self, maker: ItemSource | None, ranks: Ranks | None, replayed: ReplayedItems | None = None) -> bytes:
        """Return the state of the loop, as JSON.

        Args:
            maker: makes its items; None if no epoch has begun.
            ranks: of the run.
            replayed: counts the items, if the pipeline resumes by replay.

        Raises:
            StateError: there is none.
        """
        if self.refusal:
            raise StateError(self.refusal)
        if maker is None and self._loaded:
            return text_of(self._loaded).encode()
        rank, size = self._place(ranks)
        seeds, is_over = self.seeds, maker is None or (maker if replayed is None else replayed).is_over
        if is_over and self._seed is not None:  # the next epoch is the first of this seed
            seeds = EpochSeeds()
            seeds.follow(epoch=-1, first=self._first, next=self._seed, wanted=self.seeds.wanted)
        replay = None if maker is None or replayed is None else replayed.state_dict()
        if maker is None:
            parts = []
        elif self.replay_reason:
            parts = [WorkerState(None)] * max(self._workers, 1)
        else:
            parts = maker.states()
        checkpoint = Checkpoint(
            stages=self._described,
            seed=seeds.seed,
            epoch=seeds.epoch,
            first=seeds.first,
            next=seeds.next,
            engines=seeds.engines,
            is_over=is_over,
            rank=rank,
            ranks=size,
            distributed=self._distributed,
            workers=self._workers,
            turn=0 if maker is None or self.replay_reason else maker.turn,
            parts=parts,
            wanted=seeds.wanted,
            replay=replay,
        )
        return text_of([checkpoint]).encode()

    def _place(self, ranks: Ranks | None) -> tuple[int, int]:
        """Return the rank, and among how many; also before the service has started."""
        if ranks is not None:
            return ranks.rank, ranks.size
        return (_rank(), ranks_of_run()) if self._distributed else (0, 1)


def describe_loader_pipeline(pipe: Any) -> list[str]:
    """Describe a pipeline, without the stage that torchdata appends for ranks."""
    return descriptions(pipe, without=(FullSync,))


def _rank() -> int:
    """Return the rank of this process, if it is one of several."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
