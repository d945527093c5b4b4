"""A worker process of a `ShardReadingService`: runs its pipeline on command and sends the items."""

from __future__ import annotations

import os
import pickle
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wds_datapipes.loading.checkpoint.format import WorkerState
from wds_datapipes.loading.epoch_run import EpochRun, EpochStart, call_with_pipeline
from wds_datapipes.loading.snapshots import SnapshotWriter
from wds_datapipes.loading.splitting import split_by_worker
from wds_datapipes.loading.torchdata_api import WorkerInfo, extract_wrapper
from wds_datapipes.loading.transport.message_writer import MessageWriter
from wds_datapipes.loading.transport.protocol import Kind
from wds_datapipes.loading.transport.sender import ReceiverGone, Sender
from wds_datapipes.loading.transport.serialization import serialize
from wds_datapipes.loading.transport.shared_memory import new_memory
from wds_datapipes.pipes.state.shard_order import listings_before
from wds_datapipes.types import Instance

if TYPE_CHECKING:
    from wds_datapipes.loading.workers.dispatch import DispatchedItems


@dataclass(frozen=True)
class WorkerJob:
    """The job of a worker process.

    Attributes:
        pipe: the pipeline, in torchdata's wrapper for pickling.
        instance: the rank and the worker.
        window: the maximum number of messages ahead.
        together: the maximum number of items in a message.
        init_fn: the user's function, called with the pipe and the worker.
        reset_fn: the user's function, called with the pipe, the worker and the seed generator at the beginning of each
            epoch.
        resumed: the position at which the first epoch resumes.
        records_state: whether to send the state of the pipeline after each item.
        replay_reason: why the worker's pipeline resumes by replay, or "".
        name: the name of the process, for errors.
    """

    pipe: Any
    instance: Instance
    window: int
    together: int
    init_fn: Callable[[Any, Any], Any] | None
    reset_fn: Callable[[Any, Any, Any], Any] | None
    resumed: WorkerState | None
    records_state: bool
    replay_reason: str
    name: str


class Connections(NamedTuple):
    """The sockets of a worker.

    Attributes:
        main: the connection to the main process.
        source: in a worker, the connection to the dispatching process, if there is one.
        targets: in the dispatching process, the connections to the workers.
    """

    main: socket.socket
    source: socket.socket | None = None
    targets: Sequence[socket.socket] = ()


def run_worker(
    job: Payload, name: str, window: int, together: int, connections: Connections, inherited: Sequence[Any]
) -> None:
    """Run a worker until the main process exits; send exceptions to the main process.

    Exceptions such as ``SystemExit`` end the process as usual: the main process receives the exit code.

    Args:
        job: the `WorkerJob`.
        name: as in the job, for errors, even if the job cannot be unpickled.
        window: as in the job.
        together: as in the job.
        connections: the sockets of the worker.
        inherited: open objects that a fork has inherited, but only other processes need.
    """
    for each in inherited:
        each.close()
    torch.set_num_threads(1)
    main, source, targets = connections
    sender: Sender
    try:
        if targets:
            from wds_datapipes.loading.workers.dispatch import RoundRobinSender  # only this process needs it

            sender = RoundRobinSender(main, targets, together=together, name=name)
        else:
            sender = Sender(main, window=window, together=together, name=name)
        try:
            Worker(job.open(), sender, source).run()
        except ReceiverGone:
            raise
        except Exception:  # noqa: BLE001  the main process raises it again
            sender.send(Kind.COUNTERS, sender.pack_counters())
            sender.send(Kind.ERROR, sender.pack_error())
            while True:  # exiting would be reported as another error
                sender.wait()
        except BaseException:
            sender.flush()  # items produced before it are not lost
            raise
    except ReceiverGone:
        if targets:
            await_end(main)


def await_end(main: socket.socket) -> None:
    """Wait until the main process exits: it would report the exit of this process instead of the worker that ended."""
    poll = select.poll()
    poll.register(main, 0)  # its end is reported nevertheless
    poll.poll()


class Worker:
    """Runs a pipeline, one epoch at a time, and sends its items to the main process.

    Args:
        job: the job of the worker.
        sender: sends the items, and receives requests.
        source: the connection to the dispatching process, if there is one.
    """

    def __init__(self, job: WorkerJob, sender: MessageWriter, source: socket.socket | None = None) -> None:
        self.pipe = extract_wrapper(job.pipe)
        self.dispatched: DispatchedItems | None = None
        if source is not None:
            from wds_datapipes.loading.workers.dispatch import dispatched_items  # only such a worker needs it

            self.dispatched = dispatched_items(self.pipe)
            if self.dispatched is not None:
                self.dispatched.connect(source)
        self.info = WorkerInfo(job.instance.workers, job.instance.worker)
        self.pipe = split_by_worker(self.pipe, job.instance)
        if job.init_fn is not None:
            self.pipe = call_with_pipeline("worker_init_fn", job.init_fn(self.pipe, self.info))
        self.job = job
        self.sender = sender
        self.iterator: Iterator[Any] | None = None
        self.reported = 0
        self.resumed = job.resumed
        self.epoch: EpochRun | None = None
        self.snapshots: SnapshotWriter | None = None

    def run(self) -> None:
        """Handle requests and produce items until the main process exits."""
        while True:
            self.step()

    @property
    def is_waiting(self) -> bool:
        """Whether the next step would only wait."""
        return not self.sender.requests and (self.iterator is None or self.sender.is_full)

    def step(self) -> None:
        """Begin the next requested epoch; or else produce the items of a message, or wait until they are wanted."""
        try:
            if self.sender.requests:
                epoch, payload = self.sender.requests.popleft()
                self.begin(epoch, *payload)
            elif self.iterator is None or self.sender.is_full:
                self.sender.wait()
            else:
                self.make_items(self.iterator)
            return
        except ReceiverGone:
            raise
        except Exception:  # noqa: BLE001  the main process raises it when it reaches this point
            error = self.sender.pack_error()
        # The resources held by the exception's frames, such as open files, are released by now.
        self.iterator = None
        if self.dispatched is not None and self.dispatched.is_lost:
            self.sender.flush()
            while True:  # the main process reports how the dispatching process has ended
                self.sender.wait()
        self.send_skipped()
        self.sender.send(Kind.ERROR, error)

    def make_items(self, iterator: Iterator[Any]) -> None:
        """Produce items until a message of them was sent, or the last one."""
        sender, snapshots, snapshot = self.sender, self.snapshots, None
        for item in iterator:
            if snapshots is not None:
                snapshot = snapshots.snapshot()
            sent = sender.put(item, snapshot)
            del item  # free its memory before the next one is produced
            if sent:
                sender.receive_requests()
                self.send_skipped()
                return
        self.iterator = None
        self.send_skipped()
        if snapshots is not None and self.epoch is not None and self.epoch.spans_epochs:
            sender.send_record(snapshots.snapshot())
        sender.send(Kind.END, serialize(self.split_lists()))

    def split_lists(self) -> list[Any]:
        """Return the lists that the epoch's first pass has split, which must be the same in every worker."""
        # In a stream or a resumed epoch, each worker may be in a different pass.
        epoch = self.epoch
        listings = [] if epoch is None or epoch.spans_epochs or epoch.is_resumed else listings_before(epoch.graph)
        return [listing.whole for listing in listings if listing.is_split]

    def begin(
        self,
        epoch: int,
        seed_generator: Any,
        iter_reset_fn: Callable[[Any], Any] | None,
        current: Any,
        left_at: WorkerState | None,
    ) -> None:
        """Begin an epoch; of a stream, at the position where the loop has left the previous one, if it has."""
        self.iterator = None  # closes the files of the previous epoch
        self.reported = 0  # the last counts may have been in a message that the main process has dropped
        self.sender.begin(epoch)
        if self.dispatched is not None:
            self.dispatched.begin(epoch)
        state, self.resumed = left_at or self.resumed, None
        job = self.job
        start = EpochStart(
            seed_generator,
            state,
            job.replay_reason,
            owns_generators=True,
            iter_reset_fn=iter_reset_fn,
            worker_reset_fn=job.reset_fn,
            info=self.info,
            epoch=current,
        )
        self.epoch = epoch_run = EpochRun(self.pipe, start, counters=self.sender.counters)
        self.pipe = epoch_run.pipe
        self.sender.name_producer(f"The pipeline, whose last stage here is {type(self.pipe).__name__},")
        self.snapshots = SnapshotWriter(epoch_run.graph) if job.records_state else None
        self.sender.pack_records = None if self.snapshots is None else self.snapshots.pack
        if epoch_run.spans_epochs and not epoch_run.is_resumed:
            base = epoch_run.base
            self.sender.send_record(base if isinstance(base, str) else base.stages)
        self.iterator = iter(epoch_run.items)

    def send_skipped(self) -> None:
        """Send the counts of skipped items, if they have changed."""
        counters = self.sender.counters
        if counters.entries != self.reported:
            self.reported = counters.entries
            self.sender.send(Kind.COUNTERS, self.sender.pack_counters())


class Payload:
    """Carries an object to a process, which unpickles it where it can report errors.

    A forked process simply has the object. A spawned process receives it through shared memory: ``Process.start``
    writes its arguments to a pipe, which holds 64 KiB and whose ends are both open here. If the process exited before
    reading all of them, for example because its main module cannot be imported, the write would block forever.

    Args:
        contents: the object.
        is_pickled: whether ``contents`` is a pickle of the object, as in the receiving process.
    """

    def __init__(self, contents: Any, *, is_pickled: bool = False) -> None:
        self._contents, self._is_pickled = contents, is_pickled
        self._descriptor: int | None = None

    def open(self) -> Any:
        """Return the object.

        Raises:
            Exception: any exception of unpickling.
        """
        return pickle.loads(self._contents) if self._is_pickled else self._contents  # noqa: S301  made by this program

    def close(self) -> None:
        """Close the descriptor once the process has its own."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __reduce__(self) -> tuple[Callable[..., Payload], tuple[Any]]:
        data = ForkingPickler.dumps(self._contents)
        self.close()
        self._descriptor = new_memory(len(data))
        with os.fdopen(self._descriptor, "r+b", closefd=False) as file:
            file.write(data)
        return _receive, (DupFd(self._descriptor),)


def _receive(descriptor: Any) -> Payload:
    with os.fdopen(descriptor.detach(), "rb") as file:
        file.seek(0)  # the sender has moved the file position
        return Payload(file.read(), is_pickled=True)
