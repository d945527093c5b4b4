"""The worker process of a `ShardReadingService`: runs its pipeline on command and sends the items."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchdata.dataloader2.graph import find_dps, list_dps, replace_dp, traverse_dps
from torchdata.dataloader2.graph._serialization import extract_wrapper
from torchdata.dataloader2.utils.dispatch import _DummyIterDataPipe, find_non_dispatching_branches

from wds_datapipes.counters import COUNTERS
from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.rank_and_worker import ONLY_RANK, RankIdentity, split_by_worker
from wds_datapipes.loading.seeding import call_with_pipeline, reset_pipeline
from wds_datapipes.loading.torchdata_patches.worker_processes import SENDABLE, SendableError
from wds_datapipes.loading.transport.protocol import Command, Kind
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import ItemRequest, ReceiverGone, Sender
from wds_datapipes.loading.transport.serialization import Serializer
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.loading.workers.payload import Payload
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.pipeline_state import load_state, record_beginning, record_state, spans_epochs
from wds_datapipes.pipes.state.recording import Recorder
from wds_datapipes.pipes.state.shard_order import listings_before

__all__ = ["DISPATCH_WINDOW", "Worker", "WorkerJob", "failure", "report_errors_of_worker", "run_worker"]

#: How many messages of the dispatching process a worker may have before it uses them. They are small enough that
#: sending them never blocks.
DISPATCH_WINDOW = 4


@dataclass(frozen=True)
class WorkerJob:
    """What a process is to do.

    Attributes:
        pipe: the pipeline, in the wrapper that pickles it; or, on the way, a parcel with all that is the user's.
        info: torchdata's ``WorkerInfo``.
        window: how many messages it may be ahead.
        together: how many items may share a message.
        init_fn: the user's, called with the pipe and the worker.
        reset_fn: the user's, called with the pipe, the worker and the seed generator at the beginning of each epoch.
        resumed: where the first epoch goes on.
        tells_state: whether to record where the pipeline is.
        place: of the rank.
    """

    pipe: Any
    info: Any
    window: int
    together: int
    init_fn: Callable[[Any, Any], Any] | None = None
    reset_fn: Callable[[Any, Any, Any], Any] | None = None
    resumed: WorkerState | None = None
    tells_state: bool = False
    place: RankIdentity = ONLY_RANK

    def parcelled(self) -> WorkerJob:
        """Return the job as it is given to another process."""
        parcel = Payload((self.pipe, self.init_fn, self.reset_fn, self.resumed))
        return replace(self, pipe=parcel, init_fn=None, reset_fn=None, resumed=None)

    def opened(self) -> WorkerJob:
        """Return the job as the other process does it, with the pipeline itself.

        Raises:
            Exception: whatever unpickling raises.
        """
        pipe, init_fn, reset_fn, resumed = self.pipe.open()
        return replace(self, pipe=extract_wrapper(pipe), init_fn=init_fn, reset_fn=reset_fn, resumed=resumed)


def run_worker(job: WorkerJob, channel: socket.socket, source: socket.socket | None, inherited: Sequence[Any]) -> None:
    """Run a worker until the main process has gone.

    Args:
        job: what it is to do.
        channel: where its items go.
        source: where the items of the dispatching process come from, if there is one.
        inherited: what a fork has left open here, and only others need.
    """
    with report_errors_of_worker(f"worker process {job.info.worker_id}", channel, job, inherited) as outlet:
        job = job.opened()
        dispatched = None if source is None else DispatchedItems(source)
        pipe = split_by_worker(job.pipe, job.info, job.place) if dispatched is None else split(job, dispatched)
        if job.init_fn is not None:
            pipe = call_with_pipeline("worker_init_fn", job.init_fn(pipe, job.info))
        Worker(pipe, job, outlet, dispatched).run()


def split(job: WorkerJob, dispatched: DispatchedItems) -> Any:
    """Give a worker its share of what it reads itself, and what the dispatching process sends to it."""
    graph = traverse_dps(job.pipe)
    for branch in find_non_dispatching_branches(graph):
        split_by_worker(branch, job.info, job.place)
    (dummy,) = find_dps(graph, _DummyIterDataPipe)
    ((pipe, _),) = replace_dp(graph, dummy, dispatched).values()
    return pipe


class DispatchedItems(Stage[Any]):
    """What the dispatching process sends to this worker."""

    #: Only the loader can begin it again; stages that begin their source again themselves ask for this.
    is_remote = True

    def __init__(self, source: socket.socket) -> None:
        self.link = WorkerConnection("The dispatching process", Receiver(source, window=DISPATCH_WINDOW))
        self.is_lost = False

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.link.items()
        except WorkerDiedError:
            self.is_lost = True
            raise


class Worker:
    """Runs a pipeline, an epoch at a time, and sends its items to the main process.

    Args:
        pipe: the pipeline.
        job: what there is to do.
        outlet: where the items go, and where orders come from.
        dispatched: the part of the pipeline that another process runs, if there is one.
    """

    #: Whether all that is random is the same in every worker.
    shared = False

    def __init__(self, pipe: Any, job: WorkerJob, outlet: Sender, dispatched: DispatchedItems | None = None) -> None:
        self.pipe = pipe
        self.job = job
        self.outlet = outlet
        self.dispatched = dispatched
        self.iterator: Iterator[Any] | None = None
        self.is_paused = False
        self.told = 0
        self.resumed = job.resumed
        self.is_resumed = False  # whether this epoch was begun in another run
        self.recorder: Recorder | None = None
        self.lasts = False  # whether the next epoch goes on where this one ends
        self.who = f"worker process {job.info.worker_id}"

    def run(self) -> None:
        """Do what the main process says, until it has gone."""
        while True:
            self.step()

    def step(self) -> None:
        """Do what is next, until something else is."""
        try:
            if self.outlet.orders:
                self.obey(self.outlet.orders.popleft())
            elif self.iterator is None or self.is_paused:
                self.outlet.wait()
            else:
                self.work(self.iterator)
            return
        except ReceiverGone:
            raise
        except SENDABLE:  # it is not lost: the main process raises it, if it comes that far
            told = failure(self.who)
        # What the exception held, such as too many open files, is given back by now.
        if self.dispatched is not None and self.dispatched.is_lost:
            self.outlet.flush()
            while True:  # the main process knows more about the end of the dispatching one
                self.outlet.wait()
        self.fail(told)

    def fail(self, told: bytes) -> None:
        """Send an exception, after the items before it. Another epoch may follow.

        Args:
            told: what `failure` returned.
        """
        self.iterator = None
        self.tell_ledger()
        self.outlet.say(Kind.ERROR, told)

    def work(self, iterator: Iterator[Any]) -> None:
        """Make items until something comes in between."""
        outlet = self.outlet
        while not outlet.orders:
            if outlet.is_full:
                outlet.wait()
                continue
            try:
                item = next(iterator)
            except StopIteration:
                self.iterator = None
                self.tell_ledger()
                if self.lasts and self.recorder is not None:
                    outlet.record(record_state(self.pipe, self.recorder, is_first=True))
                outlet.say(Kind.END, _serialize(self.listed()))
                return
            record = None if self.recorder is None else record_state(self.pipe, self.recorder)
            sent = outlet.put(item, record)
            del item  # its memory is free while the next one is made
            if sent:
                outlet.listen()
                self.tell_ledger()

    def listed(self) -> list[Any]:
        """Return what the epoch's first pass has split, which has to be the same in every worker."""
        # In a stream, and where an epoch is resumed, each worker may be in another pass.
        listings = [] if spans_epochs(self.pipe) or self.is_resumed else listings_before(self.pipe)
        return [listing.whole for listing in listings if listing.is_split]

    def obey(self, order: ItemRequest) -> None:
        """Do what the main process says."""
        if order.command == Command.RESET:
            self.begin(order.epoch, *order.payload)
            return
        refusal = b""  # what is raised after the last item, which is part of the answer
        try:
            # A pipe is paused from its end, and goes on from its beginning.
            if order.command == Command.PAUSE:
                self.is_paused = True
                self.call_stages("pause", list_dps(traverse_dps(self.pipe)))
                self.pipe = self.pipe if order.payload is None else order.payload(self.pipe)
            elif order.command == Command.RESUME:
                self.pipe = self.pipe if order.payload is None else order.payload(self.pipe)
                self.call_stages("resume", reversed(list_dps(traverse_dps(self.pipe))))
                self.is_paused = False
            else:
                limit_fn, count = order.payload
                self.pipe = limit_fn(self.pipe, count)
            self.tell_ledger()
        except SENDABLE:
            if self.iterator is not None:
                raise  # it follows the answer, and comes instead of the next item
            refusal = failure(self.who)
        finally:
            self.outlet.say(Kind.DONE, refusal)

    def begin(self, epoch: int, seed_generator: Any, iter_reset_fn: Callable[[Any], Any] | None) -> None:
        """Begin an epoch."""
        self.iterator = None  # closes what the last one has open
        self.is_paused = False
        self.outlet.begin(epoch)
        if self.dispatched is not None:
            self.dispatched.link.expect(epoch)
        self.pipe = reset_pipeline(
            self.pipe,
            self.job.info,
            seed_generator,
            iter_reset_fn=iter_reset_fn,
            worker_reset_fn=self.job.reset_fn,
            shared=self.shared,
            mark=None if self.resumed is None else self.resumed.mark,
        )
        self.name_maker()
        resumed, self.resumed = self.resumed, None
        self.is_resumed = resumed is not None
        self.recorder = Recorder() if self.job.tells_state else None
        load_state(self.pipe, None)
        self.lasts = self.job.tells_state and spans_epochs(self.pipe)
        if self.lasts and resumed is None:
            self.outlet.record(record_beginning(self.pipe))
        if resumed is not None:
            resumed.load(self.pipe)
        self.iterator = iter(self.pipe)

    def name_maker(self) -> None:
        """Tell which stage is to blame for an item that cannot be sent."""
        self.outlet.maker = f"The pipeline, whose last stage here is {type(self.pipe).__name__},"

    def tell_ledger(self) -> None:
        """Send what was passed over, if anything was since the last time."""
        if COUNTERS.entries != self.told:
            self.told = COUNTERS.entries
            self.outlet.say(Kind.COUNTERS, _serialize(COUNTERS.skipped()))

    @staticmethod
    def call_stages(name: str, stages: Any) -> None:
        """Call a method of every stage that has it."""
        for stage in stages:
            if callable(method := getattr(stage, name, None)):
                method()


@contextmanager
def report_errors_of_worker(
    who: str, channel: socket.socket, job: WorkerJob, inherited: Sequence[Any]
) -> Iterator[Sender]:
    """Prepare the process, and tell the main process of the exception that ends the block.

    ``SystemExit`` and its like end the process, as they should: the main process sees the exit code.
    """
    for each in inherited:
        each.close()
    torch.set_num_threads(1)
    COUNTERS.clear()
    try:
        outlet = Sender(channel, window=job.window, together=job.together)
    except ReceiverGone:
        sys.exit()
    COUNTERS.on_shard = outlet.page.note
    try:
        try:
            yield outlet
        except ReceiverGone:
            raise
        except SENDABLE:  # it is not lost: the main process raises it again
            outlet.say(Kind.COUNTERS, _serialize(COUNTERS.skipped()))
            outlet.say(Kind.ERROR, failure(who))
            while True:  # the end of this process would be taken for another fault
                outlet.wait()
        except BaseException:
            outlet.flush()  # what was made before counts
            raise
    except ReceiverGone:
        pass


def failure(who: str) -> bytes:
    """Return the exception that is handled now, with the shard this process opened last, for `Sender.say`."""
    shard = f", whose last shard was {COUNTERS.shard}" if COUNTERS.shard else ""
    return _serialize(SendableError(where=f"in {who}{shard}"))


def _serialize(value: object) -> bytes:
    return b"".join(Serializer().pack(value).parts)
