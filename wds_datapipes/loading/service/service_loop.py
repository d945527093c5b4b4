"""The loop of a reading service: its workers, its ranks, and the epochs that it begins."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.epoch import NO_EPOCH, Epoch, seed_after
from wds_datapipes.errors import StateError
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, state_of
from wds_datapipes.loading.data_parallel_group import DataParallelGroup, given_rank, ranks_of_run
from wds_datapipes.loading.distributed import Ranks
from wds_datapipes.loading.loader_seed import is_drawn, seed_loader
from wds_datapipes.loading.rank_facts import fact_of_seed, facts_of
from wds_datapipes.loading.report import LoadingReport
from wds_datapipes.loading.service.periodic_reports import PeriodicReports, share_report
from wds_datapipes.loading.splitting import check_replicated, split_by_rank
from wds_datapipes.loading.state import LoaderState
from wds_datapipes.loading.workers.loop_items import DeliveredCount, LoopItems, Pipe
from wds_datapipes.pipes.foreign_stages import declared
from wds_datapipes.pipes.inspection import name_of
from wds_datapipes.pipes.sharding import check_batch_sizes
from wds_datapipes.pipes.state.pipeline_state import replay_reason
from wds_datapipes.received_epochs import UNKNOWN, Left
from wds_datapipes.seeds import seed_of
from wds_datapipes.types import Instance

Start = Callable[[Pipe, Instance], "tuple[Pipe, LoopItems]"]
"""Starts the workers of a pipeline; returns the part of the main process, and the stage that receives their items."""


class Loop:
    """The loop of a reading service over the items of this rank.

    Args:
        group: the ranks that share the data.
        workers: the number of worker processes.
        timeout_s: how long to wait for another rank, in seconds; None means half an hour.

    Attributes:
        group: the ranks that share the data, which the loader determines when it starts.
        state: what the loop loads and saves.
        epoch: the current epoch.
        items: the items that the workers send, once they have started.
        ranks: the ranks of the run, if they agree.
        resumed_from: the checkpoint from which the next epoch resumes, if any.
        refusal: the reason why there is no state, or "".
        replay_reason: the reason why each worker replays its pipeline to resume, or "".
        is_resumed: whether the current epoch was resumed mid-epoch.
    """

    def __init__(self, group: DataParallelGroup, workers: int, timeout_s: float | None) -> None:
        self.group = group
        self.state = LoaderState(group.rank.on_worker(0, workers))
        self.epoch = NO_EPOCH
        self.items: LoopItems | None = None
        self.ranks: Ranks | None = None
        self.resumed_from: Checkpoint | None = None
        self.refusal = ""
        self.replay_reason = ""
        self.is_resumed = False
        self._workers, self._timeout_s = workers, timeout_s
        self._agreement: Ranks | None = None
        self._reports: PeriodicReports | None = None
        self._given_rank: int | None = None  # by another reading service
        self._phases: list[dict[str, Any]] = []  # of the run that a loaded state continues
        self._seeds_too = False
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
        self.state.load(state, amend=amend)
        self._seeds_too = seeds_too

    def describe(self, pipe: Any, group: DataParallelGroup) -> None:
        """Record the pipeline, or its graph, before the split, and the ranks that share its data."""
        self.group = group
        self.state.rank = group.rank.on_worker(0, self._workers)
        self.state.describe(pipe)

    def expect(self, seed: int | None) -> None:
        """Record the seed that was set on the loader since the previous epoch began, or ``None``."""
        self._seed = seed

    def start(self, start: Start) -> Pipe:
        """Split the pipeline that was described between ranks and workers, and start the workers.

        Args:
            start: starts the workers.

        Returns:
            The part of the main process.

        Raises:
            StateError: the loaded state belongs to another pipeline, or the loop cannot resume from it.
            RankLostError: another rank does not arrive in time.
        """
        graph = self.state.graph
        if self.group.is_synchronized:
            self.ranks = Ranks(graph, self.group, self._timeout_s)
        check_replicated(graph, self.group)
        rank = self.group.rank if self.group.is_split else given_rank(graph)
        check_batch_sizes(graph.pipe, rank.ranks, 1)
        self._given_rank = rank.rank if rank.ranks > 1 and not self.group.is_split else None
        if self.ranks is not None:
            self._compare(self.ranks)
        elif self.group.is_split or rank.ranks > 1:
            agreement = Ranks(graph)
            agreement.compare(facts_of(graph, self.group, workers=self._workers))
            self._agreement = agreement if self.group.is_split else None  # else torchdata's service shares the seed
        if self.state.loaded:
            self.resumed_from = self._find()
        if self.group.is_split:
            split_by_rank(graph, rank)
        pipe, self.items = start(graph.pipe, rank)
        self.items.rank = rank.rank if self.ranks is None else self.ranks.rank
        return pipe

    def count(self, pipe: Pipe) -> Pipe:
        """Return the part of the main process with a stage that counts the items that the loop receives, if needed."""
        return pipe if pipe is self.items or self.refusal or self.items is None else DeliveredCount(pipe, self.items)

    def _find(self) -> Checkpoint:
        """Return the checkpoint from which this rank resumes."""
        self.state.loaded = self.state.adopted()
        if self.group.is_split and self.ranks is None:  # only the states show whether all ranks are done
            self.state.check_ranks()
            self.state.continue_on_all_ranks()
        found, self.state.loaded = self.state.resume(self._workers), []
        return found

    def _compare(self, ranks: Ranks) -> None:
        """Wait for all ranks, and find the epoch in which the run resumes; it is over if it is over on all of them.

        Raises:
            StateError: other ranks resume an epoch, but this rank has no state of it.
            RuntimeError: the number of workers or the list of shards differs from that of rank 0.
            RankLostError: another rank does not arrive in time.
        """
        resumed_from = [checkpoint.epoch.seed for checkpoint in self.state.loaded if not checkpoint.is_over]
        seed = ranks.gather(
            resumed_from[0] if resumed_from else None, facts_of(self.state.graph, self.group, workers=self._workers)
        )
        if seed is None:
            return
        if any(checkpoint.epoch.seed != seed for checkpoint in self.state.loaded) or not self.state.loaded:
            what = "a state of another epoch" if self.state.loaded else "no state"
            raise StateError(
                f"Another rank resumes in the middle of an epoch, but rank {ranks.rank} has {what}. Load the states "
                f"that all ranks have saved after the same step"
            )
        # A rank that was exhausted before the others waits for the next epoch again.
        self.state.loaded = [replace(checkpoint, is_over=False) for checkpoint in self.state.loaded]

    def refuse(self, pipe: Any, later_stages: Sequence[Any], dispatched: Any = None) -> None:
        """Determine whether the pipeline has a state, and whether it resumes by replay.

        Args:
            pipe: the pipeline of the workers.
            later_stages: the stages after it, in the main process.
            dispatched: the pipeline of the dispatching process, if there is one.
        """
        if later := [stage for stage in later_stages if declared(stage).process_boundary != "ranks"]:
            self.refusal = (
                f"{name_of(later[0])} runs in the main process, where no stage has a state. Move it before the "
                "workers, or into the loop; or read the loader with LoaderBatches, and put it after that"
            )
            return
        try:
            self.replay_reason = replay_reason(pipe, dispatched)
        except StateError as error:
            self.refusal = str(error)  # the error itself would keep its frames alive
            return
        if self.resumed_from is not None and not self.resumed_from.is_over:
            self.resumed_from.log_replay(self.replay_reason)

    def begin(self, seed_generator: Any, iter_reset_fn: Callable[[Pipe], Pipe] | None, pipe: Pipe) -> None:
        """Begin an epoch in all workers and on all ranks.

        Args:
            seed_generator: the seed generator of the loader.
            iter_reset_fn: the reset function of a preceding reading service.
            pipe: the part of the main process.

        Raises:
            StateError: the selected epoch is not the one in which the state was saved.
            RankLostError: another rank has failed or left, or does not arrive in time.
            RuntimeError: the ranks have different seeds, or none.
        """
        if self.items is None:
            raise RuntimeError("a ShardReadingService must be initialized before its first epoch")
        is_seeded = not is_drawn(seed_generator)
        if self._agreement is not None and not self.items.epoch and self.resumed_from is None and is_seeded:
            self._agreement.compare(fact_of_seed(seed_of(seed_generator)))
        is_known = is_seeded or self.resumed_from is not None
        resumed_from = self._begin(seed_generator, self._left(self.items))
        epoch = self.epoch if is_seeded else replace(self.epoch, next=None)
        self.items.current = epoch if is_known else None
        self.items.begin(seed_generator, resumed_from, iter_reset_fn, pipe)
        self.epoch = replace(self.epoch, next=seed_after(self.epoch.seed))
        seed_generator.seed(self.epoch.next)

    def _begin(self, seed_generator: Any, left: Left) -> Checkpoint | None:
        """Begin an epoch here, and return the checkpoint from which the workers resume it, if any."""
        resumed_from, self.resumed_from = self.resumed_from, None
        self._seed = None  # it begins this epoch
        self.is_resumed = resumed_from is not None and not resumed_from.is_over
        following = None if resumed_from is None or not resumed_from.is_over else resumed_from.epoch.next
        if self._seeds_too and following is not None:
            seed_generator.seed(following)
        own = self.state.rank
        if own.ranks > 1 and self.ranks is None and not self.is_resumed and is_drawn(seed_generator):
            raise RuntimeError(
                "The loader has no seed, and with distributed=(rank, world_size) the ranks cannot agree on one: "
                "each would shuffle the data differently before it takes its share. Call loader.seed(n) with the "
                "same n on every rank"
            )
        self.epoch = self._epoch_after(resumed_from, seed_generator, left)
        if own.ranks > 1:
            seed_generator.spawn(own.rank, inplace=True)
        return resumed_from if resumed_from is not None and resumed_from.parts else None

    def _epoch_after(self, resumed_from: Checkpoint | None, seed_generator: Any, left: Left) -> Epoch:
        """Return the epoch that begins or resumes, and seed the loader's generator with its seed."""
        before, wanted = self.epoch, self.epoch.wanted
        if resumed_from is not None:
            self._phases = resumed_from.phases
            before = resumed_from.epoch if wanted is None else replace(resumed_from.epoch, wanted=wanted)
            if not resumed_from.is_over:
                resumed_from.epoch.check_selected(wanted)
                if self.ranks is not None:
                    self.ranks.meet(0)
                seed_generator.seed(before.seed)
                return resumed_from.epoch
        if self.ranks is not None:
            seed_generator.seed(self.ranks.meet(seed_of(seed_generator)))
        if not before.precedes(seed_of(seed_generator)):
            self._phases = []
        epoch = before.follow(seed_of(seed_generator), left)
        seed_loader(seed_generator, epoch.seed, self._given_rank)
        return epoch

    def select(self, number: int) -> None:
        """Select the number of the next epoch."""
        self.epoch = replace(self.epoch, wanted=number)

    def state_dict(self) -> dict[str, str]:
        """Return the state between two items.

        Raises:
            StateError: there is no state.
        """
        if self.refusal:
            raise StateError(self.refusal)
        items = self.items if self.items is not None and self.items.epoch else None
        if items is None and self.state.loaded:
            return state_of(self.state.adopted(knows_ranks=False))  # the pipeline may amend the run
        return state_of([self._checkpoint(items)])

    def _left(self, items: LoopItems) -> Left:
        """Return how the loop leaves its epoch before the next one begins."""
        if not self.state.counts_steps or not items.epoch or self._seed is not None:
            return None
        try:
            return self.state.left(self._checkpoint(items))
        except StateError:
            return UNKNOWN

    def _checkpoint(self, items: LoopItems | None) -> Checkpoint:
        """Return the checkpoint of this rank.

        Args:
            items: the items of an epoch; None if no epoch has begun.
        """
        epoch, phases = self.epoch, self._phases
        is_over = items is None or items.is_over
        if is_over and self._seed is not None:  # the next epoch is the first of this seed
            epoch, phases = Epoch.before(self._seed, epoch.wanted), []
        if items is None:
            self.state.rank = self.group.rank.on_worker(0, self._workers)
            parts = list[WorkerState]()
        else:
            parts = items.states()
        return self.state.checkpoint(
            self.state.rank,
            epoch,
            parts,
            phases=phases,
            is_over=is_over,
            next_worker=0 if items is None else items.turn,
        )

    def begin_reports(self, service: weakref.ref[Any], every_s: float, *, calls: bool) -> None:
        """Begin to report at regular intervals, if a function is called or there are several ranks.

        Args:
            service: the service, whose ``on_report`` is called.
            every_s: the interval, in seconds.
            calls: whether it has such a function.
        """
        several = self.ranks if self.ranks is not None and self.ranks.size > 1 else None
        if self.items is not None and (calls or several is not None):
            self._reports = PeriodicReports(self.items, several, service, every_s)

    def report(self, *, all_ranks: bool) -> LoadingReport:
        """Return statistics of the workers so far, or of all ranks.

        Raises:
            RankLostError: the store does not respond.
            RuntimeError: the loop does not know the other ranks of the run.
        """
        report = LoadingReport(0, []) if self.items is None else self.items.report()
        if not (all_ranks and report.workers):
            return report
        if self.ranks is not None:
            return share_report(report, self.ranks, reads=True)
        if ranks_of_run() > 1:
            raise RuntimeError("report(all_ranks=True) requires ShardReadingService(distributed=True), or a group")
        return replace(report, workers=[report.total], dispatcher=None)

    def close(self) -> None:
        """End the workers and the reports, and notify the other ranks."""
        if self._reports is not None:
            self._reports.close()
        try:
            if self.ranks is not None:
                # The interpreter stores an uncaught exception until it ends.
                self.ranks.leave(sys.exc_info()[1] or getattr(sys, "last_value", None))
        finally:
            if self.items is not None:
                self.items.close()
