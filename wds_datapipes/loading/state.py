"""The state of a loader: what it loads, what each worker resumes from, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wds_datapipes.epoch import Epoch
from wds_datapipes.loading.checkpoint.amendment import adopt, begin_run
from wds_datapipes.loading.checkpoint.counted_epoch import without_counted_epoch
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, checkpoints_in
from wds_datapipes.loading.checkpoint.received import counts_steps, steps_received
from wds_datapipes.loading.checkpoint.resharding import check_ranks, of_all_ranks, state_of_rank
from wds_datapipes.pipes.graph import graph_of
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.pipeline_state import difference_of_ranks
from wds_datapipes.received_epochs import Left
from wds_datapipes.types import Instance


class LoaderState:
    """Loads and saves the states of a loader, whatever runs its workers.

    A state is loaded, adopted by the pipeline, checked against the ranks, and resharded if the numbers of ranks or
    workers differ. The result holds what each worker resumes from. Between two items, the positions of the workers are
    collected into a state.

    Args:
        rank: this rank, and its number of workers.
        pipe: the pipeline or its graph, before it is split, if it is known.

    Attributes:
        loaded: the checkpoints in the loaded state, until an epoch begins from them.
        phases: the history of a run that begins with the pipeline, or of the run that it has adopted.
        graph: the pipeline as it was described.
        counts_steps: whether its states record the steps that the loop has received.
    """

    def __init__(self, rank: Instance, pipe: Any = None) -> None:
        self.rank = rank
        self.loaded: list[Checkpoint] = []
        self.phases: list[dict[str, Any]] = []
        self.counts_steps = self._is_alike = self._amends = False
        self.graph: Any = None
        self._stages: list[str] = []
        if pipe is not None:
            self.describe(pipe)

    def describe(self, pipe: Any) -> None:
        """Record the pipeline, before it is split."""
        self.graph = graph = graph_of(pipe)
        self._stages, self.phases = descriptions(graph), begin_run(graph)
        self.counts_steps, self._is_alike = counts_steps(graph), not difference_of_ranks(graph)

    def load(self, state: Any, *, amend: bool = False) -> None:
        """Load a state of any of the loaders, which the pipeline adopts when it is known.

        Args:
            state: the state.
            amend: whether the pipeline may change the run.

        Raises:
            StateError: the argument is not a state.
        """
        self.loaded, self._amends = checkpoints_in(state), amend

    def load_and_check(self, state: Any, seed: int, worker: Instance | None, *, amend: bool = False) -> None:
        """Load a state into a loader whose pipeline, ranks and seed are known; an error leaves the loaded one.

        Args:
            state: the state. If a trainer has counted its epoch, that is over.
            seed: the seed of the loader.
            worker: the instance of this process, if it is a worker; only the main process has the states of all.
            amend: whether the pipeline may change the run.

        Raises:
            StateError: the argument is not a state, or belongs to another pipeline, seed or rank.
        """
        loaded = self._adopt(checkpoints_in(state), self.rank.ranks, amend=amend)
        for checkpoint in loaded:
            checkpoint.check_run(seed, worker)
        if worker is None:
            check_ranks(loaded, self.rank, self.graph)
            loaded = without_counted_epoch(loaded, state, self.graph)
        self.loaded = loaded
        self.continue_on_all_ranks()
        if worker is None or len(loaded[0].phases) > len(self.phases):
            self.phases = loaded[0].phases or self.phases

    def check(self, state: Any) -> None:
        """Check that a state, which the workers load, belongs to the pipeline and this rank; continue its run.

        Raises:
            StateError: it does not.
        """
        loaded = self._adopt(checkpoints_in(state), self.rank.ranks)
        check_ranks(loaded, self.rank, self.graph)
        self.phases = loaded[0].phases or self.phases

    def adopted(self, *, knows_ranks: bool = True) -> list[Checkpoint]:
        """Return the loaded checkpoints for this pipeline, which continues their run.

        Args:
            knows_ranks: whether the number of ranks is known, on which sizes of batches may depend.

        Raises:
            StateError: they belong to another pipeline.
        """
        return self._adopt(self.loaded, self.rank.ranks if knows_ranks else None, amend=self._amends)

    def _adopt(self, loaded: list[Checkpoint], ranks: int | None, *, amend: bool = False) -> list[Checkpoint]:
        if self.graph is None or not loaded:
            return loaded
        return adopt(loaded, self.graph, self._stages, ranks, amend=amend)

    def check_ranks(self) -> None:
        """Check that the loaded state shows where this rank resumes.

        Raises:
            StateError: it is not the state of this rank, or does not show whether other ranks are in the same epoch.
        """
        check_ranks(self.loaded, self.rank, self.graph)

    def continue_on_all_ranks(self) -> None:
        """Let the epoch continue on all ranks if it is over on some of them only."""
        if not all(checkpoint.is_over for checkpoint in self.loaded):
            self.loaded = [replace(checkpoint, is_over=False) for checkpoint in self.loaded]

    def resume(self, workers: int) -> Checkpoint:
        """Return what the workers of this rank resume from.

        Args:
            workers: their number.

        Raises:
            StateError: the state of a rank is missing, or the pipeline cannot be resharded.
        """
        if self.loaded[0].is_of_worker:
            return self.loaded[0]
        return state_of_rank(self.loaded, self.graph, self.rank.on_worker(0, workers))

    def checkpoint(
        self,
        instance: Instance,
        epoch: Epoch,
        parts: Sequence[WorkerState],
        *,
        phases: Sequence[Any] = (),
        **facts: Any,
    ) -> Checkpoint:
        """Collect the positions of the workers of this rank.

        Args:
            instance: this rank, and its number of workers; or a worker that saves its own state.
            epoch: the epoch.
            parts: the position of each worker.
            phases: the history of the run, if another one has begun than that of ``phases``.
            facts: other fields of the checkpoint.
        """
        saved = Checkpoint(
            stages=self._stages,
            epoch=epoch if self.counts_steps else epoch.without_record(),
            phases=[*(phases or self.phases)],
            parts=[*parts],
            instance=instance,
            **facts,
        )
        return of_all_ranks(saved, self.graph) if self._is_alike else saved

    def left(self, saved: Checkpoint) -> Left:
        """Return how a loop leaves the epoch of a checkpoint; None if it has received all of it."""
        return steps_received(saved, self.graph) if self.counts_steps else None
