"""The worker process of a `ShardReadingService`: runs its pipeline on command and sends the items."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch

from wds_datapipes.datapipes import traverse_dps
from wds_datapipes.errors import WorkerDiedError
from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.epoch import EpochRun, EpochStart, call_with_pipeline
from wds_datapipes.loading.progress import SnapshotWriter
from wds_datapipes.loading.splitting import ONLY_RANK, RankIdentity, split_by_worker
from wds_datapipes.loading.torchdata_api import (
    DispatchedSource,
    extract_wrapper,
    find_dps,
    find_non_dispatching_branches,
    list_dps,
    replace_dp,
)
from wds_datapipes.loading.transport.errors import SENDABLE, SendableError
from wds_datapipes.loading.transport.protocol import Command, Kind
from wds_datapipes.loading.transport.receiver import Receiver
from wds_datapipes.loading.transport.sender import ItemRequest, ReceiverGone, Sender
from wds_datapipes.loading.transport.serialization import serialize
from wds_datapipes.loading.transport.shared_memory import new_memory
from wds_datapipes.loading.workers.connection import WorkerConnection
from wds_datapipes.pipes.stage import Stage
from wds_datapipes.pipes.state.shard_order import listings_before

#: The maximum number of messages of the dispatching process that a worker has not used yet. They are so small that
#: sending them never blocks.
DISPATCH_WINDOW = 4


@dataclass(frozen=True)
class WorkerJob:
    """The job of a worker process.

    Attributes:
        pipe: the pipeline, in the wrapper that pickles it; or, in transit, a `Payload` with all of the user's objects.
        info: torchdata's ``WorkerInfo``.
        window: the maximum number of messages ahead.
        together: the maximum number of items in a message.
        init_fn: the user's, called with the pipe and the worker.
        reset_fn: the user's, called with the pipe, the worker and the seed generator at the beginning of each epoch.
        resumed: the position at which the first epoch resumes.
        records_state: whether to send the state of the pipeline after each item.
        replay_reason: why the pipeline resumes by replay in the worker; "" if it does not.
        identity: the identity of the rank.
    """

    pipe: Any
    info: Any
    window: int
    together: int
    init_fn: Callable[[Any, Any], Any] | None = None
    reset_fn: Callable[[Any, Any, Any], Any] | None = None
    resumed: WorkerState | None = None
    records_state: bool = False
    replay_reason: str = ""
    identity: RankIdentity = ONLY_RANK

    def packed(self) -> WorkerJob:
        """Return the job in the form that is passed to another process."""
        payload = Payload((self.pipe, self.init_fn, self.reset_fn, self.resumed))
        return replace(self, pipe=payload, init_fn=None, reset_fn=None, resumed=None)

    def unpacked(self) -> WorkerJob:
        """Return the job in the form that the other process runs, with the pipeline itself.

        Raises:
            Exception: any exception of unpickling.
        """
        pipe, init_fn, reset_fn, resumed = self.pipe.open()
        return replace(self, pipe=extract_wrapper(pipe), init_fn=init_fn, reset_fn=reset_fn, resumed=resumed)


def run_worker(job: WorkerJob, channel: socket.socket, source: socket.socket | None, inherited: Sequence[Any]) -> None:
    """Run a worker until the main process has exited.

    Args:
        job: the job of the worker.
        channel: the connection to the main process.
        source: the connection to the dispatching process, if there is one.
        inherited: objects that a fork has inherited open, and that only other processes need.
    """
    with report_errors_of_worker(f"worker process {job.info.worker_id}", channel, job, inherited) as sender:
        job = job.unpacked()
        dispatched = None if source is None else DispatchedItems(source)
        pipe = split_by_worker(job.pipe, job.info, job.identity) if dispatched is None else split(job, dispatched)
        if job.init_fn is not None:
            pipe = call_with_pipeline("worker_init_fn", job.init_fn(pipe, job.info))
        Worker(pipe, job, sender, dispatched).run()


def split(job: WorkerJob, dispatched: DispatchedItems) -> Any:
    """Assign a worker its share of the data that it reads and of the items from the dispatching process."""
    graph = traverse_dps(job.pipe)
    for branch in find_non_dispatching_branches(graph):
        split_by_worker(branch, job.info, job.identity)
    (dummy,) = find_dps(graph, DispatchedSource)
    ((pipe, _),) = replace_dp(graph, dummy, dispatched).values()
    return pipe


class DispatchedItems(Stage[Any]):
    """The items that the dispatching process sends to this worker."""

    #: Only the loader can restart it; stages that restart their source check this.
    is_remote = True

    def __init__(self, source: socket.socket) -> None:
        self.connection = WorkerConnection("The dispatching process", Receiver(source, window=DISPATCH_WINDOW))
        self.is_lost = False

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.connection.items()
        except WorkerDiedError:
            self.is_lost = True
            raise


class Worker:
    """Runs a pipeline, an epoch at a time, and sends its items to the main process.

    Args:
        pipe: the pipeline.
        job: the job of the worker.
        sender: sends the items, and receives requests.
        dispatched: the part of the pipeline that another process runs, if there is one.
    """

    #: Whether all randomness is the same in every worker.
    shared = False

    def __init__(self, pipe: Any, job: WorkerJob, sender: Sender, dispatched: DispatchedItems | None = None) -> None:
        self.pipe = pipe
        self.job = job
        self.sender = sender
        self.dispatched = dispatched
        self.iterator: Iterator[Any] | None = None
        self.is_paused = False
        self.reported = 0
        self.resumed = job.resumed
        self.epoch: EpochRun | None = None
        self.snapshots: SnapshotWriter | None = None
        self.who = f"worker process {job.info.worker_id}"

    def run(self) -> None:
        """Handle requests and make items until the main process has exited."""
        while True:
            self.step()

    def step(self) -> None:
        """Perform the next action: handle a request, wait, or make items."""
        try:
            if self.sender.requests:
                self.run_request(self.sender.requests.popleft())
            elif self.iterator is None or self.is_paused:
                self.sender.wait()
            else:
                self.make_items(self.iterator)
            return
        except ReceiverGone:
            raise
        except SENDABLE:  # not lost: the main process raises it when it reaches this point
            error = pack_error(self.who, self.sender)
        # The resources held by the exception's frames, such as open files, are released by now.
        if self.dispatched is not None and self.dispatched.is_lost:
            self.sender.flush()
            while True:  # the main process knows more about the end of the dispatching process
                self.sender.wait()
        self.fail(error)

    def fail(self, error: bytes) -> None:
        """Send an exception, after the preceding items. Another epoch may follow.

        Args:
            error: the return value of `pack_error`.
        """
        self.iterator = None
        self.send_skipped()
        self.sender.send(Kind.ERROR, error)

    def make_items(self, iterator: Iterator[Any]) -> None:
        """Make items until a request arrives."""
        sender = self.sender
        while not sender.requests:
            if sender.is_full:
                sender.wait()
                continue
            try:
                item = next(iterator)
            except StopIteration:
                self.iterator = None
                self.send_skipped()
                if self.snapshots is not None and self.epoch is not None and self.epoch.spans_epochs:
                    sender.send_record(self.snapshots.snapshot())
                sender.send(Kind.END, serialize(self.split_lists()))
                return
            snapshot = None if self.snapshots is None else self.snapshots.snapshot()
            sent = sender.put(item, snapshot)
            del item  # frees its memory before the next one is made
            if sent:
                sender.receive_requests()
                self.send_skipped()

    def split_lists(self) -> list[Any]:
        """Return the lists split by the epoch's first pass, which must be the same in every worker."""
        # In a stream or a resumed epoch, each worker may be in a different pass.
        epoch = self.epoch
        listings = [] if epoch is None or epoch.spans_epochs or epoch.is_resumed else listings_before(self.pipe)
        return [listing.whole for listing in listings if listing.is_split]

    def run_request(self, request: ItemRequest) -> None:
        """Handle a request of the main process."""
        if request.command == Command.RESET:
            self.begin(request.epoch, *request.payload)
            return
        refusal = b""  # an exception after the last item, which is part of the answer
        try:
            # A pipeline is paused from its end, and resumed from its beginning.
            if request.command == Command.PAUSE:
                self.is_paused = True
                self.call_stages("pause", list_dps(traverse_dps(self.pipe)))
                self.pipe = self.pipe if request.payload is None else request.payload(self.pipe)
            elif request.command == Command.RESUME:
                self.pipe = self.pipe if request.payload is None else request.payload(self.pipe)
                self.call_stages("resume", reversed(list_dps(traverse_dps(self.pipe))))
                self.is_paused = False
            else:
                limit_fn, count = request.payload
                self.pipe = limit_fn(self.pipe, count)
            self.send_skipped()
        except SENDABLE:
            if self.iterator is not None:
                raise  # it follows the answer, and replaces the next item
            refusal = pack_error(self.who, self.sender)
        finally:
            self.sender.send(Kind.DONE, refusal)

    def begin(self, epoch: int, seed_generator: Any, iter_reset_fn: Callable[[Any], Any] | None) -> None:
        """Begin an epoch."""
        self.iterator = None  # closes the files of the previous epoch
        self.is_paused = False
        self.sender.begin(epoch)
        if self.dispatched is not None:
            self.dispatched.connection.expect(epoch)
        state, self.resumed = self.resumed, None
        job = self.job
        start = EpochStart(
            seed_generator,
            state,
            job.replay_reason,
            owns_generators=True,
            is_shared=self.shared,
            iter_reset_fn=iter_reset_fn,
            worker_reset_fn=job.reset_fn,
            info=job.info,
        )
        self.epoch = epoch_run = EpochRun(self.pipe, start, counters=self.sender.counters)
        self.pipe = epoch_run.pipe
        self.name_producer()
        self.snapshots = SnapshotWriter(epoch_run.items) if job.records_state else None
        self.sender.pack_records = None if self.snapshots is None else self.snapshots.pack
        if epoch_run.spans_epochs and not epoch_run.is_resumed:
            base = epoch_run.base
            self.sender.send_record(base if isinstance(base, str) else base.stages)
        self.iterator = iter(epoch_run.items)

    def name_producer(self) -> None:
        """Name the stage for errors about items that cannot be sent."""
        self.sender.producer = f"The pipeline, whose last stage here is {type(self.pipe).__name__},"

    def send_skipped(self) -> None:
        """Send the counts of skipped items, if they have changed."""
        counters = self.sender.counters
        if counters.entries != self.reported:
            self.reported = counters.entries
            self.sender.send(Kind.COUNTERS, serialize(counters.skipped()))

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
    """Prepare the process, and send the exception that ends the block to the main process.

    Exceptions such as ``SystemExit`` end the process as usual: the main process receives the exit code.
    """
    for each in inherited:
        each.close()
    torch.set_num_threads(1)
    try:
        sender = Sender(channel, window=job.window, together=job.together)
    except ReceiverGone:
        sys.exit()
    try:
        try:
            yield sender
        except ReceiverGone:
            raise
        except SENDABLE:  # not lost: the main process raises it again
            sender.send(Kind.COUNTERS, serialize(sender.counters.skipped()))
            sender.send(Kind.ERROR, pack_error(who, sender))
            while True:  # exiting would be reported as another error
                sender.wait()
        except BaseException:
            sender.flush()  # items made before it are not lost
            raise
    except ReceiverGone:
        pass


def pack_error(who: str, sender: Sender) -> bytes:
    """Return the current exception, with the shard that this process opened last, for `Sender.send`."""
    shard = f", whose last shard was {sender.counters.shard}" if sender.counters.shard else ""
    return serialize(SendableError(where=f"in {who}{shard}"))


class Payload:
    """Carries an object to a process, which unpickles it where it can report an error.

    A forked process simply has the object. A spawned process receives it through shared memory: ``Process.start``
    writes its arguments to a pipe, which holds 64 KiB and has both of its ends open here. If the process exits before
    reading all of it, as one does if its main module cannot be imported, the write would block indefinitely.

    Args:
        contents: the object.
    """

    def __init__(self, contents: Any) -> None:
        self._contents = contents
        self._descriptor: int | None = None

    def open(self) -> Any:
        """Return the object.

        Raises:
            Exception: any exception of unpickling.
        """
        return self._contents

    def close(self) -> None:
        """Close the descriptor, once the process has its own."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __reduce__(self) -> tuple[Callable[..., Payload], tuple[Any]]:
        data = ForkingPickler.dumps(self._contents)
        self.close()
        self._descriptor = new_memory(len(data))
        with os.fdopen(self._descriptor, "r+b", closefd=False) as file:
            file.write(data)
        return _Arrived, (DupFd(self._descriptor),)


class _Arrived(Payload):
    """A payload in the process that received it."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(None)
        with os.fdopen(descriptor.detach(), "rb") as file:
            file.seek(0)  # the sender has moved the file position
            self._data = file.read()

    def open(self) -> Any:
        return pickle.loads(self._data)  # noqa: S301  the sender is a part of this program
