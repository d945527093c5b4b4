"""Steps of a run: the samples of each global batch, computed from a state and the dataset without reading data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from wds_datapipes.arguments import check_integer, checks_calls
from wds_datapipes.epoch import Epoch
from wds_datapipes.errors import StateError
from wds_datapipes.index.order.batch_share import WHOLE_EPOCH, RestOfEpoch
from wds_datapipes.index.order.indexed_shards import IndexedShards
from wds_datapipes.index.order.permutation import Numbers
from wds_datapipes.index.order.sample_order import LaneOrder
from wds_datapipes.index.order.substitutes import Substitutes
from wds_datapipes.index.order.timeline import RunTimeline
from wds_datapipes.index.read.dataset_reader import DatasetReader
from wds_datapipes.loading.checkpoint.amendment import adopt
from wds_datapipes.loading.checkpoint.format import Checkpoint, WorkerState, checkpoints_in
from wds_datapipes.loading.checkpoint.resharding import place_of
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart
from wds_datapipes.loading.splitting import split_by_rank, split_by_worker
from wds_datapipes.pipes.graph import PipelineGraph, graph_of
from wds_datapipes.pipes.inspection import call_of
from wds_datapipes.pipes.state.description import descriptions
from wds_datapipes.pipes.state.pipeline_state import first_uneven_stage, refusing_corrupt_states
from wds_datapipes.pipes.state.seeding import seed_stages
from wds_datapipes.redaction import hides_credentials, redact
from wds_datapipes.seeds import SeedGenerator
from wds_datapipes.tools.runs.logged_steps import LoggedSteps
from wds_datapipes.types import Instance, Sample
from wds_datapipes.user_warnings import warn_user


@hides_credentials
class StepSample(NamedTuple):
    """A sample of a step.

    Attributes:
        rank: the rank that received it.
        worker: the worker of this rank that read it; 0 without workers.
        dataset: the name of its dataset in a mixture, or ``""``.
        shard: the URL of its shard.
        number: its number in the shard, from 0.
        key: its key; ``""`` if keys were not requested.
        epoch: the epoch of the step, from 0.
        is_padding: whether it only fills the last batch.
        row: the number of its row in the epoch, from 0, if rows are planned; otherwise -1.
    """

    rank: int
    worker: int
    dataset: str
    shard: str
    number: int
    key: str
    epoch: int
    is_padding: bool
    row: int = -1


class RunSteps:
    """The samples of each step of a run on all ranks, computed from its state or, for a stream, from its log.

    Step t is the t-th global batch that the loop received, counted from 0 at the beginning of the run. If a state in
    the middle of a batch is resumed on other ranks or workers, the part before it counts as a step. A state contains
    how many steps a loop has received of each epoch that it left early, by ``break`` or ``islice``. For steps after
    the state, the loop is assumed to receive whole epochs.

    Args:
        pipeline: the pipeline as it was built for training, with `IndexedSamples` or ``.log_samples(positions=)``.
        state: a state of the run, from ``state_dict()`` of any loader.

    Raises:
        StateError: the state belongs to another pipeline, or the log of a stream is incomplete.
        ValueError: the pipeline has no such stage, or holds samples back after it.
    """

    def __init__(self, pipeline: Any, state: Mapping[str, Any] | str | bytes) -> None:
        saved, *others = checkpoints_in(state)
        if not saved.stages:
            raise StateError("This state was saved before the run began, so no epoch has a seed yet")
        source, *buffers = PipelineGraph(pipeline).stateful_stages()
        self.saved, self._rows = saved, self._find
        self._source: Any = None
        self._seed_of = saved.epoch.seed_of
        if source.phased_source() is None:
            adopt([saved], pipeline, descriptions(pipeline), saved.instance.ranks)
            self._rows = LoggedSteps(
                pipeline, saved.epoch.first, [each.epoch.received for each in (saved, *others)]
            ).rows
            return
        if buffers:
            raise ValueError(f"{call_of(buffers[0])} holds samples back, so its draws decide which samples a step has")
        if (uneven := first_uneven_stage(graph_of(pipeline).stages)) is not None:
            warn_user(
                f"If {call_of(uneven)} drops samples, the next samples of its worker come at an earlier step than is "
                "reported, because dropped samples are not recorded"
            )
        self._pipeline, self._source = _copy(pipeline)  # another run may read it
        adopt([saved], self._pipeline, descriptions(pipeline), saved.instance.ranks)
        source = self._source
        self._ranks = saved.instance.ranks
        check_steps([saved, *others], source.timeline)
        self._timeline, self._rest, epoch = source.timeline_on(self._ranks), _rest_in(saved), max(saved.epoch.number, 0)
        phases, begins = self._timeline.phases, self._rest.start - len(self._rest.missing)
        if self._rest != WHOLE_EPOCH and (epoch, begins) != (phases[-1].epoch, phases[-1].start):  # it was resharded
            step = self._timeline.step_at(epoch, begins)
            self._timeline = source.timeline_of([*phases, replace(phases[-1], epoch=epoch, start=begins, step=step)])
        self._order: tuple[Any, Any] = None, None

    def samples(self, step: int, *, keys: bool = True) -> list[StepSample]:
        """Return the samples of a step, in the order of the ranks.

        Args:
            step: the number of the step, from 0.
            keys: whether to read the keys, from the index of each shard.

        Raises:
            StateError: ``set_epoch`` was called in the run, so the seed of this step's epoch is unknown.
        """
        dataset, epoch, rows = self._rows(step)
        names, urls = dataset.names(rows[:, 2]), {n: redact(dataset.urls[n]) for n in np.unique(rows[:, 2]).tolist()}
        found_keys = dataset.keys(rows[:, 2], rows[:, 3]) if keys else [""] * len(names)
        return [
            StepSample(rank, worker, name, urls[shard], number, key, epoch, bool(padding), *row)
            for (rank, worker, shard, number, padding, *row), name, key in zip(
                rows.tolist(), names, found_keys, strict=True
            )
        ]

    def _find(self, step: int) -> tuple[IndexedShards, int, Numbers]:
        """Return the shards at a step, its epoch, and a row of numbers for each sample, as `LoggedSteps.rows` does."""
        (epoch, batch, _, _), (dataset, order, parts) = self._locate(step), self._batch(step)
        columns = list[Any]()
        is_padding = np.concatenate(parts) >= len(order)
        if self._source.unit == "row":
            expanded = self._source.expand(parts)
            parts, marks = [found for found, _ in expanded], [mark for _, own in expanded for mark in own]
            is_padding, columns = np.array([mark.is_padding for mark in marks]), [[mark.row for mark in marks]]
        positions = np.concatenate(parts)
        with DatasetReader(dataset) as reader:
            samples = Substitutes(dataset, order, reader.start, are_read=self._source.remainder != "keep")
            chunks = [chunk for _, chunk in samples.locate(positions)]
        for error in samples.errors.values():
            raise error
        shards, numbers = np.concatenate(chunks, axis=1)
        ranks = np.repeat(np.arange(len(parts)), [*map(len, parts)])
        is_padding |= np.isin(positions, [*samples.holes])
        workers = np.full(len(ranks), batch % max(self.saved.instance.workers, 1))
        return dataset, epoch, np.array([ranks, workers, shards, numbers, is_padding, *columns]).T[shards >= 0]

    def read(self, step: int) -> Iterator[Sample]:
        """Yield the samples of a step as the source does, in the order of the ranks.

        Raises:
            ShardError: a sample cannot be read.
        """
        dataset, _, rows = self._rows(step)
        with DatasetReader(dataset) as reader:
            for item in reader.stream([(rows[:, 2], rows[:, 3])]):
                if isinstance(item, Exception):
                    raise item
                if item is not None:
                    yield item

    def seen(self) -> tuple[int, dict[str, tuple[int, float]]]:
        """Return the number of steps until the state, and the samples and epochs of each dataset until then.

        Raises:
            StateError: the run reads a stream.
        """
        self._check_order()
        epoch, position = place_of([self.saved], self._source)[:2]
        self._order_of(epoch, self._timeline)
        seed = None if self._source.order == "sequential" else self._source.run_seed
        return self._timeline.step_at(epoch, position), self._timeline.seen(seed, epoch, position)

    def replay(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the items that the pipeline makes of the samples of a step, each with the rank that received it.

        Functions that draw from the generator of a sample, such as random crops, draw what they drew in the run. Those
        that draw from global generators do not.

        Raises:
            ShardError: a sample cannot be read.
            StateError: the run reads a stream.
        """
        self._check_order()
        epoch, batch, rest, size = self._locate(step)
        (dataset, _, parts), workers = self._batch(step), max(self.saved.instance.workers, 1)
        worker = batch % workers
        pipe, source = _copy(self._pipeline)
        source.exclude(dataset.exclusions)
        source.timeline = self._timeline.at(step)
        done = batch // workers * size // self._ranks
        state = WorkerState.of([{"yielded": done, "rest": rest.state_dict()}])
        for rank, positions in enumerate(parts):
            instance, seeds = Instance(rank, self._ranks, worker, workers), SeedGenerator(self._seed_of(epoch))
            split_by_worker(split_by_rank(pipe, instance), instance)
            seeds = seeds.spawn(rank) if self._ranks > 1 else seeds
            seeds = seeds.spawn(worker) if self.saved.instance.workers else seeds
            run = EpochRun(pipe, EpochStart(seeds, state, epoch=self._epoch(epoch, source.timeline)))
            for item in run.items if len(positions) else ():
                yield rank, item
                if source.snapshot()["yielded"] >= done + len(positions):
                    break

    def _check_order(self) -> None:
        if self._source is None:
            raise StateError("A stream has only a log of positions. Provenance and replay require IndexedSamples")

    def _batch(self, step: int) -> tuple[IndexedShards, LaneOrder, list[Numbers]]:
        """Return the dataset at a step with its exclusions, the order of the epoch, and each rank's positions."""
        epoch, batch, rest, size = self._locate(step)
        order = self._order_of(epoch, self._timeline.at(step))
        parts = self._source.find_batch(batch, self._ranks, rest, size)
        last = max(int(part.max(initial=0)) for part in parts)
        exclusions = self._source.exclusions.at(self.saved.phases, epoch, last)
        return self._source.dataset.excluding(exclusions), order, parts

    def _locate(self, step: int) -> tuple[int, int, RestOfEpoch, int]:
        """Return the epoch of a step, its batch in the epoch or in its rest, this rest, and the batch size."""
        check_integer("step", step, 0)
        phase, epoch, batch = self._timeline.locate(step)
        rest = WHOLE_EPOCH
        if phase.start and epoch == phase.epoch:
            rest = RestOfEpoch(phase.start, (), self._timeline.end_of(epoch))
            if (
                phase is self._timeline.phases[-1]
                and self._rest != WHOLE_EPOCH
                and epoch == max(self.saved.epoch.number, 0)
            ):
                rest = self._rest
        return epoch, batch, rest, phase.batch

    def _epoch(self, number: int, timeline: RunTimeline) -> Epoch:
        """Return an epoch of the run according to a timeline."""
        return Epoch(self.saved.epoch.first, number, self._seed_of(number), received=timeline.received)

    def _order_of(self, epoch: int, timeline: RunTimeline) -> Any:
        """Return the order of an epoch according to the timeline at that time; the last one is kept."""
        if self._order[0] != (known := (epoch, timeline.phases, timeline.received)):
            self._source.timeline = timeline
            seed_stages(self._pipeline, SeedGenerator(self._seed_of(epoch)), self._epoch(epoch, timeline))
            self._order = known, self._source.order_of_epoch()
        return self._order[1]


def check_steps(saved: Sequence[Checkpoint], timeline: RunTimeline) -> None:
    """Check that the states of some ranks determine the steps of a run.

    Raises:
        StateError: the loops of the ranks have left their epochs at different steps; or epochs were repeated in a run
            that was amended.
    """
    if any(each.epoch.received != saved[0].epoch.received for each in saved):
        raise StateError(
            "The loops of the ranks have left their epochs at different steps, so there are no steps of the whole run"
        )
    changes = sum("start" in each or "excluded" in each for each in saved[0].phases)
    if changes > 1 and not timeline.received.rises:
        raise StateError(
            "set_epoch() has repeated epochs of this run, whose data, batches or exclusions have changed. The steps of "
            "such a run are unknown"
        )


@checks_calls
def explain(pipeline: Any, state: Mapping[str, Any] | str | bytes, step: int) -> list[StepSample]:
    """Return the samples that the loop received at a step of a run, on all ranks.

    With `IndexedSamples`, nothing is recorded during training: a state and the dataset determine each step, before or
    after the state. The steps of a stream are in the log of ``.log_samples(positions=)``. No data is read, only the
    index of each shard, for the keys.

    Args:
        pipeline: the pipeline as it was built for training.
        state: a state of the run, from ``state_dict()`` of any loader.
        step: the number of the step, counted from 0 at the beginning of the run.

    Raises:
        StateError: the state belongs to another pipeline or does not determine the seed of the step's epoch, or the
            log lacks the step.
        ValueError: the pipeline has neither `IndexedSamples` nor a log, or holds samples back after it.

    Examples:
        >>> from wds_datapipes.testing import build_shard
        >>> _ = build_shard("a.tar", [{"__key__": f"{n}", "cls": f"{n}"} for n in range(8)])
        >>> dp = IndexedSamples("a.tar", global_batch_size=2).batch(2)
        >>> data = StatefulShards(dp, seed=3)
        >>> batches = [[sample["__key__"] for sample in batch] for batch in data]
        >>> [sample.key for sample in explain(dp, data.state_dict(), step=2)] == batches[2]
        True
    """
    return RunSteps(pipeline, state).samples(step)


def _copy(pipeline: Any) -> tuple[Any, Any]:
    """Return a copy of a pipeline and its source, which shares the shards: there may be millions of them."""
    shards = PipelineGraph(pipeline).stateful_stages()[0].dataset
    copied = deepcopy(pipeline, {id(shards): shards})
    return copied, PipelineGraph(copied).stateful_stages()[0]


@refusing_corrupt_states()
def _rest_in(saved: Checkpoint) -> RestOfEpoch:
    """Return the rest of the epoch that the ranks of a state share."""
    stages = [part.stages for part in saved.parts if part.stages and not saved.is_over]
    return RestOfEpoch.from_state(next((each[0]["rest"] for each in stages if each[0] and "rest" in each[0]), None))
